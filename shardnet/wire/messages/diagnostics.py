"""What a node reports of itself and of others: parts of ReportReply (docs/protocol.md section 8).

Knows the fields, their types and their bounds. Knows nothing of how they are found or judged.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shardnet.types import U32, LayerNumber, PathText, Report
from shardnet.wire.framing import schema

MAX_VIEWS = 64
"""Most peers, records and refused hosts in one report, of each."""
MAX_REASON = 400
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
"""Why an address does not answer; there may be a thousand in a report."""
Advice = Reason | msgspec.UnsetType
"""What to do about it. The key is left out where nothing is known."""
MAX_TELLERS = 40
MAX_FINDINGS = 32
MAX_TRAFFIC = 256

Seen = Literal[
    "answers",
    "refused",
    "dropped",
    "hangs",
    "unreachable",
    "other key",
    "other version",
    "other node",
    "failed",
    "not tried",
]
"""What came of dialling an address: the node answers; nothing listens; no answer to TCP at all;
TCP answers and then nothing comes; no way there; and who or what else answers."""


class PowerMeter(Report, frozen=True, kw_only=True):
    """What one source says that a node's machine, or a part of it, draws.

    Since the node began it has counted `joules`, over `counted_s`, and last `age_s` ago. `watts`
    are those of now, null where it is silent; `idle_w` and `busy_w` what it usually draws while the
    node does nothing, and while its stage computes in a ring, null where that was not seen yet.
    """

    source: schema.Name
    joules: schema.Figure
    counted_s: schema.Seconds
    age_s: schema.Seconds
    watts: schema.Figure | None = None
    idle_w: schema.Figure | None = None
    busy_w: schema.Figure | None = None


class InterfaceAddress(Report, frozen=True, kw_only=True):
    """One address of the node's machine, and what it is good for.

    `is_told`: it is advertised to others. `mtu` and `speed_mbit` are 0 where unknown.
    """

    interface: schema.Name
    host: schema.Name
    prefix: Annotated[int, Meta(ge=0, le=128)]
    verdict: schema.Name
    mtu: U32
    speed_mbit: U32
    is_told: bool


class MulticastHeard(Report, frozen=True, kw_only=True):
    """A node that was heard by multicast on an interface, and how long ago for the last time."""

    node: schema.Name
    interface: schema.Name
    age_s: schema.Seconds


class MdnsRecord(Report, frozen=True, kw_only=True):
    """The mDNS record of another node: public, and not proved."""

    node: schema.Name
    name: schema.Name
    version: schema.Name
    protocol: U32
    cluster: schema.Name
    address: schema.Address


class MulticastState(Report, frozen=True, kw_only=True):
    """How far a node's mDNS works. `hosts` are the addresses of the interfaces it speaks on.

    `listening` names the interfaces on which it notes who is heard, since `listening_s`. `heard`
    has the node itself where it hears its own announcements; `others` names the interfaces on which
    any other machine was heard, whatever it runs.
    """

    state: Literal["off", "on", "failed"]
    failure: schema.Explanation = ""
    hosts: Annotated[list[schema.Name], Meta(max_length=MAX_VIEWS)] = []
    listening: Annotated[list[schema.Name], Meta(max_length=MAX_VIEWS)] = []
    listening_s: schema.Seconds = 0.0
    heard: Annotated[list[MulticastHeard], Meta(max_length=4 * MAX_VIEWS)] = []
    records: Annotated[list[MdnsRecord], Meta(max_length=MAX_VIEWS)] = []
    others: Annotated[list[schema.Name], Meta(max_length=MAX_VIEWS)] = []


class AddressView(Report, frozen=True, kw_only=True):
    """One address of a peer: what came of the last attempt, why it is not used if it is not."""

    address: schema.Address
    seen: Seen
    why: Reason = ""
    rtt_s: schema.Seconds | None = None
    remedy: Advice = msgspec.UNSET


class PeerView(Report, frozen=True, kw_only=True):
    """What a node knows of another one.

    `address` is the one it uses, "" while none has answered. `told_by` has the sources: `mdns`,
    `named`, `tailnet`, or ids of nodes; none when no node advertises it any more. `refusal` says
    why it is not linked to. One that `sleeps` said so; that is in words.
    """

    node: schema.Name
    name: schema.Name
    version: schema.Name
    is_linked: bool
    address: schema.Address
    rtt_s: schema.Seconds | None
    bytes_per_s: schema.Figure | None = None
    told_by: Annotated[list[schema.Name], Meta(max_length=MAX_TELLERS)]
    refusal: schema.Explanation
    addresses: Annotated[list[AddressView], Meta(max_length=schema.MAX_PEER_ADDRESSES)]
    sleeps: schema.Explanation = ""


class RefusedHost(Report, frozen=True, kw_only=True):
    """Handshakes of one host that a node has refused for one reason, as the code of an error.

    `age_s` is how long ago the last one was, `n_times` how many there were.
    """

    host: schema.Name
    code: U32
    why: Reason
    n_times: U32
    age_s: schema.Seconds
    remedy: Advice = msgspec.UNSET


class PrefixState(Report, frozen=True, kw_only=True):
    """The prompts that a node keeps on disk: bytes of all models, positions of the loaded one.

    `bytes_per_s` is how fast they were read, 0 if none was.
    """

    used_bytes: schema.Count
    limit_bytes: schema.Count
    saved_positions: schema.Count = 0
    restored_positions: schema.Count = 0
    bytes_per_s: schema.Figure = 0.0


class StandbyState(Report, frozen=True, kw_only=True):
    """The layers in which a node follows the node named `node`, to go on in its place.

    `weight_bytes` is 0 where it does not hold them: they are loaded when that is lost.
    """

    node: schema.Name
    layers: schema.Layers
    weight_bytes: schema.Count


class DeputyState(Report, frozen=True, kw_only=True):
    """A head's deputy, or a head that a node is the deputy of: its name, and answers copied."""

    node: schema.Name
    n_requests: U32


