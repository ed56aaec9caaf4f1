"""The msgpack schemas of every frame that is no control message: hello, errors, slots, extras.

Knows the fields, their types and their bounds (docs/protocol.md sections 6 to 8). Knows nothing of
what is done with a message.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from shardnet.errors import ShardnetError
from shardnet.types import MAX_LOGIT_BIASES, MAX_STOP_IDS, OutputParams, SamplingParams
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import (
    MAX_EXPLANATION,
    MAX_STAGES,
    U32,
    U64,
    Count,
    Explanation,
    Name,
    Rank,
    Row,
    Strict,
    Tagged,
    Travelling,
    decode,
    encode,
)

# --- HELLO and ERROR frames ---------------------------------------------------------------------


class Purpose(enum.Enum):
    """What a link is for."""

    CONTROL = "control"
    DATA = "data"
    BULK = "bulk"


class Role(enum.Enum):
    """Who is at an end of a link."""

    NODE = "node"
    CLIENT = "client"


class Hello(Strict, frozen=True, kw_only=True):
    """The first frame of each side: who it is and what the link is for.

    On data links `ring` and `epoch` name the ring and `rank` is the sender's.
    """

    purpose: Purpose
    role: Role
    node: Name
    name: Name
    version: Annotated[str, Meta(max_length=64)]
    ring: Name = ""
    epoch: U32 = 0
    rank: Rank = 0


class ErrorReport(Strict, frozen=True, kw_only=True):
    """The meta of an ERROR frame. Without sequence and step it is about the link, and ends it."""

    code: U32
    message: Explanation
    sequence: U64 | None = None


# --- SEQUENCE and EXTRAS frames, on data links --------------------------------------------------


class Sampling(Travelling[SamplingParams], frozen=True, kw_only=True):
    """The fields of `types.SamplingParams`, as they travel."""

    temperature: float = 0.0
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[tuple[tuple[U32, float], ...], Meta(max_length=MAX_LOGIT_BIASES)] = ()
    min_tokens: U32 = 0
    seed: U64 = 0
    sample_index: U32 = 0
    n_logprobs: U32 | None = None

    def params(self) -> SamplingParams:
        """Give the parameters, unchecked: the caller decides what `check` failing means."""
        return SamplingParams(**msgspec.structs.asdict(self))


class Outputs(Travelling[OutputParams], frozen=True, kw_only=True):
    """The fields of `types.OutputParams`, as they travel."""

    n_prompt_logprobs: U32 | None = None
    logit_rows: U32 | None = None
    hidden_rows: U32 | None = None
    hidden_mean: bool = False
    before_norm: bool = False
    routing: bool = False

    def params(self) -> OutputParams:
        """Give the parameters, unchecked: the caller decides what `check` failing means."""
        return OutputParams(**msgspec.structs.asdict(self))


class OpenSequence(Tagged, frozen=True, kw_only=True):
    """A sequence takes a slot; the tail learns how to sample it and what else it is to give.

    The first `n_kept` positions stay, or are copied from the slot `source`. Its output begins at
    position `n_prompt`; `stop_ids` are those that `min_tokens` holds back.
    """

    sequence_id: U64
    slot: U32
    sampling: Sampling
    n_kept: U32 = 0
    source: U32 | None = None
    n_prompt: U32 = 0
    stop_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    outputs: Outputs = Outputs()


class CloseSequence(Tagged, frozen=True, kw_only=True):
    """A sequence has ended. Its slot keeps the first `n_kept` positions, without any it is free."""

    sequence_id: U64
    slot: U32
    n_kept: U32 = 0


class FreeSlot(Tagged, frozen=True, kw_only=True):
    """A slot that no sequence owns gives its positions and blocks back."""

    slot: U32


SlotOperation = OpenSequence | CloseSequence | FreeSlot


class StageTiming(Row, frozen=True, array_like=True):
    """How long one step took in one stage, microseconds, by that stage's own clock."""

    rank: Rank
    compute_us: Count
    queue_us: Count


class TopLogprob(Row, frozen=True, array_like=True):
    """One of the most likely tokens of a row."""

    token_id: U32
    logprob: float


