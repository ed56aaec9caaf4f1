"""Control messages about plans: what a client chooses, and what a head would do for it.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how a
plan is made.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.slot_operations import MAX_ADAPTER_SCALE, MAX_ADAPTERS
from shardnet.stage_form import StageOptions
from shardnet.types import (
    U32,
    Digest,
    KvDTypeName,
    LayerNumber,
    PathText,
    Positions,
    Quant,
    Report,
    Row,
)
from shardnet.wire.framing import schema
from shardnet.wire.messages.diagnostics import Drafters
from shardnet.wire.messages.extras import RecommendedSampling
from shardnet.wire.messages.measurements import NodeMeasured, WayMeasured

MIXED_WIRES: Final = "mixed"
"""The wire dtype of a plan whose links differ."""
NOT_THERE: Final = "not there"
"""The address of a machine in a plan that only its request has added."""
MAX_ADDED: Final = 8


class NamedAdapter(Row, frozen=True, array_like=True):
    """A LoRA adapter: what requests call it, and its path on the head."""

    name: schema.AdapterName
    path: PathText


class AdapterScale(Row, frozen=True, array_like=True):
    """An adapter by the name that the ring knows it by, and what its part is multiplied by."""

    name: schema.AdapterName
    scale: Annotated[float, Meta(ge=-MAX_ADAPTER_SCALE, le=MAX_ADAPTER_SCALE)]


class ModelChoice(StageOptions, frozen=True, kw_only=True):
    """Which model, on which nodes, how. Empty and 0 mean: as the nodes find best.

    Every stage streams `stream_layers` of its layers from disk, with auto as few as it must.
    `wire_dtype` may name links, as `0-1=int8` or `slow=int8` do.
    With `standby` nodes follow the keys, values and states of other nodes where these have memory
    to spare, to go on in their place: `auto` holds their layers too, `kv` loads them at a loss.
    Every stage spans `nodes_per_stage` nodes; with 0 one, unless that pays where no nodes are
    named. The ring has at least the LoRA `adapters`; a request is computed with `used_adapters`,
    whose names are among the ring's. With `mtp_if_fits` the last stage has the layer that predicts
    further tokens if the model has one, and there is room.
    """

    nodes: schema.Addresses = []
    layers: Annotated[list[schema.Layers], Meta(max_length=schema.MAX_STAGES)] = []
    context: Positions = 0
    dtype: schema.Name = "auto"
    threads: schema.Threads = 0
    wire_dtype: schema.Name = ""
    optimise: Literal["", "latency", "throughput"] = ""
    stream_layers: schema.StreamLayers = 0
    arith: Literal["auto", "portable", "fast"] = "auto"
    standby: Literal["", "kv", "auto"] = ""
    nodes_per_stage: Annotated[int, Meta(ge=0, le=schema.MAX_STAGES)] = 0
    adapters: Annotated[list[NamedAdapter], Meta(max_length=MAX_ADAPTERS)] = []
    used_adapters: Annotated[list[AdapterScale], Meta(max_length=MAX_ADAPTERS)] = []
    mtp_if_fits: bool = False

    def drafting(self, speculate: str) -> ModelChoice:
        """Return this choice for requests with `speculate`: what drafts is a part of the ring."""
        match speculate:
            case "mtp":
                return msgspec.structs.replace(self, mtp=True)
            case "auto" if not self.mtp:
                return msgspec.structs.replace(self, mtp_if_fits=True)
        return self

    def asked_as(self, former: ModelChoice) -> ModelChoice:
        """Return this choice for a request that was made with `former`: with its adapters."""
        return msgspec.structs.replace(self, used_adapters=former.used_adapters)


class PlanRequest(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the plan that would be used. Answered by PlanReply or Redirect.

    With `again` everything is measured anew. Nodes whose ids are in `without` are not used. The
    machines `added` are planned for as if they were there, each a text that the head reads, with
    figures that it estimates; their nodes have NOT_THERE as address. Then there is no Redirect but
    to the first of nodes that `choice` names.
    """

    choice: ModelChoice
    again: bool = False
    without: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)] = []
    added: Annotated[list[schema.Name], Meta(max_length=MAX_ADDED)] = []


class PlannedPart(Report, frozen=True, kw_only=True):
    """Layers of a stage on one of its node's `devices`, or shared by several: as PlannedStage."""

    layers: schema.Layers
    devices: Annotated[list[schema.Name], Meta(max_length=schema.MAX_DEVICES)]
    weight_bytes: schema.Count
    kv_bytes: schema.Count
    compute_ms: schema.Figure | None = None


class PlannedShard(Report, frozen=True, kw_only=True):
    """One more node that a stage spans."""

    node: schema.Name
    name: schema.Name
    address: schema.Address


