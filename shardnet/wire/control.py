"""Control messages: what nodes ask and tell each other, and clients ask of nodes.

Knows the fields, their types and their bounds (docs/protocol.md section 11). Knows nothing of what
is done with a message.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.errors import ShardnetError, error_for_code
from shardnet.types import LiveState
from shardnet.wire.frames import Frame, FrameKind
from shardnet.wire.measured import (
    LinksMeasured,
    MeasureLinks,
    MeasureStage,
    NodeMeasured,
    StageMeasured,
    WayMeasured,
)
from shardnet.wire.messages import ErrorReport, Outputs, Sampling
from shardnet.wire.narrow import NarrowWire
from shardnet.wire.reports import NodeReport
from shardnet.wire.schema import (
    MAX_PEER_ADDRESSES,
    MAX_STAGES,
    U32,
    Address,
    Addresses,
    Count,
    Digest,
    Explanation,
    KvDTypeName,
    Moment,
    Name,
    PathText,
    Phase,
    PingPayload,
    Priority,
    Quant,
    Rank,
    RequestId,
    Row,
    Seconds,
    StreamLayers,
    Strict,
    Tagged,
    Text,
    TokenIds,
    decode,
    encode,
)

MAX_ROWS_BYTES: Final = 3 << 20
"""The most that one RowsPiece carries: one row of 786 432 elements, or several of fewer."""

# --- CONTROL frames between nodes ---------------------------------------------------------------


class StageInfo(Strict, frozen=True, kw_only=True):
    """The stage that a node runs."""

    model: PathText
    layers: tuple[U32, U32]
    rank: Rank


class NodeInfo(Strict, frozen=True, kw_only=True):
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


class Status(Tagged, frozen=True, kw_only=True):
    """Ask a node who it is and, with `with_peers`, who those are that it knows."""

    request: RequestId
    with_peers: bool


class RingLoad(Strict, frozen=True, kw_only=True):
    """What a ring has in hand: requests, slots that lie warm, and KV blocks of one stage.

    Warm slots' blocks are among the used ones.
    """

    running: U32
    waiting: U32
    paused: U32
    warm_slots: U32
    warm_blocks: Count
    used_blocks: Count
    room_blocks: Count


class StatusReply(Tagged, frozen=True, kw_only=True):
    """Answers Status. `load` is that of the ring which the node leads."""

    request: RequestId
    node: NodeInfo
    peers: Annotated[list[NodeInfo], Meta(max_length=1024)]
    load: RingLoad | None = None


class Ping(Tagged, frozen=True, kw_only=True):
    """Ask for an answer at once, to measure the round trip. Answered by Done.

    `payload` only takes its time. With `as_step` the answer waits for a turn of the compute thread,
    as a step does. A node that computes for somebody refuses both.
    """

    request: RequestId
    payload: PingPayload = b""
    as_step: bool = False


class KnownPeer(Strict, frozen=True, kw_only=True):
    """A node, and the addresses at which others may reach it, best first."""

    node: Name
    name: Name
    addresses: Annotated[list[Address], Meta(max_length=MAX_PEER_ADDRESSES)]


class PeersKnown(Tagged, frozen=True, kw_only=True):
    """Tell a peer, unasked, of the sender itself and of every node it has a control link to.

    Sent when a link is up, and again when it has changed: each takes the place of the one before.
    """

    peers: Annotated[list[KnownPeer], Meta(max_length=1024)]


class ReportRequest(Tagged, frozen=True, kw_only=True):
    """Ask a node what it knows. Answered by one ReportReply, and Done.

    With `probe` it first knocks at the addresses of all peers, with `with_peers` a ReportReply
    follows for each that it is linked to. `model` is one to look for, "" for none.
    """

    request: RequestId
    probe: bool = False
    with_peers: bool = False
    model: PathText = ""


class ReportReply(Tagged, frozen=True, kw_only=True):
    """What a node knows, or `failure`: why it could not be asked.

    `clock_ahead_s` is how far its clock is ahead of the clock of the node that asked it.
    """

    request: RequestId
    node: Name
    name: Name
    info: NodeInfo | None = None
    report: NodeReport | None = None
    failure: Explanation = ""
    clock_ahead_s: float | None = None


class IdentifyModel(Tagged, frozen=True, kw_only=True):
    """Ask a node which model it has for a path, or else whether it has parts of `model_id`.

    It answers from what it has itself, and asks nobody.
    """

    request: RequestId
    model: PathText
    model_id: Digest = ""


class ModelIdentity(Tagged, frozen=True, kw_only=True):
    """Answers IdentifyModel. `model_id` is hexadecimal SHA-256, "" for nothing there.

    `complete`: it is a checkpoint folder with every tensor, not parts that came from other nodes;
    `sample` tells its weights from others under the same id.
    """

    request: RequestId
    model_id: Digest
    complete: bool
    sample: Digest = ""


class LoadStage(Tagged, frozen=True, kw_only=True):
    """Tell a node to load its stage of a ring. A node with another `model_id` refuses.

    `addresses` are the nodes of the ring in order; `threads` 0 leaves the number to the node.
    A node that lacks weights fetches them from `sources`, and holds their digests against the
    first. `quant` is what the weights of products are rounded to, `kv_dtype` how the KV cache holds
    keys and values. `streamed_layers` of the layers stay on disk.
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
    wire_dtype: Name
    context: U32
    threads: U32
    addresses: Addresses
    sources: Addresses = msgspec.field(default_factory=list)
    quant: Quant = ""
    kv_dtype: KvDTypeName = "auto"
    streamed_layers: U32 = 0