class RowLogprobs(Row, frozen=True, array_like=True):
    """The logprobs of sampled row number `row` of the step, counted over sampled rows from 0."""

    row: U32
    token_id: U32
    logprob: float
    top: Annotated[list[TopLogprob], Meta(max_length=1024)]


class PromptLogprobs(Row, frozen=True, array_like=True):
    """The logprobs of the prompt's token at a position, of the row before it."""

    sequence_id: U64
    position: U32
    token_id: U32
    logprob: float
    top: Annotated[list[TopLogprob], Meta(max_length=1024)]


class StageExperts(Row, frozen=True, array_like=True):
    """The experts that a sequence's rows of the step visited in the layers of one stage.

    `experts` is int16, little-endian: row by row, in a row layer by layer from `first_layer` on, in
    a layer `top_k`, the best first; -1 where the layer has none.
    """

    sequence_id: U64
    first_layer: U32
    n_layers: Annotated[int, Meta(ge=1, le=10_000)]
    top_k: Annotated[int, Meta(ge=1, le=32_767)]
    experts: Annotated[bytes, Meta(max_length=1 << 24)]


class Extras(Strict, frozen=True, kw_only=True, omit_defaults=True):
    """What goes with a step beside its tokens. It precedes the step's own frame.

    Empty lists are left out. `routing` has the parts of all stages so far, in their order.
    """

    timings: Annotated[list[StageTiming], Meta(max_length=MAX_STAGES)] = msgspec.field(
        default_factory=list
    )
    logprobs: Annotated[list[RowLogprobs], Meta(max_length=1 << 14)] = msgspec.field(
        default_factory=list
    )
    prompt_logprobs: Annotated[list[PromptLogprobs], Meta(max_length=1 << 14)] = msgspec.field(
        default_factory=list
    )
    routing: Annotated[list[StageExperts], Meta(max_length=1 << 14)] = msgspec.field(
        default_factory=list
    )


# --- between messages and frames ----------------------------------------------------------------

_hello_decoder = msgspec.msgpack.Decoder(Hello)
_error_decoder = msgspec.msgpack.Decoder(ErrorReport)
_slot_decoder: msgspec.msgpack.Decoder[SlotOperation] = msgspec.msgpack.Decoder(SlotOperation)
_extras_decoder = msgspec.msgpack.Decoder(Extras)


def hello_frame(hello: Hello) -> Frame:
    """Make the HELLO frame."""
    return Frame(kind=FrameKind.HELLO, meta=encode(hello))


def read_hello(frame: Frame) -> Hello:
    """Read a HELLO frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_hello_decoder, frame)


def explanation(cause: ShardnetError | str, most_bytes: int = MAX_EXPLANATION) -> str:
    """Give an error's message, or other words, as they may travel: valid UTF-8, not too long."""
    raw = str(cause).encode("utf-8", "replace")[:most_bytes]
    return raw.decode("utf-8", "ignore")


def error_frame(
    error: ShardnetError, *, epoch: int = 0, step: int = 0, sequence: int | None = None
) -> Frame:
    """Make an ERROR frame: about a step or a sequence, or else about the link, which it ends."""
    message = explanation(error)
    report = ErrorReport(code=error.code, message=message, sequence=sequence)
    return Frame(kind=FrameKind.ERROR, epoch=epoch, step=step, meta=encode(report))


def read_error(frame: Frame) -> ErrorReport:
    """Read an ERROR frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_error_decoder, frame)


def sequence_frame(operation: SlotOperation, *, epoch: int) -> Frame:
    """Make a SEQUENCE frame: a slot operation, carried out in the order of the data frames."""
    return Frame(kind=FrameKind.SEQUENCE, epoch=epoch, meta=encode(operation))


def read_sequence(frame: Frame) -> SlotOperation:
    """Read a SEQUENCE frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_slot_decoder, frame)


def extras_frame(extras: Extras, *, epoch: int, step: int) -> Frame:
    """Make an EXTRAS frame for a step."""
    return Frame(kind=FrameKind.EXTRAS, epoch=epoch, step=step, meta=encode(extras))


def read_extras(frame: Frame) -> Extras:
    """Read an EXTRAS frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_extras_decoder, frame)
