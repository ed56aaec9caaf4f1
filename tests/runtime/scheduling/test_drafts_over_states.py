"""Drafts where layers keep a state: whatever the head sends, stages know the state before it.

The head's scheduler sends rows to a real cache whose one layer has numbers of all tokens before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from support.rings.toy_ring import ToyRing, ToyStage, next_token, text_of
from support.soak import is_soak

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import SlotState
from shardnet.model.config.model_config import StateShape
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import ALONE, Company, SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.slot_operations import (
    CloseSequence,
    DropStates,
    FreeSlot,
    KeepState,
    OpenSequence,
    SlotOperation,
)
from shardnet.types import Epoch, MicroBatch, SequenceId

CONTEXT, PRIME = 400, 9973
SHAPE = StateShape(recent=(1, 1), recurrent=(1, 1, 1))


def number_of(tokens: Sequence[int], number: int = 0) -> int:
    """A number of all tokens, behind one of those before."""
    for token in tokens:
        number = (31 * number + token + 1) % PRIME
    return number


def new_cache(room_blocks: int) -> KvCache:
    return KvCache(
        1, 1, 8, torch.float32, torch.device("cpu"), room_blocks, (None,), states=(SHAPE,)
    )


@dataclass(slots=True)
class StatefulStage(ToyStage):
    """A stage that has a state of every slot too, and checks it after each step."""

    kv: KvCache = field(default_factory=lambda: new_cache(99))
    n_again: int = 0
    """Rows over which states were computed again."""

    def carry_out(self, operation: SlotOperation) -> None:
        ToyStage.carry_out(self, operation)
        match operation:
            case OpenSequence(slot=slot, source=source, n_kept=n_kept, state=state):
                if source is not None or state is not None:
                    self.kv.copy(slot if source is None else source, slot, n_kept, state)
                self.kv.trim(slot, n_kept)
            case CloseSequence(slot=slot, n_kept=n_kept):
                self.kv.trim(slot, n_kept)
                self.kv.rest(slot)
            case KeepState(slot=slot, n_positions=n_positions, state=state):
                self.kv.keep_state(slot, n_positions, state)
            case DropStates(states=states):
                self.kv.drop_states(states)
            case FreeSlot(slot=slot):
                self.kv.free(slot)

    def compute(self, batch: MicroBatch, *, fails: bool = False) -> list[int]:
        sampled, ids = ToyStage.compute(self, batch, fails=fails), [*batch.token_ids]
        for group in batch.groups:
            own, ids = ids[: group.n_rows], ids[group.n_rows :]
            end = group.position + group.n_rows
            self.kv.ensure(group.slot, end, group.n_rows)
            state = self.kv.state(group.slot, 0)
            before = state.keep_before(group.n_rows, group.n_drafts)
            state.recurrent.fill_(number_of(own, int(before.recurrent)))

            def replay(
                source: SlotState, target: SlotState, n: int, own: Sequence[int] = own
            ) -> None:
                self.n_again += n
                target.recurrent.fill_(number_of(own[:n], int(source.recurrent)))

            state.count(group.n_rows, replay if state.kept else None)
            assert int(state.recurrent) == number_of(self.slots[group.slot].tokens[:end])
            assert len(state.kept) <= 2
            assert sum(rows.end - rows.begin for rows in state.inputs) <= 3 * 128
        return sampled


class Guessing:
    """Drafts as many tokens as it likes, the first of them right, also behind what is in flight."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def prepare(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        ahead: Sequence[int] | None = None,
        n_frames: int = 1,
        company: Company = ALONE,
    ) -> list[int]:
        text = [*tokens, *(ahead or ())]
        n_drafts = self._chance.choice((0, 1, 1, 1, 1, 2, 5, 20))
        n_right = n_drafts if self._chance.random() < 0.9 else self._chance.randrange(n_drafts + 1)
        for place in range(min(n_drafts, limit)):
            text.append(next_token(text) if place < n_right else 11 - next_token(text))
        return text[len(tokens) + len(ahead or ()) :]

    def learn(self, n_proposed: int, n_accepted: int) -> None: ...


def rows_again(seed: int) -> int:
    """Run some requests to their ends; return over how many rows states were computed again."""
    chance = random.Random(seed)
    limits = StepLimits(chunk_rows=64, mixed_rows=32)
    ring = ToyRing(
        Scheduler(
            RingLimits(
                epoch=Epoch(1),
                n_stages=chance.randrange(1, 4),
                room_blocks=chance.choice((3, 12)),
                context=CONTEXT,
                max_slots=chance.choice((1, 3)),
                room_states=24,
                limits=limits,
            )
        )
    )
    stage = ring.stage = StatefulStage(ring.scheduler.ring.room_blocks)
    asked: dict[SequenceId, tuple[tuple[int, ...], int]] = {}
    given_up = set()
    for number in range(1, 13):
        sequence_id, prompt = SequenceId(number), [*range(chance.randrange(1, 30))]
        if asked and chance.random() < 0.7:  # another turn, or one that parts from it
            before, _ = asked[chance.choice([*asked][-2:])]
            text = [*before, *text_of(before, 100, CONTEXT)]
            prompt = [*text[: chance.randrange(len(before), len(text))], *prompt[:3]]
        prompt, n_tokens = prompt[: CONTEXT - 50], chance.randrange(1, 60)
        asked[sequence_id] = tuple(prompt), n_tokens
        ring.scheduler.submit(
            SequenceRequest(
                sequence_id=sequence_id,
                prompt=tuple(prompt),
                max_tokens=n_tokens,
                drafter=Guessing(chance) if chance.random() < 0.8 else None,
            )
        )
        for _ in range(chance.randrange(40)):
            ring.pump()
            if ring.in_flight:
                ring.answer()
        ring.pump()
        if chance.random() < 0.6 and ring.scheduler.end(sequence_id):
            given_up.add(sequence_id)
    ring.run()
    for sequence_id, (own, n_tokens) in asked.items():
        text, said = text_of(own, n_tokens, CONTEXT), ring.said.get(sequence_id, [])
        assert said == (text[: len(said)] if sequence_id in given_up else text)
    return stage.n_again


@pytest.mark.parametrize("first", range(0, 500 if is_soak() else 40, 10))
def test_every_state_is_known_that_the_head_asks_for(first: int) -> None:
    """Turns, branches, pauses and requests that are given up, in the middle of flights."""
    assert sum(rows_again(seed) for seed in range(first, first + 10)) > 0
