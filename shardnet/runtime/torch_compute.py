"""A stage's compute in torch: the layers and KV cache of a StageModel, and on the tail the sampler.

Knows how to go from wire values to tensors and back. Must not know links, rings or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch

from shardnet.errors import RemoteProtocolError
from shardnet.model.codec import pack_rows, unpack_rows
from shardnet.model.sampler import Sampler, SampleRow
from shardnet.model.stage_model import StageModel
from shardnet.runtime.compute import (
    Activations,
    Samples,
    SequenceClosed,
    SequenceOpened,
    SlotFreed,
    SlotOperation,
)
from shardnet.types import MicroBatch, SamplingParams, SequenceId, SlotId, WireDType


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """The sequence that owns a slot, and how the tail samples it."""

    sequence_id: SequenceId
    sampling: SamplingParams


class TorchCompute:
    """StageCompute over a loaded StageModel. `sampler` is None but on the tail.

    Activations travel in the wire dtype, and are rounded to it at the stage's border where it is
    not the one that the stage computes in.
    """

    def __init__(self, model: StageModel, sampler: Sampler | None, wire_dtype: WireDType) -> None:
        self._model = model
        self._sampler = sampler
        self._wire_dtype = wire_dtype
        self._owners: dict[SlotId, _Owner] = {}

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now; see StageCompute."""
        return self._model.kv.blocks_used

    def use_wire(self, dtype: WireDType) -> None:
        """Give activations in `dtype` from now on, and take no other."""
        self._wire_dtype = dtype

    def operate(self, operation: SlotOperation) -> None:
        """Open or close a sequence, or free a slot; see StageCompute.

        What is said of a slot that another sequence owns is ignored: its opening was lost with a
        ring.
        """
        kv = self._model.kv
        match operation:
            case SequenceOpened(slot=slot, n_kept=n_kept, source=source):
                if source is not None:
                    kv.copy(source, slot, n_kept)
                kv.trim(slot, n_kept)
                self._owners[slot] = _Owner(
                    sequence_id=operation.sequence_id, sampling=operation.sampling
                )
            case SequenceClosed(sequence_id=sequence_id, slot=slot, n_kept=n_kept):
                owner = self._owners.get(slot)
                if owner is not None and owner.sequence_id == sequence_id:
                    del self._owners[slot]
                    kv.trim(slot, n_kept)
            case SlotFreed(slot=slot):
                if slot not in self._owners:
                    kv.free(slot)
            case _:
                assert_never(operation)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """Run the layers; see StageCompute. Raises RemoteProtocolError for rows of no owner."""
        for group in batch.groups:
            owner = self._owners.get(group.slot)
            if owner is None or owner.sequence_id != group.sequence_id:
                raise RemoteProtocolError(
                    f"step {batch.step} has rows of sequence {group.sequence_id} in slot "
                    f"{group.slot}, which that sequence does not own"
                )
        output = self._model.forward(batch, self._hidden(batch, activations))
        if self._sampler is not None:
            return self._sample(self._sampler, batch, output)
        payload = pack_rows(output, self._wire_dtype)
        return Activations(payload=payload, dtype=self._wire_dtype, width=self._model.width)

    def reset(self) -> None:
        """Forget all sequences and free all slots; keep the weights."""
        self._model.kv.clear()
        self._owners.clear()

    def _hidden(self, batch: MicroBatch, activations: Activations | None) -> torch.Tensor | None:
        if activations is None:
            return None
        if activations.width != self._model.width:
            raise RemoteProtocolError(
                f"step {batch.step} came {activations.width} wide, the model is {self._model.width}"
            )
        if activations.dtype is not self._wire_dtype:
            raise RemoteProtocolError(
                f"step {batch.step} came in {activations.dtype.value}, this ring's wire is "
                f"{self._wire_dtype.value}"
            )
        hidden = unpack_rows(
            activations.payload,
            activations.dtype,
            batch.n_rows,
            activations.width,
            self._model.device,
        )
        return hidden.to(self._model.dtype)

    def _sample(self, sampler: Sampler, batch: MicroBatch, logits: torch.Tensor) -> Samples:
        """Sample the last `n_sampled` rows of each group."""
        rows = [
            SampleRow(params=self._owners[group.slot].sampling, position=position)
            for group in batch.groups
            for position in range(
                group.position + group.n_rows - group.n_sampled, group.position + group.n_rows
            )
        ]
        if not rows:
            return Samples(token_ids=(), logprobs=())
        result = sampler.sample(logits, rows)
        return Samples(token_ids=result.token_ids, logprobs=result.logprobs)