class PlannedStage(Report, frozen=True, kw_only=True):
    """One stage of a plan: its memory, compute and way to the next stage as predicted.

    `streamed_layers` of its layers are streamed from disk, where tables of `looked_up_bytes` stay
    whose rows are read as tokens need them; with `rows_from`, one of these nodes is asked for them.
    `fetch_bytes` have to be fetched first,
    from other nodes, `fetch_from` among them; `fetch_s` is null where that was not measured. The
    node computes in `dtype`, with linear weights in `weight_dtype` where they are not quantised,
    and sends in `wire_dtype`, "" from the tail. Stages of equal `arithmetic` give equal bits. The
    stage spans the nodes `shards` too; `shares` say what of its bytes each has, its own first, []
    that all have as much.
    Where the node has several devices, `parts` say which has what, and `parts_why` for what reason.
    It takes `working_bytes` more while it computes.
    """

    rank: schema.Rank
    node: schema.Name
    name: schema.Name
    address: schema.Address
    layers: schema.Layers
    weight_bytes: schema.Count
    kv_bytes: schema.Count
    compute_ms: schema.Figure | None = None
    hop_ms: schema.Figure | None = None
    streamed_layers: LayerNumber = 0
    fetch_bytes: schema.Count = 0
    fetch_s: schema.Figure | None = None
    fetch_from: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)] = []
    dtype: schema.Name = ""
    weight_dtype: schema.Name = ""
    wire_dtype: schema.Name = ""
    arithmetic: schema.Name = ""
    shards: Annotated[list[PlannedShard], Meta(max_length=schema.MAX_STAGES)] = []
    shares: schema.Shares = []
    parts: Annotated[list[PlannedPart], Meta(max_length=schema.MAX_DEVICES)] = []
    parts_why: schema.Explanation = ""
    looked_up_bytes: schema.Count = 0
    rows_from: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)] = []
    working_bytes: schema.Count = 0


class PlannedAdapter(Row, frozen=True, array_like=True):
    """A LoRA adapter of a plan, and what it weighs in all stages together."""

    name: schema.AdapterName
    weight_bytes: schema.Count


class PlannedRing(Report, frozen=True, kw_only=True):
    """One of several rings behind one head: its stages, and what is predicted of it alone."""

    stages: Annotated[list[PlannedStage], Meta(max_length=schema.MAX_STAGES)]
    predicted_tok_s: schema.Figure | None = None


class PlannedStandby(Report, frozen=True, kw_only=True):
    """A node that follows the stage `rank`, of these `layers`, in case that its node is lost.

    Its weights take `weight_bytes`, 0 where they are not held; its keys, values and states take at
    most `kv_bytes`.
    """

    rank: schema.Rank
    node: schema.Name
    name: schema.Name
    layers: schema.Layers
    weight_bytes: schema.Count
    kv_bytes: schema.Count


class PlannedTurns(Report, frozen=True, kw_only=True):
    """When the first token of a prompt of `n_prompt` tokens is predicted to come, in seconds.

    `next_s` is that of its next turn, which adds `n_next` tokens, and `resumed_s` the same where
    the stages read the prompt from their disks, the slowest at `disk_bytes_per_s`.
    """

    n_prompt: Positions
    n_next: Positions
    first_s: schema.Seconds
    next_s: schema.Seconds
    resumed_s: schema.Seconds
    disk_bytes_per_s: schema.Figure


class KeptPositions(Report, frozen=True, kw_only=True):
    """How much of conversations a ring's memory keeps: positions, in `kv_bytes` of all stages.

    These are about `conversations` of `n_prompt` tokens. Where layers keep a state there is room
    for `states`, of `state_bytes` together; 0 elsewhere.
    """

    n_prompt: Positions
    conversations: schema.Count
    positions: schema.Count
    kv_bytes: schema.Count
    states: schema.Count = 0
    state_bytes: schema.Count = 0


class PlannedWithout(Report, frozen=True, kw_only=True):
    """What is predicted of the ring without a node that is in the plan, and is switched off.

    `idle_joules_per_token` if it stays on idle, null where its idle watts are not known.
    """

    node: schema.Name
    name: schema.Name
    predicted_tok_s: schema.Figure
    joules_per_token: schema.Figure
    idle_joules_per_token: schema.Figure | None = None


class PlannedEnergy(Report, frozen=True, kw_only=True):
    """What is predicted that the nodes of a plan take for a token, and those `without` one.

    `sources` say of each node, by its name, what measured it.
    """

    joules_per_token: schema.Figure
    sources: Annotated[list[schema.Explanation], Meta(max_length=schema.MAX_STAGES)]
    without: Annotated[list[PlannedWithout], Meta(max_length=schema.MAX_STAGES)] = []


class LeftOut(Report, frozen=True, kw_only=True):
    """A node that a plan does not use, and why."""

    node: schema.Name
    name: schema.Name
    why: schema.Explanation


