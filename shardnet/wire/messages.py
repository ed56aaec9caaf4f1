"""Control messages and the other msgpack schemas: what the metas of frames say.

Knows the fields, their types and their bounds (docs/protocol.md sections 6 to 8 and 11). Every
message is a strict struct: an unknown field, a missing one or a value out of bounds is the peer's
fault and becomes RemoteProtocolError here, at the edge. Knows nothing of what is done with it.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from shardnet.errors import RemoteProtocolError, ShardnetError, error_for_code
from shardnet.types import SamplingParams
from shardnet.wire.frames import Frame, FrameKind

U32_MAX: Final = 2**32 - 1
MAX_STAGES: Final = 256
MAX_PEER_ADDRESSES: Final = 16

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
Name = Annotated[str, Meta(max_length=256)]
Address = Annotated[str, Meta(max_length=300)]
"""`host:port`, an IPv6 host in brackets."""
Addresses = Annotated[list[Address], Meta(max_length=MAX_STAGES)]
PathText = Annotated[str, Meta(max_length=4096)]
Digest = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=1 << 20)]
MAX_EXPLANATION: Final = 2000
Explanation = Annotated[str, Meta(max_length=MAX_EXPLANATION)]
"""Text for a person: an error's message, the reason of a plan."""
TokenIds = Annotated[list[U32], Meta(max_length=1 << 20)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A map with exactly these keys."""


class _Tagged(_Strict, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """A member of a union: the key `type` holds the class name."""


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array with exactly these elements, in this order."""


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


class Hello(_Strict, frozen=True, kw_only=True):
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


class ErrorReport(_Strict, frozen=True, kw_only=True):
    """The meta of an ERROR frame. Without sequence and step it is about the link, and ends it."""

    code: U32
    message: Explanation
    sequence: U64 | None = None


# --- SEQUENCE and EXTRAS frames, on data links --------------------------------------------------


class Sampling(_Strict, frozen=True, kw_only=True):
    """The fields of `types.SamplingParams`, as they travel."""

    temperature: float = 0.0
    top_k: Count = 0
    top_p: float = 1.0
    seed: U64 = 0
    sample_index: U32 = 0
    n_logprobs: U32 | None = None

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """Copy `params` field by field."""
        return cls(**{field: getattr(params, field) for field in cls.__struct_fields__})

    def params(self) -> SamplingParams:
        """Give the parameters, unchecked: the caller decides what `check` failing means."""
        return SamplingParams(**msgspec.structs.asdict(self))


class OpenSequence(_Tagged, frozen=True, kw_only=True):
    """A sequence takes a slot; the tail learns how to sample it."""

    sequence_id: U64
    slot: U32
    sampling: Sampling


class CloseSequence(_Tagged, frozen=True, kw_only=True):
    """A sequence has ended and gives its slot and blocks back."""

    sequence_id: U64
    slot: U32


SlotOperation = OpenSequence | CloseSequence


class StageTiming(_Row, frozen=True, array_like=True):
    """How long one step took in one stage, microseconds, by that stage's own clock."""

    rank: Rank
    compute_us: Count
    queue_us: Count


class TopLogprob(_Row, frozen=True, array_like=True):
    """One of the most likely tokens of a row."""

    token_id: U32
    logprob: float


class RowLogprobs(_Row, frozen=True, array_like=True):
    """The logprobs of sampled row number `row` of the step, counted over sampled rows from 0."""

    row: U32
    token_id: U32
    logprob: float
    top: Annotated[list[TopLogprob], Meta(max_length=1024)]


class Extras(_Strict, frozen=True, kw_only=True):
    """What goes with a step beside its tokens. It precedes the step's own frame."""

    timings: Annotated[list[StageTiming], Meta(max_length=MAX_STAGES)] = []
    logprobs: Annotated[list[RowLogprobs], Meta(max_length=1 << 14)] = []


# --- CONTROL frames between nodes ---------------------------------------------------------------


class StageInfo(_Strict, frozen=True, kw_only=True):
    """The stage that a node runs."""

    model: PathText
    layers: tuple[U32, U32]
    rank: Rank


class NodeInfo(_Strict, frozen=True, kw_only=True):
    """What a node tells of itself. `host_id` is equal for nodes on one machine."""

    node: Name
    name: Name
    address: Address
    version: Name
    device: Name
    memory_bytes: Count
    memory_free_bytes: Count
    cores: U32
    threads: U32
    dtypes: Annotated[list[Name], Meta(max_length=16)]
    host_id: Name
    stage: StageInfo | None = None


class Status(_Tagged, frozen=True, kw_only=True):
    """Ask a node who it is and, with `with_peers`, who those are that it knows."""

    request: RequestId
    with_peers: bool


class StatusReply(_Tagged, frozen=True, kw_only=True):
    """Answers Status."""

    request: RequestId
    node: NodeInfo
    peers: Annotated[list[NodeInfo], Meta(max_length=1024)]


class Ping(_Tagged, frozen=True, kw_only=True):
    """Ask for an answer at once, to measure the round trip. Answered by Done."""

    request: RequestId


class KnownPeer(_Strict, frozen=True, kw_only=True):
    """A node, and the addresses at which others may reach it, best first."""

    node: Name
    name: Name
    addresses: Annotated[list[Address], Meta(max_length=MAX_PEER_ADDRESSES)]


class PeersKnown(_Tagged, frozen=True, kw_only=True):
    """Tell a peer, unasked, of the sender itself and of every node it has a control link to.

    Sent when a link is up, and again when it has changed: each takes the place of the one before.
    """

    peers: Annotated[list[KnownPeer], Meta(max_length=1024)]


class IdentifyModel(_Tagged, frozen=True, kw_only=True):
    """Ask a node which model it finds at a path."""

    request: RequestId
    model: PathText


class ModelIdentity(_Tagged, frozen=True, kw_only=True):
    """Answers IdentifyModel. `model_id` is hexadecimal SHA-256 (design decision 9)."""

    request: RequestId
    model_id: Digest


class LoadStage(_Tagged, frozen=True, kw_only=True):
    """Tell a node to load its stage of a ring. A node with another `model_id` refuses.

    `addresses` are the nodes of the ring in order; `threads` 0 leaves the number to the node.
    """

    request: RequestId
    ring: Name
    epoch: U32
    rank: Rank
    n_stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    model: PathText
    model_id: Digest
    layers: tuple[U32, U32]
    dtype: Name
    context: U32
    threads: U32
    addresses: Addresses


class LoadProgress(_Tagged, frozen=True, kw_only=True):
    """How far a LoadStage is. Sent at least every few seconds: it is not silence."""

    request: RequestId
    done_bytes: Count
    total_bytes: Count


class StageReady(_Tagged, frozen=True, kw_only=True):
    """Answers LoadStage: the stage is loaded. `kernel` names the matrix products' path.

    `room_blocks` is the KV room that is really there; `reused` that the weights were there already.
    """

    request: RequestId
    weight_bytes: Count
    room_blocks: Count
    reused: bool
    kernel: Name
    load_s: Seconds


class RingBroken(_Tagged, frozen=True, kw_only=True):
    """Tell the head, unasked, that the sender's stage left a ring, and why."""

    ring: Name
    epoch: U32
    code: U32
    message: Explanation


class ConnectRing(_Tagged, frozen=True, kw_only=True):
    """Tell a node to open its data link to the next node of a ring."""

    request: RequestId
    ring: Name
    epoch: U32


class UnloadStage(_Tagged, frozen=True, kw_only=True):
    """Tell a node to free its stage of a ring."""

    request: RequestId
    ring: Name


class Done(_Tagged, frozen=True, kw_only=True):
    """Answers a request that has nothing to report."""

    request: RequestId


class Failed(_Tagged, frozen=True, kw_only=True):
    """Answers any request: it failed. Codes are those of ERROR frames."""

    request: RequestId
    code: U32
    message: Explanation


# --- CONTROL frames between a client and a node -------------------------------------------------


class ModelChoice(_Strict, frozen=True, kw_only=True):
    """Which model, on which nodes, how. Empty and 0 mean: as the nodes find best."""

    model: PathText
    nodes: Addresses = []
    layers: Annotated[list[tuple[U32, U32]], Meta(max_length=MAX_STAGES)] = []
    context: U32 = 0
    dtype: Name = "auto"
    threads: U32 = 0


class PlanRequest(_Tagged, frozen=True, kw_only=True):
    """Ask for the plan that would be used. Answered by PlanReply or Redirect."""

    request: RequestId
    choice: ModelChoice


class PlannedStage(_Strict, frozen=True, kw_only=True):
    """One stage of a plan, its memory as predicted."""

    rank: Rank
    node: Name
    name: Name
    address: Address
    layers: tuple[U32, U32]
    weight_bytes: Count
    kv_bytes: Count
    compute_ms: Seconds | None = None


class LeftOut(_Strict, frozen=True, kw_only=True):
    """A node that a plan does not use, and why."""

    node: Name
    name: Name
    why: Explanation


class PlanReply(_Tagged, frozen=True, kw_only=True):
    """A plan. It answers PlanRequest, and precedes the tokens of Generate."""

    request: RequestId
    model: PathText
    model_id: Digest
    dtype: Name
    context: U32
    stages: Annotated[list[PlannedStage], Meta(max_length=MAX_STAGES)]
    left_out: Annotated[list[LeftOut], Meta(max_length=1024)] = []
    predicted_tok_s: Seconds | None = None
    why: Explanation


class NodeProgress(_Tagged, frozen=True, kw_only=True):
    """Tells the client of a Generate how far the node of a stage is with loading."""

    request: RequestId
    rank: Rank
    done_bytes: Count
    total_bytes: Count


class Generate(_Tagged, frozen=True, kw_only=True):
    """Ask for the continuation of one prompt: `token_ids` if there are any, else `prompt`."""

    request: RequestId
    choice: ModelChoice
    sampling: Sampling
    prompt: Text = ""
    token_ids: TokenIds | None = None
    max_tokens: U32 = 256
    stop: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)] = []
    stop_token_ids: Annotated[list[U32], Meta(max_length=1024)] = []
    ignore_eos: bool = False
    bos: Literal["auto", "on", "off"] = "auto"
    keep_special_tokens: bool = False