class PartState(Report, frozen=True, kw_only=True):
    """Layers of a stage that one of its node's `devices` has, or several, each a shard of them."""

    layers: schema.Layers
    devices: Annotated[list[schema.Name], Meta(max_length=schema.MAX_DEVICES)]
    weight_bytes: schema.Count


class StageState(Report, frozen=True, kw_only=True):
    """The stage that a node holds, and its place in a ring; `n_stages` is 0 where it has none.

    `head` is the id of the ring's head. KV room is counted in blocks of 256 positions. `prefixes`
    is null where none are kept on disk. `standby` is null where it stands by for nobody; a node
    that only stands by shows that stage. `parts` are there where the node has several devices.
    """

    model: PathText
    layers: schema.Layers
    dtype: schema.Name
    kernel: schema.Name
    weight_bytes: schema.Count
    room_blocks: U32
    used_blocks: U32
    n_open: U32 = 0
    rank: schema.Rank = 0
    n_stages: Annotated[int, Meta(ge=0, le=schema.MAX_STAGES)] = 0
    epoch: U32 = 0
    head: schema.Name = ""
    prefixes: PrefixState | None = None
    standby: StandbyState | None = None
    parts: Annotated[list[PartState], Meta(max_length=schema.MAX_DEVICES)] = []


def waiting_words(what: str, expected_s: float) -> str:
    """Say what is waited for, and about how long if that is known."""
    return f"{what}, about {ceil(expected_s)} s" if expected_s else what


RingWaitKind = Literal["nodes", "plan", "load", "replay"]
"""That nodes say whether they are there, a plan, layers, or that requests are computed again."""


class RingWait(Report, frozen=True, kw_only=True):
    """What the requests of a lost ring wait for: `what` in words, and about how long still.

    `expected_s` is 0 where that is not known, or has passed.
    """

    kind: RingWaitKind
    what: schema.Explanation
    expected_s: schema.Seconds = 0.0