class SleepingNode(Report, frozen=True, kw_only=True):
    """A node of a plan that sleeps. To wake took it `wake_s`, 0 where that is not known."""

    node: schema.Name
    name: schema.Name
    wake_s: schema.Seconds = 0


class WireError(Report, frozen=True, kw_only=True):
    """What a narrower wire does to the logits, measured over `n_rows` rows of one text.

    `max_error` and `rms_error` are shares of the standard deviation of a row's exact logits, `kl`
    is the mean over rows of KL(exact, rounded) in nats, `n_changed` counts the rows whose likeliest
    token is another.
    """

    n_rows: U32
    n_changed: U32
    max_error: schema.Share
    rms_error: schema.Share
    kl: schema.Share


class NarrowWire(Report, frozen=True, kw_only=True):
    """What the wire dtype that was asked for takes, saves and costs, rows of one hop in bytes.

    Where links differ, `row_bytes` is the mean over them. `saves_ms` per token, less the time to
    round. Where there is no `error`, `why` says so.
    """

    row_bytes: schema.Count
    exact_row_bytes: schema.Count
    saves_ms: schema.Difference | None
    error: WireError | None
    why: schema.Explanation


class RingExactness(Report, frozen=True, kw_only=True):
    """What changes no bit of a ring's outputs, and `why` in words.

    `split` is how its layers are divided over its nodes, `batch` stands for chunks, prefix reuse
    and speculation too, `threads` is their number.
    """

    split: bool
    batch: bool
    threads: bool
    why: schema.Explanation


class PlanReply(schema.Reply, frozen=True, kw_only=True):
    """A plan. It answers PlanRequest, and precedes the tokens of Generate.

    `wire_dtype` is `mixed` where links differ.

    `wire` is there in answer to a PlanRequest that asks for a wire dtype, `recommended` where the
    model's makers recommend how to sample. `warnings` say what is dubious about the model as it was
    chosen. Where several `rings` are behind one head, `stages` are those of the first, and what is
    predicted is what all give together; [] is one ring. `drafters` say what the ring that is there
    has drafted for requests that have ended. `mtp_bytes` is what the layer weighs that
    predicts further tokens, 0 without it; `tower_bytes` what encodes pictures on the first stage,
    one of 512 x 512 pixels within about `picture_s`, null if not known. `turns` and `kept` are of
    long conversations, null where they cannot be told. `energy` is there in answer to a PlanRequest
    where every node of the plan knows what it draws.
    Nodes that are `asleep` have to wake first.
    """

    model: PathText
    model_id: Digest
    dtype: schema.Name
    wire_dtype: schema.Name
    context: Positions
    stages: Annotated[list[PlannedStage], Meta(max_length=schema.MAX_STAGES)]
    left_out: Annotated[list[LeftOut], Meta(max_length=1024)] = []
    predicted_tok_s: schema.Figure | None = None
    why: schema.Explanation
    optimise: Literal["latency", "throughput"] = "latency"
    nodes: Annotated[list[NodeMeasured], Meta(max_length=1024)] = []
    links: Annotated[list[WayMeasured], Meta(max_length=1 << 14)] = []
    wire: NarrowWire | None = None
    quant: Quant = ""
    kv_dtype: KvDTypeName = "auto"
    warnings: Annotated[list[schema.Explanation], Meta(max_length=16)] = []
    recommended: RecommendedSampling | None = None
    arith: schema.ArithName = "fast"
    exact: RingExactness | None = None
    standbys: Annotated[list[PlannedStandby], Meta(max_length=schema.MAX_STAGES)] = []
    mtp_bytes: schema.Count = 0
    tower_bytes: schema.Count = 0
    picture_s: schema.Seconds | None = None
    rings: Annotated[list[PlannedRing], Meta(max_length=schema.MAX_STAGES)] = []
    adapters: Annotated[list[PlannedAdapter], Meta(max_length=MAX_ADAPTERS)] = []
    turns: PlannedTurns | None = None
    kept: KeptPositions | None = None
    drafters: Drafters = []
    energy: PlannedEnergy | None = None
    asleep: Annotated[list[SleepingNode], Meta(max_length=schema.MAX_STAGES)] = []


class NodeProgress(schema.Reply, frozen=True, kw_only=True):
    """Tells the client of a Generate how far the node of a stage is with loading.

    With the phase `waiting`: that it is waited for, since another head uses it, or since it sleeps,
    for how many seconds of how many as a rule then, 0 where that is not known. With `measuring`,
    before the plan: how many nodes and links are measured, of how many. The client of a PlanRequest
    is told of the latter, and how far the head, rank 0, is with measuring a narrower wire.
    """

    rank: schema.Rank
    done_bytes: schema.Count
    total_bytes: schema.Count
    phase: schema.Phase = "loading"