class LoadProgress(Tagged, frozen=True, kw_only=True):
    """How far a LoadStage or MeasureStage is. Sent every few seconds: it is not silence."""

    request: RequestId
    done_bytes: Count
    total_bytes: Count
    phase: Phase = "loading"


class StageReady(Tagged, frozen=True, kw_only=True):
    """Answers LoadStage: the stage is loaded. `kernel` names the matrix products' path.

    `room_blocks` is the KV room that is really there; `reused` that the weights were there already.
    A row's bits do not depend on the rows beside it in steps of at most `exact_rows` rows.
    """

    request: RequestId
    weight_bytes: Count
    room_blocks: Count
    reused: bool
    kernel: Name
    load_s: Seconds
    exact_rows: U32


class RingBroken(Tagged, frozen=True, kw_only=True):
    """Tell the head, unasked, that the sender's stage left a ring, and why."""

    ring: Name
    epoch: U32
    code: U32
    message: Explanation


class ConnectRing(Tagged, frozen=True, kw_only=True):
    """Tell a node to open its data link to the next node of a ring."""

    request: RequestId
    ring: Name
    epoch: U32


class UnloadStage(Tagged, frozen=True, kw_only=True):
    """Tell a node to free its stage of a ring."""

    request: RequestId
    ring: Name


class Done(Tagged, frozen=True, kw_only=True):
    """Answers a request that has nothing to report."""

    request: RequestId


class Failed(Tagged, frozen=True, kw_only=True):
    """Answers any request: it failed. Codes are those of ERROR frames."""

    request: RequestId
    code: U32
    message: Explanation


# --- CONTROL frames between a client and a node -------------------------------------------------


class ModelChoice(Strict, frozen=True, kw_only=True):
    """Which model, on which nodes, how. Empty and 0 mean: as the nodes find best.

    Every stage streams `stream_layers` of its layers from disk, with auto as few as it must.
    """

    model: PathText
    nodes: Addresses = msgspec.field(default_factory=list)
    layers: Annotated[list[tuple[U32, U32]], Meta(max_length=MAX_STAGES)] = msgspec.field(
        default_factory=list
    )
    context: U32 = 0
    dtype: Name = "auto"
    threads: U32 = 0
    wire_dtype: Name = ""
    optimise: Literal["", "latency", "throughput"] = ""
    quant: Quant = ""
    kv_dtype: KvDTypeName = "auto"
    stream_layers: StreamLayers = 0


class PlanRequest(Tagged, frozen=True, kw_only=True):
    """Ask for the plan that would be used. Answered by PlanReply or Redirect.

    With `again` everything is measured anew.
    """

    request: RequestId
    choice: ModelChoice
    again: bool = False


