"""Control messages by which nodes come to know each other, and which models each of them has.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of plans
or rings.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from shardnet.types import U32, PathText, Report, TaggedReport
from shardnet.wire.framing import schema
from shardnet.wire.messages.diagnostics import NodeReport, PowerMeter, Reason, RingLoad

MAX_FIT_NODES: Final = 64
"""Most nodes whose memory is asked about."""
MAX_MODELS_LISTED: Final = 64
"""Most models in one message."""


class StageInfo(Report, frozen=True, kw_only=True):
    """The stage that a node has loaded. `rank` is null where its ring is over."""

    model: PathText
    layers: schema.Layers
    rank: schema.Rank | None


class DeviceInfo(Report, frozen=True, kw_only=True):
    """One of several devices of a node, called `name`; the other fields as in NodeInfo."""

    name: schema.Name
    device: schema.Name
    memory_bytes: schema.Count
    threads: schema.Threads
    dtypes: Annotated[list[schema.Name], Meta(max_length=16)]
    isa: schema.Name = ""
    arithmetic: schema.Name = ""


class Asleep(Report, frozen=True, kw_only=True):
    """How a node that sleeps is woken: by the packet that its hardware addresses `macs` wait for.

    It goes to the broadcast addresses of `networks`, which are the node's own addresses with their
    prefixes, or to `wake_at` where that is not "". It took `wake_s` the last time, 0 where that is
    not known. It sleeps since `since_s`, by its own clock.
    """

    macs: Annotated[list[schema.Mac], Meta(max_length=schema.MAX_PEER_ADDRESSES)] = []
    networks: Annotated[list[schema.Name], Meta(max_length=schema.MAX_PEER_ADDRESSES)] = []
    wake_at: schema.Address = ""
    wake_s: schema.Seconds = 0
    since_s: schema.Moment = 0


class NodeInfo(Report, frozen=True, kw_only=True):
    """What a node reports of itself. `host_id` is equal for nodes on one machine.

    `isa` is the instruction set of the compiled kernels on its CPU, `none` where they were not
    built, `off` where they are switched off, `kernel text` where that computes, "" where it has no
    use for them. `arithmetic` stands for how it computes: nodes of equal ones give equal bits. It
    has run for `uptime_s`. A node that `is_draining` takes no more stages, and ends when it is
    empty; one that `rests` takes none for
    the reason given, until it does not any more. A node of several `devices` has the memory of all
    of them, and is otherwise as its first; `tensor_parallel` of them share each layer, 0 for as
    the plan decides. `meters` are what measures what its machine draws.
    One that is `asleep` is as it said before that.
    """

    node: schema.Name
    name: schema.Name
    address: schema.Address
    version: schema.Name
    device: schema.Name
    memory_bytes: schema.Count
    memory_free_bytes: schema.Count
    cores: schema.Threads
    threads: schema.Threads
    dtypes: Annotated[list[schema.Name], Meta(max_length=16)]
    host_id: schema.Name
    stage: StageInfo | None = None
    isa: schema.Name = ""
    arithmetic: schema.Name = ""
    uptime_s: schema.Seconds = 0.0
    is_draining: bool = False
    rests: schema.Explanation = ""
    devices: Annotated[list[DeviceInfo], Meta(max_length=schema.MAX_DEVICES)] = []
    tensor_parallel: schema.Threads = 0
    meters: Annotated[list[PowerMeter], Meta(max_length=schema.MAX_DEVICES + 1)] = []
    asleep: Asleep | None = None


class Status(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node who it is and, with `with_peers`, who those are that it knows."""

    with_peers: bool


class StatusReply(schema.Reply, frozen=True, kw_only=True):
    """Answers Status. `load` is that of the ring which the node leads."""

    node: NodeInfo
    peers: Annotated[list[NodeInfo], Meta(max_length=1024)]
    load: RingLoad | None = None


class Ping(schema.Numbered, frozen=True, kw_only=True):
    """Ask for an answer at once, to measure the round trip. Answered by Done.

    `payload` only takes its time. With `as_step` the answer waits for a turn of the compute thread,
    as a step does. A node that computes for somebody refuses both.
    """

    payload: schema.PingPayload = b""
    as_step: bool = False


class KnownPeer(Report, frozen=True, kw_only=True):
    """A node, and the addresses at which others may reach it, best first."""

    node: schema.Name
    name: schema.Name
    addresses: Annotated[list[schema.Address], Meta(max_length=schema.MAX_PEER_ADDRESSES)]


class PeersKnown(TaggedReport, frozen=True, kw_only=True):
    """Tell a peer, unasked, of the sender itself and of every node it has a control link to.

    Sent when a link is up, and again when it has changed: each takes the place of the one before.
    The sender takes no layers now if it `rests`, for the reason given. One that is about to sleep
    says how it `sleeps`. The receiver took `woke_s` to wake when the sender woke it last, 0 where
    it has not.
    """

    peers: Annotated[list[KnownPeer], Meta(max_length=1024)]
    rests: schema.Explanation = ""
    sleeps: NodeInfo | None = None
    woke_s: schema.Seconds = 0


