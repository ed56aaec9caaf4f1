"""Sequences whose output is constrained: every sampled row has the mask of its own position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.rings.toy_ring import ToyRing, next_token, text_of

from shardnet.constraints import MAX_STEP_MASK_BYTES, MaskForm, TokenMask
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.types import Epoch, SequenceId

CONTEXT = 1024


@dataclass
class NoDrafts:
    """Knows nothing that must follow."""

    def prepare(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], limit: int, *_: object) -> list[int]:
        return []

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        raise AssertionError("these were not its drafts")


@dataclass
class Oracle(NoDrafts):
    """Drafts what comes."""

    learned: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, tokens: Sequence[int], limit: int, *_: object) -> list[int]:
        guessed = list(tokens)
        for _ in range(limit):
            guessed.append(next_token(guessed))
        return guessed[len(tokens) :]

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        self.learned.append((n_proposed, n_accepted))


@dataclass
class PositionGuide:
    """Writes the position of a row into its mask, forbids multiples of 5 as drafts, is slow."""

    ring: ToyRing
    sequence_id: SequenceId
    n_prompt: int
    forced: NoDrafts
    is_slow: bool
    mask_bytes: int = 4
    n_asked: int = 0
    may_fly: bool = False

    def prepare(self) -> bool:
        self.n_asked += 1
        return not self.is_slow or self.n_asked % 2 == 0

    def masks(self, drafts: Sequence[int], ahead: Sequence[int] = ()) -> list[TokenMask]:
        assert not ahead
        first = self.n_prompt + len(self.ring.said.get(self.sequence_id, ())) - 1
        n_right = next((n for n, draft in enumerate(drafts) if draft % 5 == 0), len(drafts))
        return [self._mask(first + place) for place in range(n_right + 1)]

    def _mask(self, position: int) -> TokenMask:
        return TokenMask(MaskForm.BITS, position.to_bytes(self.mask_bytes, "little"))


def submit(
    ring: ToyRing,
    number: int,
    *,
    max_tokens: int = 200,
    is_slow: bool = False,
    guessed: bool = False,
    forced: bool = False,
    mask_bytes: int = 4,
) -> None:
    sequence_id, prompt = SequenceId(number), tuple(range(number, number + 90))
    ring.scheduler.submit(
        SequenceRequest(
            sequence_id=sequence_id,
            prompt=prompt,
            max_tokens=max_tokens,
            drafter=Oracle() if guessed else None,
            guide=PositionGuide(
                ring=ring,
                sequence_id=sequence_id,
                n_prompt=len(prompt),
                forced=Oracle() if forced else NoDrafts(),
                is_slow=is_slow,
                mask_bytes=mask_bytes,
            ),
        )
    )


def toy_ring(n_stages: int = 2, room_blocks: int = 3) -> ToyRing:
    return ToyRing(
        Scheduler(
            RingLimits(
                epoch=Epoch(1),
                n_stages=n_stages,
                room_blocks=room_blocks,
                context=CONTEXT,
                max_slots=16,
                limits=StepLimits(chunk_rows=64, mixed_rows=32, cheap_rows=8),
            )
        )
    )


def run(ring: ToyRing) -> None:
    """Go on until all have ended; whoever waits for a mask is asked again."""
    for _ in range(10_000):
        ring.pump()
        if ring.in_flight:
            ring.answer()
        elif not ring.scheduler.n_active:
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize("guessed", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
def test_each_sampled_row_has_the_mask_of_its_position(guessed: bool, is_slow: bool) -> None:
    ring = toy_ring()
    for number in range(1, 4):
        submit(ring, number, is_slow=is_slow, guessed=guessed, forced=number == 3)
    run(ring)
    assert sum(ring.paused.values()) > 0
    for number in range(1, 4):
        prompt = range(number, number + 90)
        assert ring.said[SequenceId(number)] == text_of(prompt, 200, CONTEXT)
    for step in ring.sent:
        positions = [
            group.position + group.n_rows - group.n_sampled + place
            for group in step.batch.groups
            for place in range(group.n_sampled)
        ]
        masks = step.batch.masks
        assert [mask.row for mask in masks] == list(range(len(positions)))
        assert [int.from_bytes(mask.mask.data, "little") for mask in masks] == positions
    if guessed:
        assert any(group.n_sampled > 1 for group in ring.groups())


def test_masks_of_a_step_fit_into_its_frame() -> None:
    ring = toy_ring(n_stages=1, room_blocks=16)
    size = MAX_STEP_MASK_BYTES // 2
    for number in range(1, 6):
        submit(ring, number, max_tokens=4, mask_bytes=size)
    run(ring)
    decoding = [step for step in ring.sent if step.is_decode]
    assert decoding
    assert max(len(step.batch.masks) for step in decoding) == 2
