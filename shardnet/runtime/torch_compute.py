"""A stage's compute in torch: layers and KV cache of a StageModel, and on the last stage the tail.

Knows how to go from wire values to tensors and back. Must not know links, rings or threads.
"""

from __future__ import annotations

from typing import assert_never

import torch

from shardnet.errors import RemoteProtocolError
from shardnet.model.codec import from_bytes, to_bytes, torch_dtype
from shardnet.model.sampler import Sampler
from shardnet.model.stage_model import StageModel
from shardnet.runtime.compute import (
    Activations,
    Samples,
    SequenceClosed,
    SequenceOpened,
    SlotFreed,
    SlotOperation,
)
from shardnet.runtime.tail import Tail
from shardnet.types import DType, MicroBatch, SlotId


class TorchCompute:
    """StageCompute over a loaded StageModel. `sampler` is None but on the tail.

    Activations travel in `wire_dtype`; a stage that computes in another dtype rounds at its border.
    """

    def __init__(self, model: StageModel, sampler: Sampler | None, wire_dtype: DType) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._owners: dict[SlotId, SequenceOpened] = {}
        self._tail = None if sampler is None else Tail(model, sampler, self._owners)

    def operate(self, operation: SlotOperation) -> None:
        """Open or close a sequence, or free a slot; see StageCompute.

        What is said of a slot that another sequence owns is ignored: its opening was lost with a
        ring.
        """
        match operation:
            case SequenceOpened(slot=slot, n_kept=n_kept, source=source):
                self._keep(slot, n_kept, source)
                self._owners[slot] = operation
            case SequenceClosed(sequence_id=sequence_id, slot=slot, n_kept=n_kept):
                owner = self._owners.get(slot)
                if owner is not None and owner.sequence_id == sequence_id:
                    del self._owners[slot]
                    self._keep(slot, n_kept, None)
            case SlotFreed(slot=slot):
                if slot not in self._owners:
                    self._keep(slot, 0, None)
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
        output = self._model.run(batch, self._hidden(batch, activations))
        if self._tail is not None:
            return self._tail.answer(batch, output)
        wire = output.to(torch_dtype(self._wire_dtype))
        return Activations(
            payload=to_bytes(wire), dtype=self._wire_dtype, width=int(output.shape[-1])
        )

    def reset(self) -> None:
        """Forget all sequences and free all slots; keep the weights."""
        self._model.kv.clear()
        self._owners.clear()
        if self._tail is not None:
            self._tail.clear()

    def _keep(self, slot: SlotId, n_positions: int, source: SlotId | None) -> None:
        """Keep the first positions of the slot, its own or copied from `source`, and no others."""
        if source is not None:
            self._model.kv.copy(source, slot, n_positions)
        self._model.kv.trim(slot, n_positions)
        if self._tail is not None:
            self._tail.keep(slot, n_positions, source)

    def _hidden(self, batch: MicroBatch, activations: Activations | None) -> torch.Tensor | None:
        if activations is None:
            return None
        if activations.width != self._model.width:
            raise RemoteProtocolError(
                f"step {batch.step} came {activations.width} wide, the model is {self._model.width}"
            )
        hidden = from_bytes(
            activations.payload,
            activations.dtype,
            batch.n_rows,
            activations.width,
            self._model.device,
        )
        return hidden.to(self._model.dtype)
