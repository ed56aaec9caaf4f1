"""What an engine has done so far, and the last steps of its ring, for people who watch.

Knows what is counted. Must not know who reads it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.runtime.scheduling.acceptance import DraftCounts
from shardnet.wire.messages.activity import StepRecord
from shardnet.wire.messages.diagnostics import Drafted


@dataclass(slots=True, kw_only=True)
class EngineTotals:
    """What an engine has done so far. Times in microseconds, by rank where they are the stages' of
    the present ring.

    `wire_us` is what steps took beside all computing and queueing. Of `n_prompts` the first
    positions of `n_prefix_hits` were there already, `n_prefix_tokens` of `n_prompt_tokens`,
    `n_disk_tokens` of those on disk. Lost rings were replaced `n_recoveries` times, in
    `recovery_us`. `drafts` are those of requests that have ended.
    `n_flown` steps went behind drafts in flight, `n_wasted` of them behind a wrong one.
    `joules` for each token are those of the last request, where nodes say what they draw.
    """

    n_steps: int = 0
    n_tokens: int = 0
    compute_us: Counter[int] = field(default_factory=Counter)
    queue_us: Counter[int] = field(default_factory=Counter)
    wire_us: int = 0
    n_prompts: int = 0
    n_prefix_hits: int = 0
    n_prompt_tokens: int = 0
    n_prefix_tokens: int = 0
    n_disk_tokens: int = 0
    n_recoveries: int = 0
    recovery_us: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    n_flown: int = 0
    n_wasted: int = 0
    joules: dict[int, float] = field(default_factory=dict)

    @property
    def drafters(self) -> list[Drafted]:
        """What each drafter has made."""
        return self.drafts.told()

    def add_step(self, answered: StepAnswered) -> int:
        """Count a step; return how long it was queued."""
        self.n_steps += 1
        computed_us = queued_us = 0
        for timing in answered.answer.timings:
            self.compute_us[timing.rank] += timing.compute_us
            self.queue_us[timing.rank] += timing.queue_us
            computed_us += timing.compute_us
            queued_us += timing.queue_us
        self.wire_us += max(0, answered.round_trip_us - computed_us - queued_us)
        return queued_us

    def add_recovery(self, pause_s: float) -> None:
        """Count a lost ring that was replaced; requests stood still for `pause_s` seconds."""
        self.n_recoveries += 1
        self.recovery_us += int(pause_s * 1e6)

    def begin_ring(self) -> None:
        """Forget the stages: others have their ranks."""
        self.compute_us.clear()
        self.queue_us.clear()
        self.joules.clear()

    def add_prompt(self, n_tokens: int, n_kept: int, *, is_restored: bool = False) -> None:
        """Count a prompt that begins to run; what was kept of it may have been read from disk."""
        self.n_prompts += 1
        self.n_prefix_hits += n_kept > 0
        self.n_prompt_tokens += n_tokens
        self.n_prefix_tokens += n_kept
        self.n_disk_tokens += n_kept * is_restored


MAX_STEPS: Final = 1024
"""Steps that are remembered: half a second's of a very fast ring."""


class StepLog:
    """Remembers the last MAX_STEPS steps. `began_ns` is when it began, by the head's clock."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def add(self, answered: StepAnswered, n_rows: int, n_sampled: int, n_tokens: int) -> None:
        """Remember a step of `n_rows` rows; `n_tokens` of its `n_sampled` samples were kept."""
        self._steps.append(
            StepRecord(
                step=answered.batch.step,
                sent_us=max(0, answered.sent_ns - self._began_ns) // 1000,
                round_trip_us=answered.round_trip_us,
                n_rows=n_rows,
                n_prompt_rows=n_rows - n_sampled,
                n_tokens=n_tokens,
                timings=list(answered.answer.timings),
            )
        )

    def age_us(self, now_ns: int) -> int:
        """Return the microseconds since the log began."""
        return (now_ns - self._began_ns) // 1000

    def after(self, step: int) -> list[StepRecord]:
        """Return the steps of higher numbers than `step`, oldest first."""
        return [one for one in self._steps if one.step > step]
