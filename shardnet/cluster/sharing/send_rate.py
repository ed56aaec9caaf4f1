"""Limit the rate at which a node sends weights, over all links together.

Pure: takes the time, and returns how long to wait.
"""

from __future__ import annotations

BURST_S = 0.25
"""Unused rate of at most this time may be used later."""


class SendRate:
    """A rate of `bytes_per_s`, None for no limit. All times are of one clock."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at: float | None = None

    def book(self, n_bytes: int, now: float) -> float:
        """Reserve `n_bytes` at the time `now` (s); return the seconds to wait before sending."""
        if self._bytes_per_s is None:
            return 0.0
        earliest = now - BURST_S
        start = earliest if self._free_at is None else max(self._free_at, earliest)
        self._free_at = start + n_bytes / self._bytes_per_s
        return max(0.0, self._free_at - now)

    def piece_bytes(self, largest: int) -> int:
        """Return the bytes to send at one time: `largest`, fewer at a low rate, for progress."""
        if self._bytes_per_s is None:
            return largest
        return max(1, min(largest, int(self._bytes_per_s / 4)))
