"""Control messages by which nodes come to know each other, and which models each of them has.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of plans
or rings.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shardnet.wire.framing.schema import (
    MAX_PEER_ADDRESSES,
    U32,
    Address,
    Count,
    Difference,
    DigestOrNone,
    Explanation,
    Layers,
    Name,
    PathText,
    PingPayload,
    Rank,
    RequestId,
    Strict,
    Tagged,
    Threads,
)
from shardnet.wire.messages.diagnostics import NodeReport


class StageInfo(Strict, frozen=True, kw_only=True):
    """The stage that a node runs."""

    model: PathText
    layers: Layers
    rank: Rank


class NodeInfo(Strict, frozen=True, kw_only=True):
    """What a node reports of itself. `host_id` is equal for nodes on one machine."""

    node: Name
    name: Name
    address: Address
    version: Name
    device: Name
    memory_bytes: Count
    memory_free_bytes: Count
    cores: Threads
    threads: Threads
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
    warm_blocks: U32
    used_blocks: U32
    room_blocks: U32


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

    With `probe` it first dials the addresses of all peers, with `with_peers` a ReportReply
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
    clock_ahead_s: Difference | None = None


class IdentifyModel(Tagged, frozen=True, kw_only=True):
    """Ask a node which model it has for a path, or else whether it has parts of `model_id`.

    It answers from what it has itself, and asks nobody.
    """

    request: RequestId
    model: PathText
    model_id: DigestOrNone = ""


class ModelIdentity(Tagged, frozen=True, kw_only=True):
    """Answers IdentifyModel. `model_id` is hexadecimal SHA-256, "" for nothing there.

    `complete`: it is a checkpoint folder with every tensor, not parts that came from other nodes.
    `sample` is not used any more: the id has it.
    """

    request: RequestId
    model_id: DigestOrNone
    complete: bool
    sample: DigestOrNone = ""