class LastRunRequest(Tagged, frozen=True, kw_only=True):
    """Ask for the last generation of the ring this node leads. Answered by LastRun or Redirect."""

    request: RequestId


class PlannedStage(Strict, frozen=True, kw_only=True):
    """One stage of a plan: its memory, compute and way to the next stage as predicted.

    `streamed_layers` of its layers are streamed from disk.
    """

    rank: Rank
    node: Name
    name: Name
    address: Address
    layers: tuple[U32, U32]
    weight_bytes: Count
    kv_bytes: Count
    compute_ms: Seconds | None = None
    hop_ms: Seconds | None = None
    streamed_layers: U32 = 0


class LeftOut(Strict, frozen=True, kw_only=True):
    """A node that a plan does not use, and why."""

    node: Name
    name: Name
    why: Explanation


class PlanReply(Tagged, frozen=True, kw_only=True):
    """A plan. It answers PlanRequest, and precedes the tokens of Generate.

    `wire` is there in answer to a PlanRequest that asks for a wire dtype.
    """

    request: RequestId
    model: PathText
    model_id: Digest
    dtype: Name
    wire_dtype: Name
    context: U32
    stages: Annotated[list[PlannedStage], Meta(max_length=MAX_STAGES)]
    left_out: Annotated[list[LeftOut], Meta(max_length=1024)] = msgspec.field(default_factory=list)
    predicted_tok_s: Seconds | None = None
    why: Explanation
    optimise: Literal["latency", "throughput"] = "latency"
    nodes: Annotated[list[NodeMeasured], Meta(max_length=1024)] = msgspec.field(
        default_factory=list
    )
    links: Annotated[list[WayMeasured], Meta(max_length=1 << 14)] = msgspec.field(
        default_factory=list
    )
    wire: NarrowWire | None = None
    quant: Quant = ""
    kv_dtype: KvDTypeName = "auto"


class NodeProgress(Tagged, frozen=True, kw_only=True):
    """Tells the client of a Generate how far the node of a stage is with loading.

    The client of a PlanRequest: how far the head, rank 0, is with measuring a narrower wire.
    """

    request: RequestId
    rank: Rank
    done_bytes: Count
    total_bytes: Count
    phase: Phase = "loading"


class ChatMessage(Strict, frozen=True, kw_only=True):
    """One message of a conversation. `role` is system, user, assistant or what else the model's
    chat template knows.
    """

    role: Name
    content: Text


class Generate(Tagged, frozen=True, kw_only=True):
    """Ask for the continuation of one prompt: `token_ids` if there are any, else `messages` in the
    model's chat template, else `prompt`.

    `speculate` is off, ngram or the path of a draft model on the head; `draft_tokens` 0 guesses as
    many as pay. `deterministic` is design decision 4's. A larger `priority` goes first;
    `deadline_s` counts from when the ring has the request.
    """

    request: RequestId
    choice: ModelChoice
    sampling: Sampling
    prompt: Text = ""
    token_ids: TokenIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=1 << 14)] | None = None
    max_tokens: U32 = 256
    stop: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)] = (
        msgspec.field(default_factory=list)
    )
    stop_token_ids: Annotated[list[U32], Meta(max_length=1024)] = msgspec.field(
        default_factory=list
    )
    ignore_eos: bool = False
    bos: Literal["auto", "on", "off"] = "auto"
    keep_special_tokens: bool = False
    speculate: PathText = "off"
    draft_tokens: U32 = 0
    deterministic: bool = False
    priority: Priority = 0
    deadline_s: Seconds | None = None
    outputs: Outputs = Outputs()


class StateChanged(Tagged, frozen=True, kw_only=True):
    """Tells how a Generate stands that has not ended. `ahead` requests go before it in the queue.

    The first `n_kept` positions of its prompt were there already when it began to run.
    """

    request: RequestId
    state: LiveState
    ahead: U32 = 0
    n_kept: U32 = 0


class Cancel(Tagged, frozen=True, kw_only=True):
    """Give a running request up. It is answered by Failed with code 41 or its own end."""

    request: RequestId


