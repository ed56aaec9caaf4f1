"""What became of each recovery: what was lost, how long each part took.

Knows the figures and their words. Must not know who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_RECORDS: Final = 64
"""Recoveries that are remembered."""


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    """One replacement of a ring by another. All times in seconds, `at_s` counted from 1970.

    `notice_s` is how long the oldest step in flight had waited when the loss was noticed, `plan_s`
    and `load_s` are sums over all attempts, waiting included, `replay_s` is how long after that
    every request had a token again. `lost` are the names of the nodes that the next ring did
    without. `error` is why it was given up, "" unless it was. `n_requests` were waiting or running.
    """

    at_s: float
    why: str
    n_requests: int
    notice_s: float = 0.0
    plan_s: float = 0.0
    load_s: float = 0.0
    replay_s: float = 0.0
    n_attempts: int = 0
    n_moved: int = 0
    """Requests that a standby went on with, of which next to nothing was computed again."""
    lost: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    error: str = ""
    resumed_at_s: float | None = None
    """When the next ring was built, by a clock that does not jump."""
    is_replayed: bool = False
    is_over: bool = False

    def interrupt(self, why: str) -> None:
        """Note that the next ring was lost too before its requests went on."""
        self.is_over, self.error = True, why

    @property
    def pause_s(self) -> float:
        """How long requests stood still, from the last sign of the lost ring to the last replay."""
        return self.notice_s + self.plan_s + self.load_s + self.replay_s

    @property
    def first_words(self) -> str:
        """The line for the log when it begins."""
        waiting = "1 request waits" if self.n_requests == 1 else f"{self.n_requests} requests wait"
        return f"recovering: {self.why}; {waiting}"

    @property
    def words(self) -> str:
        """The line for the log when it is over."""
        parts = (
            f"notice {self.notice_s:.2f}, plan {self.plan_s:.2f}, load {self.load_s:.2f}, "
            f"replay {self.replay_s:.2f} s"
        )
        attempts = f", {self.n_attempts} attempts" if self.n_attempts > 1 else ""
        if self.error:
            return f"gave up the ring after {self.pause_s:.2f} s ({parts}{attempts}): {self.error}"
        requests = f"{self.n_requests} request" + "s" * (self.n_requests != 1)
        moved = f", {self.n_moved} of them with their KV cache" if self.n_moved else ""
        without = f" without {', '.join(self.lost)}" if self.lost else ""
        return (
            f"recovered in {self.pause_s:.2f} s ({parts}{attempts}): {requests} went on over "
            f"{', '.join(self.nodes)}{without}{moved}"
        )
