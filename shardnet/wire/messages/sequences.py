"""SEQUENCE frames: slot operations, and how a sequence is sampled and what else it gives.

Knows the fields, their types and their bounds (docs/protocol.md section 11). Knows nothing of what
is done with a message.
"""

from __future__ import annotations

from typing import Annotated, assert_never

import msgspec
from msgspec import Meta

from shardnet import slot_operations
from shardnet.output_params import OutputParams
from shardnet.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS, MAX_TEMPERATURE, SamplingParams
from shardnet.slot_operations import (
    MAX_ADAPTER_SCALE,
    MAX_ADAPTERS,
    MAX_DRAFTS,
    SlotOperation,
)
from shardnet.types import SequenceId, SlotId
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import (
    MAX_LAYERS,
    U32,
    U64,
    BlockKeys,
    Digest,
    LayerNumber,
    NLogprobs,
    Positions,
    Row,
    Strict,
    Tagged,
    Travelling,
    decode,
    encode,
)

Probability = Annotated[float, Meta(ge=0, le=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class Sampling(Travelling[SamplingParams], frozen=True, kw_only=True):
    """The fields of `SamplingParams`, as they travel."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] = 0.0
    top_k: U32 = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[tuple[tuple[U32, Bias], ...], Meta(max_length=MAX_LOGIT_BIASES)] = ()
    min_tokens: U32 = 0
    seed: U64 = 0
    sample_index: U32 = 0
    n_logprobs: NLogprobs | None = None

    def params(self) -> SamplingParams:
        """Return the parameters, not checked: the caller decides what `check` failing means."""
        return SamplingParams(**msgspec.structs.asdict(self))


class RecommendedSampling(Strict, frozen=True, kw_only=True):
    """The sampling that a model's makers recommend; null where they say nothing."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_k: U32 | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None


class Outputs(Travelling[OutputParams], frozen=True, kw_only=True):
    """The fields of `OutputParams`, as they travel."""

    n_prompt_logprobs: NLogprobs | None = None
    logit_rows: U32 | None = None
    hidden_rows: U32 | None = None
    hidden_mean: bool = False
    before_norm: bool = False
    routing: bool = False
    hidden_layers: Annotated[tuple[LayerNumber, ...], Meta(max_length=MAX_LAYERS)] = ()
    every_layer: bool = False

    def params(self) -> OutputParams:
        """Return the parameters, not checked: the caller decides what `check` failing means."""
        return OutputParams(**msgspec.structs.asdict(self))


class AdapterUse(Row, frozen=True, array_like=True):
    """An adapter of a sequence, and what its part is multiplied by."""

    adapter_id: Digest
    scale: Annotated[float, Meta(ge=-MAX_ADAPTER_SCALE, le=MAX_ADAPTER_SCALE)]


class OpenSequence(Tagged, frozen=True, kw_only=True):
    """A sequence takes a slot; the tail learns how to sample it and what else it is to give.

    The first `n_kept` positions stay, are copied from the slot `source`, or with `is_restored` are
    what RestorePrefix has read for this sequence. Its output begins at position `n_prompt`;
    `stop_ids` are those that `min_tokens` holds back. Behind a sampled token the tail makes at most
    `n_drafts` drafts. Every stage adds `adapters`, each once, to the sequence's rows.
    """

    sequence_id: U64
    slot: U32
    sampling: Sampling
    n_kept: Positions = 0
    source: U32 | None = None
    n_prompt: Positions = 0
    stop_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    outputs: Outputs = Outputs()
    is_restored: bool = False
    n_drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0
    adapters: Annotated[tuple[AdapterUse, ...], Meta(max_length=MAX_ADAPTERS)] = ()

    def operation(self) -> slot_operations.OpenSequence:
        """Return the operation; its parameters are unchecked."""
        return slot_operations.OpenSequence(
            sequence_id=SequenceId(self.sequence_id),
            slot=SlotId(self.slot),
            sampling=self.sampling.params(),
            n_kept=self.n_kept,
            source=None if self.source is None else SlotId(self.source),
            n_prompt=self.n_prompt,
            stop_ids=self.stop_ids,
            outputs=self.outputs.params(),
            is_restored=self.is_restored,
            n_drafts=self.n_drafts,
            adapters=tuple(
                slot_operations.AdapterUse(adapter_id=use.adapter_id, scale=use.scale)
                for use in self.adapters
            ),
        )


class CloseSequence(Tagged, frozen=True, kw_only=True):
    """A sequence has ended. Its slot keeps the first `n_kept` positions, without any it is free.

    Its first blocks are written to disk under the keys `stored`, where they are not there yet.
    """

    sequence_id: U64
    slot: U32
    n_kept: Positions = 0
    stored: BlockKeys = ()

    def operation(self) -> slot_operations.CloseSequence:
        """Return the operation."""
        return slot_operations.CloseSequence(
            sequence_id=SequenceId(self.sequence_id),
            slot=SlotId(self.slot),
            n_kept=self.n_kept,
            stored=self.stored,
        )


class FreeSlot(Tagged, frozen=True, kw_only=True):
    """A slot that no sequence owns gives its positions and blocks back."""

    slot: U32

    def operation(self) -> slot_operations.FreeSlot:
        """Return the operation."""
        return slot_operations.FreeSlot(slot=SlotId(self.slot))


SequenceMessage = OpenSequence | CloseSequence | FreeSlot
"""How a `SlotOperation` travels. Outside of this module only the operation is used."""

_decoder: msgspec.msgpack.Decoder[SequenceMessage] = msgspec.msgpack.Decoder(SequenceMessage)


def _message(operation: SlotOperation) -> SequenceMessage:
    match operation:
        case slot_operations.OpenSequence():
            return OpenSequence(
                sequence_id=operation.sequence_id,
                slot=operation.slot,
                sampling=Sampling.of(operation.sampling),
                n_kept=operation.n_kept,
                source=operation.source,
                n_prompt=operation.n_prompt,
                stop_ids=operation.stop_ids,
                outputs=Outputs.of(operation.outputs),
                is_restored=operation.is_restored,
                n_drafts=operation.n_drafts,
                adapters=tuple(AdapterUse(use.adapter_id, use.scale) for use in operation.adapters),
            )
        case slot_operations.CloseSequence():
            return CloseSequence(
                sequence_id=operation.sequence_id,
                slot=operation.slot,
                n_kept=operation.n_kept,
                stored=operation.stored,
            )
        case slot_operations.FreeSlot(slot=slot):
            return FreeSlot(slot=slot)
        case _:
            assert_never(operation)


def sequence_frame(operation: SlotOperation, *, epoch: int) -> Frame:
    """Make a SEQUENCE frame: a slot operation, carried out in the order of the data frames."""
    return Frame(kind=FrameKind.SEQUENCE, epoch=epoch, meta=encode(_message(operation)))


def read_sequence(frame: Frame) -> SlotOperation:
    """Read a SEQUENCE frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_decoder, frame).operation()