class Cancel(_Tagged, frozen=True, kw_only=True):
    """Give a running request up. It is answered by Failed with code 41 or its own end."""

    request: RequestId


class Unload(_Tagged, frozen=True, kw_only=True):
    """Ask a node to free the model of its ring on every node. Answered by Done or Redirect."""

    request: RequestId


class Redirect(_Tagged, frozen=True, kw_only=True):
    """Ask the node at `address` instead: it is the ring's head."""

    request: RequestId
    address: Address


class TopToken(_Row, frozen=True, array_like=True):
    """One of the most likely tokens of a row, with its text."""

    token_id: U32
    token: Text
    logprob: float


class TokenDetail(_Strict, frozen=True, kw_only=True):
    """The logprob of a generated token and of the most likely ones in its place."""

    token_id: U32
    token: Text
    bytes: Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(max_length=4096)]
    logprob: float
    top: Annotated[list[TopToken], Meta(max_length=1024)]


class TextPiece(_Tagged, frozen=True, kw_only=True):
    """More of the answer: new tokens, and the text that is whole by now."""

    request: RequestId
    token_ids: TokenIds
    tokens: Annotated[list[Text], Meta(max_length=1 << 20)]
    text: Text
    logprobs: Annotated[list[TokenDetail], Meta(max_length=1 << 14)] | None = None


