"""The tail's drafts over a toy ring: the real MtpDrafts, and a layer that computes in integers.

Its rows hold the tokens behind positions, so that a wrong one would show in what it drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec.structs import replace
from support.rings.toy_ring import VOCABULARY, ToyStage
from torch import Tensor

from shardnet.model.sampling.penalties import TokenHistory
from shardnet.model.sampling.sampler import SampleRow
from shardnet.runtime.stage.mtp_drafts import MtpDrafts
from shardnet.slot_operations import CloseSequence, FreeSlot, OpenSequence, SlotOperation
from shardnet.types import MicroBatch, RowGroup, SlotId, blocks_for
from shardnet.wire.messages.extras import Drafts

PART = 100
"""Tokens of a text for which drafts are equally likely."""


class ToyMtp:
    """Model and sampler of MtpDrafts, over the slots of a stage.

    A draft is right, where those before it are, as often as `right` says of its depth, times what
    `parts` say, one after the other, of every PART of the text.
    """

    context = 1 << 20

    def __init__(
        self, stage: ToyStage, right: Sequence[float], parts: Sequence[float] = (1.0,)
    ) -> None:
        self.parts = parts
        self.kv = self
        self.n_runs = 0
        self.texts: dict[SlotId, list[int]] = {}
        self._stage = stage
        self._right = right

    def holds(self, slot: SlotId, n_positions: int) -> bool:
        """Say whether there is room for so many positions."""
        return blocks_for(n_positions) <= len(self._stage.slots[slot].blocks)

    def mtp_inputs(self, rows: Tensor) -> Tensor:
        """Take rows as they are: how deep they are drafted, slot, number of tokens known."""
        return rows

    mtp_logits = mtp_inputs

    def run_mtp(self, groups: Sequence[RowGroup], token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """Take the tokens [T] behind the positions of `groups`."""
        self.n_runs += 1
        ids = iter(token_ids)
        places = []
        for group in groups:
            text = self.texts.setdefault(group.slot, [])
            text[:1] = self._stage.slots[group.slot].tokens[:1]
            for position in range(group.position, group.position + group.n_rows):
                assert position < len(text), "a row was left out"
                text[position + 1 :] = [next(ids)]
                places.append([group.slot, position + 2])
        assert rows.shape == (len(places), 3)
        return torch.cat((rows[:, :1] + 1, torch.tensor(places)), 1)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> SimpleNamespace:
        """Draw a draft behind each row."""
        made = []
        for (depth, slot, n_tokens), row in zip(logits.tolist(), rows, strict=True):
            assert row.position == n_tokens - 1
            text = self.texts[SlotId(slot)][:n_tokens]
            chance = random.Random(f"{text[-9:]} {n_tokens}").random()
            part = self.parts[n_tokens // PART % len(self.parts)]
            is_right = chance < part * self._right[min(depth, len(self._right)) - 1]
            made.append((self._stage.next_token(text) + (not is_right)) % VOCABULARY)
        return SimpleNamespace(token_ids=made)


class ToyTail:
    """Drafts for the sequences of a stage, which takes its operations and steps before this."""

    def __init__(self, stage: ToyStage, right: Sequence[float]) -> None:
        self.model = ToyMtp(stage, right)
        self._stage = stage
        self._layer = MtpDrafts(cast("Any", self.model), cast("Any", self.model))
        self._owners: dict[SlotId, OpenSequence] = {}

    def carry_out(self, operation: SlotOperation) -> None:
        """Keep of the layer's rows what the stage keeps."""
        match operation:
            case OpenSequence(slot=slot, source=source, n_kept=n_kept):
                if source is not None:
                    self.model.texts[slot] = self.model.texts.get(source, [])[: n_kept + 1]
                self._layer.keep(slot, n_kept, source)
                self._owners[slot] = operation
            case CloseSequence(slot=slot, n_kept=n_kept):
                self._layer.keep(slot, n_kept, None)
            case FreeSlot(slot=slot):
                self._layer.keep(slot, 0, None)
            case _:
                pass

    def draft(
        self, batch: MicroBatch, sampled: Sequence[int], most: int | None = None
    ) -> list[Drafts]:
        """Draft behind a step, at most `most`; check that the layer has read what is right."""
        owners = self._owners
        if most is not None:
            owners = {slot: replace(owner, n_drafts=most) for slot, owner in owners.items()}
        rows = torch.zeros(batch.n_rows, 3, dtype=torch.int64)
        made = self._layer.draft(batch, rows, sampled, owners, TokenHistory())
        slots: dict[int, SlotId] = {group.sequence_id: group.slot for group in batch.groups}
        for one in made:
            slot = slots[one.sequence_id]
            first, end = owners[slot].n_kept + 1, one.position - 1
            assert self.model.texts[slot][first:end] == self._stage.slots[slot].tokens[first:end]
        return made
