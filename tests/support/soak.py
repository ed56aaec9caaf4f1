"""How long the long forms of tests go on: short in the suite, long where scripts/soak runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_VARIABLE = "SHARDNET_SOAK_S"
"""What scripts/soak sets."""


def is_soak() -> bool:
    """Whether scripts/soak runs this."""
    return _VARIABLE in os.environ


def cases(usual: Sequence[T], more: Sequence[T]) -> list[T]:
    """Parameters of a test: the usual ones, and in the long form `more`."""
    return [*usual, *more] if is_soak() else [*usual]


def examples(usual: int) -> int:
    """How many examples a test draws: ten times the usual number in the long form."""
    return 10 * usual if is_soak() else usual


def soak_s(usual_s: float) -> float:
    """Seconds that a test goes on which goes on as long as one likes."""
    return float(os.environ.get(_VARIABLE, usual_s))
