"""The cost of rows in a step, from recent measurements, and the limits on steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shardnet.types import PREFILL_CHUNK_ROWS, Epoch

_UNDRAFTED: Final = 0.9
"""About which part of a step's time it takes where the tail drafts nothing behind it."""


@dataclass(slots=True)
class StepCost:
    """Step time as a linear function of rows, fitted to recent steps.

    Weighted least squares; an observation counts half as much `half_life` steps later.
    """

    half_life: float = 64.0
    forgets_at: float = 0.0
    """Those before count no more where a step took less than this part of what they say, and of
    what they took."""
    slowest: float = 1.0
    """The part of a step's time that its slowest stage computes: no step can follow it sooner."""
    company: float = 1.0
    """How much longer a step takes while others are in flight: stages may share their memory."""
    most_rows: int = 0
    """Rows of the largest measured step."""
    _plain_s: float = 0.0
    """The seconds of a step of one row behind which nothing was drafted; 0 before any."""
    _weight: float = 0.0
    _rows: float = 0.0
    _time: float = 0.0
    _rows_rows: float = 0.0
    _rows_time: float = 0.0

    @property
    def plain_s(self) -> float:
        """The seconds of a step of one row without drafts; 0 before any measurement.

        Where each step had some, a little less than it takes: making drafts is in that.
        """
        line = self._line()
        return self._plain_s or (_UNDRAFTED * (line[0] + line[1]) if line else 0.0)

    def learn(
        self,
        n_rows: int,
        time_s: float,
        slowest_s: float = 0.0,
        *,
        flies: bool = False,
        drafted: bool = False,
    ) -> None:
        """Add one measured step: its rows, its seconds, and those of its slowest stage.

        One that `flies` was in flight with others of its sequence. Behind one that is `drafted` the
        tail made drafts, which took time too.
        """
        if slowest_s:
            part = min(1.0, slowest_s / time_s)
            self.slowest += (0.1 if self.most_rows else 1.0) * (part - self.slowest)
        line = self._line() if flies else None
        if flies and line:
            times_as_long = time_s / (line[0] + line[1] * n_rows)
            self.company += 0.2 * (times_as_long - self.company)
            self.most_rows = max(self.most_rows, n_rows)
            return
        if self._weight * time_s < self.forgets_at * self._time:
            expected_s = self.time_s(n_rows) or 0.0
            if time_s < self.forgets_at * expected_s:
                self._weight = self._rows = self._time = self._rows_rows = self._rows_time = 0.0
        self.company += (1 - self.company) / 256  # to try again
        if n_rows == 1 and not (drafted and self._plain_s):
            plain_s = time_s * (_UNDRAFTED if drafted else 1.0)
            self._plain_s += (0.1 if self._plain_s else 1.0) * (plain_s - self._plain_s)
        self.most_rows = max(self.most_rows, n_rows)
        fade = 0.5 ** (1 / self.half_life)
        self._weight = self._weight * fade + 1
        self._rows = self._rows * fade + n_rows
        self._time = self._time * fade + time_s
        self._rows_rows = self._rows_rows * fade + n_rows * n_rows
        self._rows_time = self._rows_time * fade + n_rows * time_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a recent step, None before any."""
        return self._time / self._weight if self._weight else None

    def extra(self, n_rows: int) -> float:
        """Return the cost of `n_rows` more rows in units of a one-row step; 0 before any
        measurement.
        """
        line = self._line()
        return n_rows * line[1] / (line[0] + line[1]) if line else 0.0

    def time_s(self, n_rows: int) -> float | None:
        """Return the seconds of a step of `n_rows` rows, None before any measurement."""
        line = self._line()
        return line[0] + line[1] * n_rows if line else self.step_s

    def _line(self) -> tuple[float, float] | None:
        """Fit seconds per step and per row; None if rows cost nothing as far as measured."""
        spread = self._weight * self._rows_rows - self._rows * self._rows
        if spread <= 1e-9 * max(1.0, self._rows_rows):
            return None
        row_s = (self._weight * self._rows_time - self._rows * self._time) / spread
        start_s = (self._time - row_s * self._rows) / self._weight
        return (start_s, row_s) if row_s > 0 and start_s + row_s > 0 else None


@dataclass(slots=True)
class TripCost:
    """What prompt rows cost the texts beside them.

    A trip is the time from sending a step with rows of texts to its answer, with all waiting behind
    other steps in every stage. How much longer than alone it takes is proportional to the prompt
    rows in its step, the others in flight having as many; recent trips count most.
    """

    alone: StepCost = field(default_factory=lambda: StepCost(half_life=16.0, forgets_at=0.75))
    """That of steps without prompt rows. One that is faster by more than measurements stray shows
    that a long text has ended."""
    _rows_rows: float = 0.0
    _rows_time: float = 0.0

    def alone_s(self, n_rows: int, n_steps: int) -> float | None:
        """Return the seconds of a trip of `n_rows` rows without prompts, None if not known.

        `n_steps` such steps are in flight: the slowest stage computes them one after the other.
        """
        step_s = self.alone.time_s(n_rows)
        return step_s * max(1.0, n_steps * self.alone.slowest) if step_s else None

    def learn(self, n_prompt: int, trip_s: float, alone_s: float) -> None:
        """Add a trip with `n_prompt` prompt rows, which takes `alone_s` without them."""
        self._rows_rows = self._rows_rows * _TRIP_FADE + n_prompt * n_prompt
        self._rows_time = self._rows_time * _TRIP_FADE + n_prompt * (trip_s - alone_s)

    def most_rows(self, alone_s: float, slowdown: float, choices: Sequence[int]) -> int:
        """Return the largest of the ascending `choices` of prompt rows with which a trip takes at
        most `slowdown` times as long; the smallest if none does.
        """
        room_s = (slowdown - 1) * alone_s * self._rows_rows
        fitting = (rows for rows in choices if rows * self._rows_time <= room_s)
        return max(fitting, default=choices[0])


_TRIP_FADE: Final = 0.9
MIXED_ROWS: Final = (*range(1, 16), *range(16, 32, 2), *range(32, 64, 4), *range(64, 257, 16))
"""Choices for the number of prompt rows batched with decode rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits on the rows of one step.

    `chunk_rows` prompt rows while no sequence decodes, at most `mixed_rows` beside decode rows. A
    step of up to `cheap_rows` rows costs about as much as one row, so drafts fill it up to there.
    `exact_rows` limits the batches of deterministic sequences (design decision 4); with ANY_ROWS
    nothing needs to be limited.
    """

    chunk_rows: int = PREFILL_CHUNK_ROWS
    mixed_rows: int = MIXED_ROWS[-1]
    cheap_rows: int = 32
    exact_rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLimits:
    """What a ring gives its scheduler.

    `room_blocks` is the smallest KV room of its stages, `context` bounds one sequence, `max_slots`
    the sequences that run at once, `max_waiting` those that wait. `window` is the smallest sliding
    window of the model's layers, None where none has one. `room_states` is the smallest room of
    its stages for states; None where no layer keeps one. Drafts may be wrong where slots can be
    rewound: it `rewinds`. `prefix_seed` stands for the ring where all stages keep prefixes on disk,
    else it is None. All of them share blocks between slots if it `shares_blocks`, and keep rows of
    windows, the largest of which is `largest_window`. A row of a prompt takes `row_s` seconds as
    far as is known before any was computed, 0 if nothing is.
    """

    epoch: Epoch
    n_stages: int
    room_blocks: int
    context: int
    max_slots: int
    max_waiting: int = 1024
    window: int | None = None
    room_states: int | None = None
    rewinds: bool = True
    limits: StepLimits = field(default_factory=StepLimits)
    prefix_seed: bytes | None = None
    shares_blocks: bool = False
    largest_window: int | None = None
    row_s: float = 0.0
