"""The last steps of a ring, for people who watch.

Knows what is remembered of a step, and how many are. Must not know who watches.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.wire.messages.activity import StepSeen

MAX_STEPS: Final = 1024
"""Steps that are remembered: half a second's of a very fast ring."""


class StepLog:
    """Remembers the last MAX_STEPS steps. `began_ns` is when it began, by the head's clock."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._steps: deque[StepSeen] = deque(maxlen=MAX_STEPS)

    def add(self, answered: StepAnswered, n_rows: int, n_sampled: int, n_tokens: int) -> None:
        """Remember a step of `n_rows` rows; `n_tokens` of its `n_sampled` samples were kept."""
        self._steps.append(
            StepSeen(
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

    def after(self, step: int) -> list[StepSeen]:
        """Return the steps of higher numbers than `step`, oldest first."""
        return [one for one in self._steps if one.step > step]
