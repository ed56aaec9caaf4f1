"""A toy ring in time: how fast one sequence is with drafts that wait and drafts that fly.

The scheduler, the drafter and the cost of rows are the real ones. Stages take their time for rows,
one step after the other, links have a delay, and the clock is virtual.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from support.rings.toy_mtp import PART, ToyTail
from support.rings.toy_ring import VOCABULARY, ToyRing, next_token

from shardnet.errors import ShardnetError
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, RingDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import SendStep, SequenceRequest, TokenSampled
from shardnet.runtime.scheduling.step_cost import RingLimits, StepCost, StepLimits
from shardnet.slot_operations import OpenSequence
from shardnet.types import Epoch, MicroBatch, SequenceId
from shardnet.wire.messages.extras import Drafts


@cache
def _chance(seed: int, position: int) -> float:
    return random.Random(f"{seed} {position}").random()


class Erring:
    """Knows the text, and errs at a rate, one after the other of `right` in every PART of the text.

    A drafting.DraftSource.
    """

    kinds: Sequence[int] = [0] * 31

    def __init__(self, *right: float, flies: bool, seed: int = 1) -> None:
        self.flies = flies
        self._right = right
        self._seed = seed

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        text = [*tokens, *ahead]
        for _ in range(limit):
            right = self._right[len(text) // PART % len(self._right)]
            is_right = _chance(self._seed, len(text)) < right
            text.append((next_token(text[-40:]) + (not is_right)) % VOCABULARY)
        return text[len(tokens) + len(ahead) :]

    def close(self) -> None: ...


@dataclass(slots=True)
class TimedRing:
    """Stages that take `stages_s` for one row and `row_cost` of that for each further one.

    A step takes `hop_s` from stage to stage and home. Where another stage computes meanwhile, a
    stage takes `contention` times as long.
    """

    stages_s: Sequence[float]
    row_cost: float
    hop_s: float = 0.0
    contention: float = 1.0
    prompt: Sequence[int] = (1, 2, 3)
    says: Callable[[Sequence[int]], int] = field(default=lambda tokens: next_token(tokens[-40:]))
    """What the model says after such tokens."""
    cost: StepCost = field(default_factory=StepCost)
    now_s: float = 0.0
    drafted: bool = False
    """Whether drafts came with the last answer."""
    wakes_s: float = 0.0
    """When a drafter that is waited for has drafts."""
    times_s: list[float] = field(default_factory=list)
    """When each token came."""
    _free_s: list[float] = field(default_factory=list)
    _answers: list[tuple[float, int, int, float]] = field(default_factory=list)

    def speed(self, drafter: AdaptiveDrafter | None, n_tokens: int = 800) -> float:
        """Decode a text; return its tokens a second."""
        self.times_s.clear()
        self._free_s = [self.now_s] * len(self.stages_s)
        scheduler = Scheduler(
            RingLimits(
                epoch=Epoch(1),
                n_stages=len(self.stages_s),
                room_blocks=100,
                context=4096,
                max_slots=1,
                limits=StepLimits(),
            )
        )
        ring = ToyRing(scheduler)
        ring.stage.next_token = self.says
        self._begin(ring)
        scheduler.submit(
            SequenceRequest(
                sequence_id=SequenceId(1),
                prompt=(*self.prompt,),
                max_tokens=n_tokens,
                drafter=drafter,
            )
        )
        self._send(ring.pump())
        before_s = 0.0
        while ring.in_flight or self.wakes_s > self.now_s:
            if not ring.in_flight:
                self.now_s = self.wakes_s
                self._send(ring.pump())
                continue
            answered_s, n_rows, slowest_us, queued_s = heapq.heappop(self._answers)
            self.now_s = max(self.now_s, answered_s)
            batch = ring.in_flight[0][0]
            self._take(batch)
            says, flies = bool(scheduler.counting(batch.step)), batch.step in scheduler.beside
            n_new = sum(isinstance(outcome, TokenSampled) for outcome in ring.answer())
            self.times_s += [self.now_s] * n_new
            took_s = answered_s - self._sent_s.pop(batch.step) - queued_s
            if batch.n_sampled == n_rows:  # as the engine does
                self.cost.learn(n_rows, took_s, slowest_us / 1e6, flies=flies, drafted=self.drafted)
            self._send(ring.pump())
            if drafter is not None and says:
                if before_s:
                    drafter.took(n_new, self.now_s - before_s)
                before_s = self.now_s
        return (n_tokens - 1) / (self.times_s[-1] - self.times_s[0])

    _sent_s: dict[int, float] = field(default_factory=dict)

    def _begin(self, ring: ToyRing) -> None:
        """Begin with a ring whose stages hold nothing yet."""

    def _send(self, steps: Sequence[SendStep]) -> None:
        for step in steps:
            self._compute(step.batch)

    def _take(self, batch: MicroBatch) -> None:
        """Take what came with the answer beside its tokens."""

    def _beside_s(self, batch: MicroBatch) -> float:
        """Return how long the last stage takes beside the rows of a step."""
        return 0.0

    def _compute(self, batch: MicroBatch) -> None:
        at_s, queued_s, slowest_s = self.now_s, 0.0, 0.0
        self._sent_s[batch.step] = at_s
        for rank, one_row_s in enumerate(self.stages_s):
            begin_s = max(at_s, self._free_s[rank])
            queued_s += begin_s - at_s
            took_s = one_row_s * (1 + self.row_cost * (batch.n_rows - 1))
            if rank == len(self.stages_s) - 1:
                took_s += self._beside_s(batch)
            others = [free_s for other, free_s in enumerate(self._free_s) if other != rank]
            if any(free_s > begin_s for free_s in others):
                took_s *= self.contention
            slowest_s = max(slowest_s, took_s)
            self._free_s[rank] = begin_s + took_s
            at_s = begin_s + took_s + self.hop_s
        heapq.heappush(self._answers, (at_s, batch.n_rows, int(slowest_s * 1e6), queued_s))

    def least_speed(self, n_tokens: int = 200) -> float:
        """Return the tokens a second of the slowest so many tokens in a row."""
        spans = zip(self.times_s, self.times_s[n_tokens:], strict=False)
        return n_tokens / max(end - begin for begin, end in spans)


@dataclass(slots=True)
class MtpRing(TimedRing):
    """A ring that has a layer for drafts, which takes `draft_s` for each one.

    It is in the last stage, or as `on_head` says: in the first stage's machine, or in one beside.
    """

    right: Sequence[float] = ()
    parts: Sequence[float] = (1.0,)
    draft_s: float = 0.0
    on_head: Literal["", "first", "beside"] = ""
    most: int = 12
    source: RingDrafts = field(default_factory=RingDrafts)
    _tail: ToyTail = field(init=False)
    _made: dict[int, tuple[float, Sequence[Drafts]]] = field(default_factory=dict)

    def _begin(self, ring: ToyRing) -> None:
        self._ring, self._tail = ring, ToyTail(ring.stage, self.right)
        self._tail.model.parts = self.parts

    def _beside_s(self, batch: MicroBatch) -> float:
        for opened in self._ring.operations(OpenSequence) if batch.groups[0].position == 0 else ():
            self._tail.carry_out(opened)
        sampled = next(found for sent, found in self._ring.in_flight if sent is batch)
        assert not isinstance(sampled, ShardnetError)
        n_before = self._tail.model.n_runs
        drafts = self._tail.draft(batch, sampled, self.most)
        took_s = (self._tail.model.n_runs - n_before) * self.draft_s
        self._made[batch.step] = took_s, drafts
        return 0.0 if self.on_head else took_s

    def _take(self, batch: MicroBatch) -> None:
        took_s, drafts = self._made.pop(batch.step)
        self.drafted = bool(drafts)
        if self.on_head and took_s:
            begin_s = max(self.now_s, self._free_s[0]) if self.on_head == "first" else self.now_s
            self.now_s = begin_s + took_s
            if self.on_head == "first":
                self._free_s[0] = self.now_s
        for one in drafts:
            self.source.take(one.position, one.token_ids)

    _ring: ToyRing = field(init=False)