class Unload(Tagged, frozen=True, kw_only=True):
    """Ask a node to free the model of its ring on every node. Answered by Done or Redirect."""

    request: RequestId


class Redirect(Tagged, frozen=True, kw_only=True):
    """Ask the node at `address` instead: it is the ring's head."""

    request: RequestId
    address: Address


class TopToken(Row, frozen=True, array_like=True):
    """One of the most likely tokens of a row, with its text."""

    token_id: U32
    token: Text
    logprob: float


class TokenDetail(Strict, frozen=True, kw_only=True):
    """The logprob of a generated token and of the most likely ones in its place."""

    token_id: U32
    token: Text
    bytes: Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(max_length=4096)]
    logprob: float
    top: Annotated[list[TopToken], Meta(max_length=1024)]


class TextPiece(Tagged, frozen=True, kw_only=True):
    """More of the answer: new tokens, and the text that is whole by now.

    `prompt_logprobs` are those of the prompt's next tokens, the second one first.
    """

    request: RequestId
    token_ids: TokenIds
    tokens: Annotated[list[Text], Meta(max_length=1 << 20)]
    text: Text
    logprobs: Annotated[list[TokenDetail], Meta(max_length=1 << 14)] | None = None
    prompt_logprobs: Annotated[list[TokenDetail], Meta(max_length=1 << 14)] | None = None


class RowsPiece(Tagged, frozen=True, kw_only=True):
    """The next rows of what a Generate's `outputs` ask for, the first at `position`.

    `data` is float32, little-endian, row after row of `width` elements. A mean is at position 0.
    Routing is int16: a row has the experts of each layer, `top_k` of them, -1 where there are none.
    """

    request: RequestId
    kind: Literal["logits", "hidden", "routing"]
    position: U32
    width: U32
    top_k: U32 = 0
    data: Annotated[bytes, Meta(max_length=MAX_ROWS_BYTES)]


class StageShare(Strict, frozen=True, kw_only=True):
    """Where the time of a mean decode step went, for one stage."""

    rank: Rank
    compute_ms: Seconds
    queue_ms: Seconds
    wire_ms: Seconds


class Timing(Strict, frozen=True, kw_only=True):
    """How long a request took, by the head's clock; how many tokens were guessed, and rightly."""

    load_s: Seconds
    ttft_s: Seconds
    decode_tok_s: Seconds
    total_s: Seconds
    per_stage: Annotated[list[StageShare], Meta(max_length=MAX_STAGES)]
    n_drafted: Count = 0
    n_accepted: Count = 0


class Finished(Tagged, frozen=True, kw_only=True):
    """The answer is complete. `text` is what was held back until now."""

    request: RequestId
    finish_reason: Name
    prompt_token_ids: TokenIds
    text: Text
    timing: Timing


class LastRun(Tagged, frozen=True, kw_only=True):
    """Answers LastRunRequest: a generation's plan, and what became of it. It ended at `ended_at_s`,
    counted from 1970.
    """

    request: RequestId
    plan: PlanReply
    timing: Timing
    n_tokens: U32
    ended_at_s: Moment


ControlMessage = (
    Status
    | StatusReply
    | Ping
    | PeersKnown
    | ReportRequest
    | ReportReply
    | IdentifyModel
    | ModelIdentity
    | MeasureStage
    | StageMeasured
    | MeasureLinks
    | LinksMeasured
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
    | LastRunRequest
    | LastRun
    | NodeProgress
    | Generate
    | StateChanged
    | Cancel
    | Unload
    | Redirect
    | TextPiece
    | RowsPiece
    | Finished
)


# --- between messages and frames ----------------------------------------------------------------

_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


def reported_error(report: ErrorReport | Failed, peer: str) -> ShardnetError:
    """Make the exception that a peer reported; the message names the `peer`."""
    return error_for_code(report.code, f"{peer}: {report.message}")


def control_frame(message: ControlMessage) -> Frame:
    """Make a CONTROL frame."""
    return Frame(kind=FrameKind.CONTROL, meta=encode(message))


def read_control(frame: Frame) -> ControlMessage:
    """Read a CONTROL frame. Raises RemoteProtocolError when it breaks the schema."""
    return decode(_decoder, frame)