class StageShare(_Strict, frozen=True, kw_only=True):
    """Where the time of a mean decode step went, for one stage."""

    rank: Rank
    compute_ms: Seconds
    queue_ms: Seconds
    wire_ms: Seconds


class Timing(_Strict, frozen=True, kw_only=True):
    """How long a request took, by the head's clock."""

    load_s: Seconds
    ttft_s: Seconds
    decode_tok_s: Seconds
    total_s: Seconds
    per_stage: Annotated[list[StageShare], Meta(max_length=MAX_STAGES)]


class Finished(_Tagged, frozen=True, kw_only=True):
    """The answer is complete. `text` is what was held back until now."""

    request: RequestId
    finish_reason: Name
    prompt_token_ids: TokenIds
    text: Text
    timing: Timing


ControlMessage = (
    Status
    | StatusReply
    | Ping
    | PeersKnown
    | IdentifyModel
    | ModelIdentity
    | LoadStage
    | LoadProgress
    | StageReady
    | ConnectRing
    | RingBroken
    | UnloadStage
    | Done
    | Failed
    | PlanRequest
    | PlanReply
    | NodeProgress
    | Generate
    | Cancel
    | Unload
    | Redirect
    | TextPiece
    | Finished
)


# --- between messages and frames ----------------------------------------------------------------

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_error_decoder = msgspec.msgpack.Decoder(ErrorReport)
_control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_slot_decoder: msgspec.msgpack.Decoder[SlotOperation] = msgspec.msgpack.Decoder(SlotOperation)
_extras_decoder = msgspec.msgpack.Decoder(Extras)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: Frame) -> _T:
    try:
        return decoder.decode(frame.meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a {frame.kind.name} frame is malformed: {error}") from error


def hello_frame(hello: Hello) -> Frame:
    """Make the HELLO frame."""
    return Frame(kind=FrameKind.HELLO, meta=_encoder.encode(hello))


def read_hello(frame: Frame) -> Hello:
    """Read a HELLO frame. Raises RemoteProtocolError when it breaks the schema."""
    return _decode(_hello_decoder, frame)


def explanation(error: ShardnetError) -> str:
    """Give an error's message as it may travel: valid UTF-8 of at most 2000 bytes."""
    raw = str(error).encode("utf-8", "replace")[:MAX_EXPLANATION]
    return raw.decode("utf-8", "ignore")


def error_frame(
    error: ShardnetError, *, epoch: int = 0, step: int = 0, sequence: int | None = None
) -> Frame:
    """Make an ERROR frame: about a step or a sequence, or else about the link, which it ends."""
    message = explanation(error)
    report = ErrorReport(code=error.code, message=message, sequence=sequence)
    return Frame(kind=FrameKind.ERROR, epoch=epoch, step=step, meta=_encoder.encode(report))


def read_error(frame: Frame) -> ErrorReport:
    """Read an ERROR frame. Raises RemoteProtocolError when it breaks the schema."""
    return _decode(_error_decoder, frame)


def reported_error(report: ErrorReport | Failed, peer: str) -> ShardnetError:
    """Make the exception that a peer reported; the message names the `peer`."""
    return error_for_code(report.code, f"{peer}: {report.message}")


def control_frame(message: ControlMessage) -> Frame:
    """Make a CONTROL frame."""
    return Frame(kind=FrameKind.CONTROL, meta=_encoder.encode(message))


def read_control(frame: Frame) -> ControlMessage:
    """Read a CONTROL frame. Raises RemoteProtocolError when it breaks the schema."""
    return _decode(_control_decoder, frame)


def sequence_frame(operation: SlotOperation, *, epoch: int) -> Frame:
    """Make a SEQUENCE frame: a slot operation, carried out in the order of the data frames."""
    return Frame(kind=FrameKind.SEQUENCE, epoch=epoch, meta=_encoder.encode(operation))


def read_sequence(frame: Frame) -> SlotOperation:
    """Read a SEQUENCE frame. Raises RemoteProtocolError when it breaks the schema."""
    return _decode(_slot_decoder, frame)


def extras_frame(extras: Extras, *, epoch: int, step: int) -> Frame:
    """Make an EXTRAS frame for a step."""
    return Frame(kind=FrameKind.EXTRAS, epoch=epoch, step=step, meta=_encoder.encode(extras))


def read_extras(frame: Frame) -> Extras:
    """Read an EXTRAS frame. Raises RemoteProtocolError when it breaks the schema."""
    return _decode(_extras_decoder, frame)