class Wake(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node to wake the node `node`, an id, which has told it that it sleeps.

    LoadProgress precedes Done, which comes when it is linked.
    """

    node: schema.Name


class ReportRequest(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node what it knows. Answered by one ReportReply, and Done.

    With `probe` it first dials the addresses of all peers, with `with_peers` a ReportReply
    follows for each that it is linked to. `model` is one to look for, "" for none.
    """

    probe: bool = False
    with_peers: bool = False
    model: PathText = ""


class ReportReply(schema.Reply, frozen=True, kw_only=True):
    """What a node knows, or `failure`: why it could not be asked.

    `clock_ahead_s` is how far its clock is ahead of the clock of the node that asked it.
    """

    node: schema.Name
    name: schema.Name
    info: NodeInfo | None = None
    report: NodeReport | None = None
    failure: schema.Explanation = ""
    clock_ahead_s: schema.Difference | None = None


class ListModels(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node which models it has. Answered by ModelsListed, as many as it takes, and Done.

    With `with_peers` it asks those that it is linked to as well, and passes their lists on. With
    `names_only` no model is opened. `nodes` are those whose memory counts for `fits`; without any
    the node that is asked takes itself and those it is linked to. `model` is one that it describes
    though no store of its lists it: the path of a folder or a file.
    """

    with_peers: bool = False
    names_only: bool = False
    nodes: Annotated[list[NodeInfo], Meta(max_length=MAX_FIT_NODES)] = []
    model: Annotated[str, Meta(max_length=4096)] = ""


class ListedModel(Report, frozen=True, kw_only=True):
    """A model that a node has: `name` is what a client may ask for, `store` where it is kept.

    `size_bytes` is that of all its tensor files, `held_bytes` what of them is there: less where
    parts came from other nodes. `form` names how weights are stored, `licence` what its makers
    allow, "" where neither is known; `parameters` counts weights, 0 where that is not known, and
    `modified_s` is when a file last changed, in seconds since 1970. `fits`: an estimate, whether
    the memory of the nodes together is enough; null where it is not known. `failure` says why it
    cannot be used. `kind` is that of an encoder, "" for what writes text.
    """

    name: PathText
    store: schema.Name
    size_bytes: schema.Count = 0
    held_bytes: schema.Count = 0
    family: schema.Name = ""
    form: schema.Name = ""
    context: U32 = 0
    parameters: schema.Count = 0
    licence: schema.Name = ""
    modified_s: schema.Count = 0
    fits: bool | None = None
    failure: Reason = ""
    kind: Literal["", "embedding", "reranker"] = ""


class ModelsListed(schema.Reply, frozen=True, kw_only=True):
    """Answers ListModels: some of the models of a node, or `failure`, why it does not say."""

    node: schema.Name
    name: schema.Name
    models: Annotated[list[ListedModel], Meta(max_length=MAX_MODELS_LISTED)]
    failure: schema.Explanation = ""


class IdentifyModel(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node which model it has for a path, or else whether it has parts of `model_id`.

    It answers from what it has itself, and asks nobody.
    """

    model: PathText
    model_id: schema.DigestOrNone = ""


class ModelIdentity(schema.Reply, frozen=True, kw_only=True):
    """Answers IdentifyModel. `model_id` is hexadecimal SHA-256, "" for nothing there.

    `complete`: it is a checkpoint folder with every tensor, not parts that came from other nodes.
    `layers` are ranges of which it has every tensor, where it is not, `but_tables` those of which
    only tables lack; then `room_bytes` more of it fit the disk. `sample` is not used any more: the
    id has it.
    """

    model_id: schema.DigestOrNone
    complete: bool
    sample: schema.DigestOrNone = ""
    layers: Annotated[list[schema.Layers], Meta(max_length=schema.MAX_STAGES)] = []
    but_tables: Annotated[list[schema.Layers], Meta(max_length=schema.MAX_STAGES)] = []
    room_bytes: schema.Count | None = None


MAX_GRACE_S: Final = 365 * 86_400
"""Longest time for which a cluster key is still accepted after another one has replaced it."""


class TakeKey(schema.Numbered, frozen=True, kw_only=True):
    """Tell the new cluster key. Its holders and those of the one before are members for `grace_s`.

    A node is also told to have its peer `node` take it; and which key it has, to end the grace.
    Whoever hands on what the cluster has says `after` which key that is, by its authority's key id.
    """

    key: Annotated[bytes, Meta(min_length=16, max_length=16)]
    grace_s: Annotated[int, Meta(ge=0, le=MAX_GRACE_S)]
    node: schema.Name = ""
    after: Annotated[bytes, Meta(max_length=64)] = b""

    def __repr__(self) -> str:
        return f"TakeKey(request={self.request}, grace_s={self.grace_s}, node={self.node!r})"


class KeyTaken(schema.Reply, frozen=True, kw_only=True):
    """Answers TakeKey. For `old_s` more the node accepts the key before, 0 for none."""

    old_s: Annotated[int, Meta(ge=0, le=MAX_GRACE_S)] = 0


MembershipRequest: TypeAlias = (
    Status | Ping | Wake | ReportRequest | IdentifyModel | ListModels | TakeKey
)
"""Requests about nodes and models."""
MembershipMessage: TypeAlias = (
    MembershipRequest
    | StatusReply
    | PeersKnown
    | ReportReply
    | ModelIdentity
    | ModelsListed
    | KeyTaken
)
"""These, their answers, and what is sent unasked."""
