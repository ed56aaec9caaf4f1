"""Durations as people and programs write them: 90, 30m, 1h30m, 300ms."""

from __future__ import annotations

import re
from typing import Final

MOST_S: Final = 366 * 86400.0
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
MOST_CHARACTERS: Final = 64


def parse_duration(text: str) -> float:
    """Return a duration in seconds, at most MOST_S; a number without a unit is seconds.

    Raises ValueError for what is none.
    """
    written = text.strip()
    parts = _PART.findall(written) if len(written) <= MOST_CHARACTERS else []
    if parts and "".join(number + unit for number, unit in parts) == written:
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    elif _NUMBER.fullmatch(written):
        seconds = float(written)
    else:
        raise ValueError(f"{written[:MOST_CHARACTERS]!r} is no duration such as 30m, 1h30m or 90")
    return min(seconds, MOST_S)