class RingLoad(Report, frozen=True, kw_only=True):
    """What a ring has in hand: requests, slots, and KV blocks of one stage.

    Warm slots and their blocks are among the used ones. `restored_positions` of prompts were read
    from disk. `wait` is there while its requests wait behind a loss.
    """

    running: U32
    waiting: U32
    paused: U32
    warm_slots: U32
    warm_blocks: U32
    used_blocks: U32
    room_blocks: U32
    room_slots: U32 = 0
    restored_positions: schema.Count = 0
    wait: RingWait | None = None


class RingBehind(Report, frozen=True, kw_only=True):
    """One of several rings behind a head: its nodes in order, and how it is.

    `why` says why it takes no requests now, "" while it does. It has `n_requests` now, and took
    `n_taken_over` from rings that were lost.
    """

    node: schema.Name
    address: schema.Address
    names: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)]
    why: schema.Explanation = ""
    n_requests: U32 = 0
    n_taken_over: schema.Count = 0
    load: RingLoad | None = None
    predicted_tok_s: schema.Figure | None = None


class Drafted(Report, frozen=True, kw_only=True):
    """What one drafter made: ngram, mtp, forced by a constraint, or a draft model.

    Of `n_drafted` tokens `n_accepted` were right. `n_steps` steps began with its drafts, and gave
    `n_tokens` tokens. A plan says on which `node`, by its name, and `why` there.
    """

    drafter: PathText
    node: schema.Name = ""
    why: schema.Explanation = ""
    n_drafted: schema.Count = 0
    n_accepted: schema.Count = 0
    n_steps: schema.Count = 0
    n_tokens: schema.Count = 0


MAX_DRAFTERS: Final = 64
Drafters: TypeAlias = Annotated[list[Drafted], Meta(max_length=MAX_DRAFTERS)]


class StageWork(Report, frozen=True, kw_only=True):
    """What one stage has done since its ring was built, microseconds by its own clock.

    `joules_per_token` is what its nodes took during the last request, null where nothing says it.
    """

    rank: schema.Rank
    name: schema.Name
    compute_us: schema.Count
    queue_us: schema.Count
    joules_per_token: schema.Figure | None = None


class RingWork(Report, frozen=True, kw_only=True):
    """What a ring has done since it was built, as its head counts it, and what it has in hand.

    `wire_us` is what steps took beside all computing and queueing. Of `n_prompts` the first
    positions of `n_prefix_hits` were there already, `n_prefix_tokens` of `n_prompt_tokens`,
    `n_disk_tokens` of those on disk. It replaced others `n_recoveries` times, while which requests
    stood still for `recovery_us`. `drafters` made drafts for requests that have ended. Of `n_flown`
    steps, which went behind drafts in flight, `n_wasted` were behind a wrong one.
    """

    load: RingLoad
    n_steps: schema.Count
    wire_us: schema.Count
    stages: Annotated[list[StageWork], Meta(max_length=schema.MAX_STAGES)]
    n_prompts: schema.Count = 0
    n_prefix_hits: schema.Count = 0
    n_prompt_tokens: schema.Count = 0
    n_prefix_tokens: schema.Count = 0
    n_recoveries: schema.Count = 0
    recovery_us: schema.Count = 0
    drafters: Drafters = []
    n_flown: schema.Count = 0
    n_wasted: schema.Count = 0
    n_disk_tokens: schema.Count = 0

    @property
    def reused(self) -> dict[str, int]:
        """Positions of prompts that were not computed, by where they were."""
        n_disk = min(self.n_disk_tokens, self.n_prefix_tokens)
        return {"memory": self.n_prefix_tokens - n_disk, "disk": n_disk}


class LinkTraffic(Report, frozen=True, kw_only=True):
    """What the links of one purpose to the nodes of one name have carried since this node started.

    `n_links` of them live, `n_failed` were broken. `round_trip_us` is the kernel's, of the slowest
    that lives, and `n_resent` the segments that TCP had to send again; null where it does not say.
    """

    name: schema.Name
    purpose: Literal["control", "data", "bulk", "parts"]
    n_links: U32
    n_failed: schema.Count
    sent_bytes: schema.Count
    received_bytes: schema.Count
    round_trip_us: U32 | None = None
    n_resent: schema.Count | None = None


