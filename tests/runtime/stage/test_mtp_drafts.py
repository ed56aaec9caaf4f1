"""The tail's drafts in flight: whatever the head sends, the layer reads the rows that are right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.rings.toy_mtp import ToyTail
from support.rings.toy_ring import ToyRing, ToyStage, text_of
from support.soak import is_soak

from shardnet.errors import CapacityError
from shardnet.runtime.scheduling.drafting import RingDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.slot_operations import SlotOperation
from shardnet.types import Epoch, MicroBatch, SequenceId, StepId
from shardnet.wire.messages.extras import Drafts

CONTEXT = 400


@dataclass(slots=True)
class DraftingStage(ToyStage):
    """A tail that drafts; it checks what the layer has read."""

    tail: ToyTail = field(init=False)
    made: dict[StepId, list[Drafts]] = field(default_factory=dict)
    flown: Counter[bool] = field(default_factory=Counter)
    """Groups that went behind drafts in flight: those behind wrong ones, and others."""

    def carry_out(self, operation: SlotOperation) -> None:
        ToyStage.carry_out(self, operation)
        self.tail.carry_out(operation)

    def compute(self, batch: MicroBatch, *, fails: bool = False) -> list[int]:
        sampled = ToyStage.compute(self, batch, fails=fails)
        made = [] if fails else self.tail.draft(batch, sampled)
        self.made[batch.step] = made
        drafted = {one.sequence_id for one in made}
        self.flown.update(
            group.sequence_id in drafted for group in batch.groups if group.n_drafts >= group.n_rows
        )
        return sampled


class Eager(RingDrafts):
    """Sends what the tail has drafted in frames of any size, as many as may be in flight."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def prepare(self, tokens: Sequence[int], limit: int = 0) -> bool:
        return True

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        ahead: Sequence[int] | None = None,
        *_: object,
    ) -> list[int]:
        limit = min(limit, self._chance.choice((0, 1, 1, 2, 3, 3, 5)))
        return self.draft(tokens, limit, ahead or ()) if limit else []

    def learn(self, n_proposed: int, n_accepted: int) -> None: ...


def flown(seed: int) -> Counter[bool]:
    """Run some requests to their ends; return the groups that went behind drafts in flight."""
    chance = random.Random(seed)
    room_blocks = chance.choice((3, 12))
    ring = ToyRing(
        Scheduler(
            RingLimits(
                epoch=Epoch(1),
                n_stages=chance.randrange(2, 5),
                room_blocks=room_blocks,
                context=CONTEXT,
                max_slots=chance.choice((1, 3)),
                limits=StepLimits(chunk_rows=64, mixed_rows=32),
            )
        )
    )
    stage = ring.stage = DraftingStage(room_blocks)
    stage.tail = ToyTail(stage, [0.95, 0.9, 0.85, 0.8])
    sources: dict[SequenceId, Eager] = {}
    asked: dict[SequenceId, tuple[list[int], int]] = {}
    cut: set[SequenceId] = set()

    def answer() -> None:
        batch = ring.in_flight[0][0]
        for one in stage.made.pop(batch.step):
            sources[SequenceId(one.sequence_id)].take(one.position, one.token_ids)
        ring.answer()

    for number in range(1, 9):
        sequence_id, prompt = SequenceId(number), [*range(chance.randrange(1, 30))]
        if asked and chance.random() < 0.5:  # another turn, or one that parts from it
            before, _ = chance.choice([*asked.values()])
            text = [*before, *text_of(before, 60, CONTEXT)]
            prompt = [*text[: chance.randrange(len(before), len(text))], *prompt[:3]]
        asked[sequence_id] = prompt[: CONTEXT - 80], chance.randrange(1, 60)
        sources[sequence_id] = Eager(chance)
        ring.scheduler.submit(
            SequenceRequest(
                sequence_id=sequence_id,
                prompt=tuple(asked[sequence_id][0]),
                max_tokens=asked[sequence_id][1],
                drafter=sources[sequence_id],
                n_drafts=12,
            )
        )
        for _ in range(chance.randrange(60)):
            ring.pump()
            if ring.in_flight:
                answer()
        if chance.random() < 0.2:
            sent = ring.sent[-1].batch.step if ring.sent else 0
            ring.failing[StepId(sent + 2)] = CapacityError("a stage ran out of memory")
        if chance.random() < 0.2 and ring.scheduler.end(sequence_id):
            cut.add(sequence_id)
    for _ in range(10_000):
        ring.pump()
        if not ring.in_flight:
            break
        answer()
    for sequence_id, (prompt, n_tokens) in asked.items():
        text, said = text_of(prompt, n_tokens, CONTEXT), ring.said.get(sequence_id, [])
        is_whole = sequence_id in ring.finished
        assert said == (text if is_whole else text[: len(said)])
        assert is_whole or sequence_id in cut or ring.failing
    return stage.flown


@pytest.mark.parametrize("first", range(0, 500 if is_soak() else 40, 10))
def test_the_layer_reads_what_is_right_whatever_flies(first: int) -> None:
    """Turns, branches, pauses, steps that fail and requests that are given up amid flights."""
    counted = sum(map(flown, range(first, first + 10)), Counter())
    assert counted[True] > 20
    assert counted[False] > 20
