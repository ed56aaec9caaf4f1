"""The last steps of a ring, and how far its requests are, for people who watch.

Knows what is remembered of a step, and how many are. Must not know who watches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.types import LiveState, SequenceId
from shardnet.wire.messages.extras import StageTiming

MAX_STEPS: Final = 1024
"""Steps that are remembered: half a second's of a very fast ring."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step that came round, sent `sent_us` after the log began.

    `n_prompt_rows` of its rows sampled nothing; `n_tokens` were kept of what the others sampled.
    """

    step: int
    sent_us: int
    round_trip_us: int
    n_rows: int
    n_prompt_rows: int
    n_tokens: int
    timings: tuple[StageTiming, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """How far a request is: `n_computed` of `n_prompt` tokens of its prompt are in the KV cache.

    `n_kept` of these were there before it began to run. `ahead` requests go before it.
    """

    sequence_id: SequenceId
    state: LiveState
    n_prompt: int
    n_computed: int
    n_kept: int
    n_tokens: int
    max_tokens: int
    age_s: float
    priority: int
    ahead: int


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
                timings=answered.answer.timings,
            )
        )

    def age_us(self, now_ns: int) -> int:
        """Return the microseconds since the log began."""
        return (now_ns - self._began_ns) // 1000

    def after(self, step: int) -> list[StepRecord]:
        """Return the steps of higher numbers than `step`, oldest first."""
        return [one for one in self._steps if one.step > step]
