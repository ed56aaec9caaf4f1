"""EXTRAS and SEQUENCE frames: what goes with a step beside its rows, and slot operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shardnet.constraints import MAX_MASK_BYTES, MaskForm, RowMask, TokenMask
from shardnet.errors import RemoteProtocolError
from shardnet.sampling_params import MAX_LOGPROBS, Probability, RepetitionPenalty, Temperature
from shardnet.slot_operations import MAX_DRAFTS, SlotOperation
from shardnet.types import MAX_LAYERS, U32, U64, LayerNumber, Positions, Report, Row, Strict
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import Logprob, Rank, decode, encode

MAX_STEP_ROWS: Final = 4096
"""Rows of one step that have logprobs: with all their top entries they decode to 100 MB at most."""
MAX_MICROSECONDS: Final = 10**15
Microseconds = Annotated[int, Meta(ge=0, le=MAX_MICROSECONDS)]


class StageTiming(Row, frozen=True, array_like=True):
    """How long one step took in one stage, microseconds, and when it came, by that stage's clock.

    The clock counts from a moment of its own.
    """

    rank: Rank
    compute_us: Microseconds
    queue_us: Microseconds
    arrived_us: Microseconds


LikelyTokens = Annotated[tuple[tuple[U32, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]
"""Token ids and logprobs of the most likely tokens of a row, the likeliest first."""


class RowLogprobs(Row, frozen=True, array_like=True):
    """The logprobs of sampled row number `row` of the step, counted over sampled rows from 0."""

    row: U32
    token_id: U32
    logprob: Logprob
    top: LikelyTokens


class PromptLogprobs(Row, frozen=True, array_like=True):
    """The logprobs of the prompt's token at a position, of the row before it."""

    sequence_id: U64
    position: Positions
    token_id: U32
    logprob: Logprob
    top: LikelyTokens


class StageExperts(Row, frozen=True, array_like=True):
    """The experts that a sequence's rows of the step visited in the layers of one stage.

    `experts` is int16, little-endian: row by row, in a row layer by layer from `first_layer` on, in
    a layer `top_k`, the best first; -1 where the layer has none.
    """

    sequence_id: U64
    first_layer: LayerNumber
    n_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    top_k: Annotated[int, Meta(ge=1, le=32_767)]
    experts: Annotated[bytes, Meta(max_length=1 << 24)]


class RowTokenMask(Row, frozen=True, array_like=True):
    """Which tokens may be drawn for sampled row number `row` of the step.

    By `form`, `data` is a bit per token, or the ids that are allowed, or those that are not.
    """

    row: U32
    form: Annotated[int, Meta(ge=0, le=2)]
    data: Annotated[bytes, Meta(max_length=MAX_MASK_BYTES)]


class Drafts(Row, frozen=True, array_like=True):
    """What the tail drafts for a sequence: the tokens from `position` on, behind its newest one."""

    sequence_id: U64
    position: Positions
    token_ids: Annotated[list[U32], Meta(max_length=MAX_DRAFTS)]


class Extras(Strict, frozen=True, kw_only=True):
    """What goes with a step beside its rows or tokens. It precedes the step's own frame.

    `routing` has the parts of all stages so far, in their order. `masks`
    are on their way to the tail, `drafts` come from there.
    """

    logprobs: Annotated[list[RowLogprobs], Meta(max_length=MAX_STEP_ROWS)] = []
    prompt_logprobs: Annotated[list[PromptLogprobs], Meta(max_length=MAX_STEP_ROWS)] = []
    routing: Annotated[list[StageExperts], Meta(max_length=1 << 14)] = []
    masks: Annotated[list[RowTokenMask], Meta(max_length=MAX_STEP_ROWS)] = []
    drafts: Annotated[list[Drafts], Meta(max_length=MAX_STEP_ROWS)] = []


_extras_decoder = msgspec.msgpack.Decoder(Extras)


def extras_frame(extras: Extras, *, epoch: int, step: int) -> Frame:
    """Make an EXTRAS frame for a step."""
    return Frame(kind=FrameKind.EXTRAS, epoch=epoch, step=step, meta=encode(extras))


def read_extras(frame: Frame) -> Extras:
    """Read an EXTRAS frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_extras_decoder, frame)


def mask_rows(masks: Sequence[RowMask]) -> list[RowTokenMask]:
    """Write the masks of a step."""
    return [
        RowTokenMask(row=each.row, form=int(each.mask.form), data=each.mask.data) for each in masks
    ]


def read_masks(rows: Sequence[RowTokenMask], n_sampled: int) -> tuple[RowMask, ...]:
    """Read the masks of a step that samples `n_sampled` rows.

    Raises RemoteProtocolError for rows out of order or beyond these, and half an id.
    """
    last = -1
    for each in rows:
        if not last < each.row < n_sampled:
            raise RemoteProtocolError(
                f"a mask of row {each.row} came after that of row {last}, in a step that samples "
                f"{n_sampled}"
            )
        last = each.row
        if each.form != MaskForm.BITS and len(each.data) % 4:
            raise RemoteProtocolError(f"a mask of token ids has {len(each.data)} bytes")
    return tuple(RowMask(each.row, TokenMask(MaskForm(each.form), each.data)) for each in rows)


class RecommendedSampling(Report, frozen=True, kw_only=True):
    """The sampling that a model's makers recommend; null where they say nothing."""

    temperature: Temperature | None = None
    top_k: U32 | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None


_decoder: msgspec.msgpack.Decoder[SlotOperation] = msgspec.msgpack.Decoder(SlotOperation)


def sequence_frame(operation: SlotOperation, *, epoch: int) -> Frame:
    """Make a SEQUENCE frame: a slot operation, carried out in the order of the data frames."""
    return Frame(kind=FrameKind.SEQUENCE, epoch=epoch, meta=encode(operation))


def read_sequence(frame: Frame) -> SlotOperation:
    """Read a SEQUENCE frame; sampling and outputs are not checked beyond the bounds of their types.

    Raises RemoteProtocolError when it breaks the schema.
    """
    return decode(_decoder, frame)
