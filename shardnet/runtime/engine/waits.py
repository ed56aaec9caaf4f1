"""What requests wait for behind a lost ring, and about how long: another one, then their rows.

Knows the pace at which the ring reads prompts. Must not know what replaces a ring, nor the order in
which rows are sent beyond that requests are read one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from shardnet.runtime.engine.live_request import LiveRequest, LiveRequests
from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.types import SequenceId
from shardnet.wire.messages.diagnostics import RingWait, RingWaitKind

FADE: Final = 0.8
"""A measured step counts so much less with each that follows."""
LEAST_ROWS: Final = 64
"""Steps of fewer rows say little about what prompts cost."""
TELL_NS: Final = 1_000_000_000
"""How long a request that is told how many rows are left is told nothing more."""


@dataclass(slots=True)
class ReadingPace:
    """Seconds that a row of a prompt takes on the ring, by the last steps with such rows.

    Before enough were measured they are those that the plan of the ring predicts, 0 if it does not.
    """

    predicted_s: float = 0.0
    _n_measured: int = 0
    _rows: float = 0.0
    _time_s: float = 0.0
    _last_ns: int = 0
    """When the last step was answered."""

    def learn(self, answered: StepAnswered, n_rows: int, *, counts: bool) -> None:
        """Note that a step came round, with `n_rows` rows of prompts, if it `counts`.

        It took the time since the step before it: several are in flight.
        """
        now_ns = answered.sent_ns + answered.round_trip_us * 1000
        took_ns = max(0, now_ns - max(answered.sent_ns, self._last_ns))
        self._last_ns = now_ns
        if counts:
            fade = FADE if n_rows else 1.0
            self._n_measured += n_rows
            self._rows = fade * self._rows + n_rows
            self._time_s = fade * self._time_s + took_ns / 1e9

    def scale(self, times_as_long: float) -> None:
        """Take that the ring has changed, and a row takes so many times as long."""
        self._time_s *= times_as_long

    def seconds(self, n_rows: int) -> float:
        """Predict the seconds that so many rows take, 0 if nothing is known."""
        is_measured = self._n_measured >= LEAST_ROWS
        return n_rows * (self._time_s / self._rows if is_measured else self.predicted_s)


@dataclass(slots=True, kw_only=True)
class Waits:
    """Tells the requests `live` what they wait for."""

    live: LiveRequests
    clock_ns: Callable[[], int]
    pace: ReadingPace = field(default_factory=ReadingPace)
    _ring: tuple[RingWaitKind, str, int] | None = None
    """What there has to be before there is another ring, and until when that may take."""
    told_ns: dict[SequenceId, int] = field(default_factory=dict)
    """The requests whose rows are read again, and when they were told of it last."""

    @property
    def now(self) -> RingWait | None:
        """What the ring's requests wait for, those that wait longest; None for nothing."""
        if self._ring is not None:
            kind, what, until_ns = self._ring
            return RingWait(kind=kind, what=what, expected_s=self._left_s(until_ns))
        left = [n_rows for sequence_id, _, n_rows in self._unread() if sequence_id in self.told_ns]
        if not left:
            return None
        n_rows = max(left)
        return RingWait(kind="replay", what=reading(n_rows), expected_s=self.pace.seconds(n_rows))

    def tell(self, kind: RingWaitKind, what: str, expected_s: float) -> None:
        """Tell all what has to be done before there is another ring."""
        now_ns = self.clock_ns()
        self._ring = kind, what, now_ns + int(expected_s * 1e9)
        for live in self.live.values():
            live.wait_for(what, expected_s, now_ns)

    def go_on(self, times_as_long: float, predicted_s: float) -> None:
        """Note that there is a ring, on which rows of prompts take so many times as long.

        Its plan predicts `predicted_s` a row.
        """
        self._ring = None
        self.told_ns.clear()
        self.pace.scale(times_as_long)
        self.pace.predicted_s = predicted_s

    def answered(self, answered: StepAnswered, n_prompt_rows: int, *, is_mixed: bool) -> None:
        """Learn from a step, and tell what is left of those that are read again, now and then.

        Beside decode rows prompts are read more slowly: that counts for those that wait now.
        """
        is_read = n_prompt_rows >= LEAST_ROWS and not is_mixed
        self.pace.learn(answered, n_prompt_rows, counts=is_read or bool(self.told_ns))
        if self.told_ns:
            self.tell_replays()

    def reading_s(self) -> float:
        """Predict how long it takes to read again all that requests have in KV caches now."""
        return self.pace.seconds(sum(live.n_computed for live in self.live.values()))

    def tell_replays(self) -> None:
        """Tell those that are read again how many rows are left, each now and then."""
        now_ns, found = self.clock_ns(), dict[SequenceId, int]()
        for sequence_id, live, n_rows in self._unread():
            if live.replays:
                told_ns = self.told_ns.get(sequence_id)
                if told_ns is None or now_ns - told_ns >= TELL_NS:
                    live.wait_for(reading(n_rows), self.pace.seconds(n_rows), now_ns)
                    told_ns = now_ns
                found[sequence_id] = told_ns
        self.told_ns = found

    def _unread(self) -> Iterator[tuple[SequenceId, LiveRequest, int]]:
        """Yield those that are being read, with the rows left until they go on.

        They are read in the order of priority, then of arrival.
        """
        n_before = 0
        for sequence_id, live in sorted(
            self.live.items(), key=lambda one: -one[1].request.priority
        ):
            n_rows = live.n_unread
            if n_rows > 1:
                n_before += n_rows
                yield sequence_id, live, n_before

    def _left_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self.clock_ns()) / 1e9)


def reading(n_rows: int) -> str:
    """Say what a request waits for whose rows are computed again."""
    return f"reading {n_rows:,} tokens again"
