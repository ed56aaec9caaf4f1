"""When a request that is turned away should come again, by how fast others have ended. Pure."""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final

from shardnet.api.server.errors import RETRY_S

MAX_RETRY_S: Final = 60
_REMEMBERED: Final = 64


class Pace:
    """How fast requests end. Times are of any clock, in seconds.

    Each request that is turned away is told of another place: who comes again together would be
    turned away together.
    """

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._promised_s = 0.0

    def ended(self, now_s: float) -> None:
        """Note that a request has ended."""
        self._ends_s.append(now_s)

    def retry_s(self, now_s: float) -> int:
        """Return in how many whole seconds a place should be free; RETRY_S where nothing is known.

        At least 1, at most MAX_RETRY_S.
        """
        if len(self._ends_s) < 2:
            return RETRY_S
        # To now, and not to the last end: a pace that slows down shows at once.
        each_s = (now_s - self._ends_s[0]) / len(self._ends_s)
        latest_s = now_s + MAX_RETRY_S
        self._promised_s = min(max(now_s, self._promised_s) + each_s, latest_s)
        return max(1, min(MAX_RETRY_S, ceil(self._promised_s - now_s)))