class PressureState(Report, frozen=True, kw_only=True):
    """How short memory is on a node's machine, and what the node has given back since its start.

    `stalled` is the share of the last 10 s in which some program waited for memory, null where the
    system does not say. It has dropped caches `n_drops` times, and rested `n_rests` times. With
    `yields` it does so too while its owner uses the machine.
    """

    available_bytes: schema.Count
    total_bytes: schema.Count
    stalled: Annotated[float, Meta(ge=0, le=1)] | None = None
    n_drops: schema.Count = 0
    n_rests: schema.Count = 0
    yields: bool = False


class AuditFinding(Report, frozen=True, kw_only=True):
    """What an audit has found at `at`: the node computes wrong bits in `layer`, or near it.

    At `good_at` nothing was found, 0 for never since its ring was built: texts since then may be
    wrong. Without `is_left_out` it still computes: it is the head, or another one may be wrong.
    """

    node: schema.Name
    name: schema.Name
    layer: LayerNumber
    at: schema.Moment
    good_at: schema.Moment
    what: schema.Explanation
    remedy: schema.Explanation
    is_left_out: bool


class AuditState(Report, frozen=True, kw_only=True):
    """How a head has audited the stages of its rings since it started.

    That kept stages from steps for `busy_s`. `looked_bytes` of weights were held against what they
    were. Of the ring that stands other nodes have computed `n_confirmed` layers alike.
    """

    n_audits: schema.Count
    busy_s: schema.Seconds
    looked_bytes: schema.Count
    n_confirmed: U32
    findings: Annotated[list[AuditFinding], Meta(max_length=MAX_FINDINGS)]


class NodeReport(Report, frozen=True, kw_only=True):
    """What a node knows. `cluster` is the fingerprint of its key, "" without one; never the key.

    `received_at` and `sent_at` are its clock, in seconds since 1970, when the request came and when
    this left. `unreached` are the addresses that it was told with --peer and has no link to.
    `model_id`, `model_config` (its config.json) and `model_failure` answer for the model that was
    asked about. `disk_free_bytes` is that of the disk where weights are kept. `temperature_c` is
    the GPU's, else the CPU's, in degrees Celsius. `ring` is what the ring has done that the node
    leads, `links` what went over its links to other nodes. `pressure` is null where it does not
    look at the memory of its machine. `deputy` goes on if this node is lost, and this node if one
    of those in `deputy_of` is. `rings` are those behind this head where there are several. `audit`
    is null for who has audited nothing. `power_failure` says why something that measures what the
    machine draws cannot be used, `gpu_troubles` what is wrong with its GPUs.
    """

    cluster: schema.Name
    protocol: U32
    uptime_s: schema.Seconds
    received_at: schema.Moment
    sent_at: schema.Moment
    interfaces: Annotated[list[InterfaceAddress], Meta(max_length=MAX_VIEWS)]
    multicast: MulticastState
    peers: Annotated[list[PeerView], Meta(max_length=MAX_VIEWS)]
    unreached: Annotated[list[AddressView], Meta(max_length=MAX_VIEWS)]
    refused: Annotated[list[RefusedHost], Meta(max_length=MAX_VIEWS)]
    disk_free_bytes: schema.Count | None
    n_requests: U32 = 0
    stage: StageState | None = None
    model_id: schema.DigestOrNone = ""
    model_failure: schema.Explanation = ""
    model_config: schema.Text = ""
    temperature_c: Annotated[float, Meta(ge=-100, le=1000)] | None = None
    ring: RingWork | None = None
    pressure: PressureState | None = None
    deputy: DeputyState | None = None
    deputy_of: Annotated[list[DeputyState], Meta(max_length=schema.MAX_STAGES)] = []
    links: Annotated[list[LinkTraffic], Meta(max_length=MAX_TRAFFIC)] = []
    rings: Annotated[list[RingBehind], Meta(max_length=schema.MAX_STAGES)] = []
    audit: AuditState | None = None
    power_failure: schema.Explanation = ""
    gpu_troubles: Annotated[list[schema.Explanation], Meta(max_length=MAX_VIEWS)] = []
