"""Control messages between the head of a ring and its stages: orders, and what became of them.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how a
stage loads, nor of clients.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from shardnet.slot_operations import MAX_ADAPTERS
from shardnet.stage_form import StageForm
from shardnet.types import (
    BLOCK_POSITIONS,
    MAX_LAYERS,
    MAX_STORED_BLOCKS,
    U32,
    U64,
    Arith,
    BlockKeys,
    Digest,
    LayerNumber,
    Row,
    Strict,
    TaggedReport,
    WireDType,
)
from shardnet.wire.framing import schema

MAX_ADAPTER_LAYER_BYTES: Final = 1 << 28
MAX_AUDITED_BYTES: Final = 1 << 20
AuditedRows = Annotated[bytes, Meta(max_length=MAX_AUDITED_BYTES)]
"""Rows in the dtype of their ring, row-major, little-endian."""
MAX_AHEAD_IDS: Final = 1 << 16


class DevicePart(Row, frozen=True, array_like=True):
    """Layers of a stage on one device of its node, or on several, each with a shard of them."""

    layers: schema.Layers
    devices: schema.DeviceNumbers


class AdapterLayer(Row, frozen=True, array_like=True):
    """One layer's part of an adapter: its file, and the weights in it."""

    layer: LayerNumber
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_LAYER_BYTES)]
    n_weights: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_LAYER_BYTES)]
    sha256: Digest


class RingAdapter(Strict, frozen=True, kw_only=True):
    """A LoRA adapter of a ring, and its parts for some of the layers."""

    name: schema.AdapterName
    adapter_id: Digest
    layers: Annotated[list[AdapterLayer], Meta(max_length=MAX_LAYERS)]


class LoadStage(schema.OfRing, frozen=True, kw_only=True):
    """Tell a node to load its stage of a ring. A node with another model than the form's refuses.

    So does one that finds rows of another width than `border_width` in it, unless that is 0.

    `addresses` are the nodes of the ring in order; `threads` 0 leaves the number to the node.
    A node that lacks weights fetches them from `sources`, and holds their digests against the
    first. `n_streamed` of the layers stay on disk. With `beside` the stage is loaded for a ring to
    come while the ring that the node is in goes on: the same order without it takes the stage into
    use, and where the head is lost before it is freed. That ring comes when the node named
    `stands_for` is lost, "" for none; with `kv_only` its weights are not loaded yet, and only what
    sequences hold can follow. Activations are sent in `wire_dtype`, and received in
    `received_dtype`. The ring is in the place of one that the node `instead_of` leads, "" for none:
    of that node orders of smaller epochs are refused from then on. A stage that spans the
    `shard_nodes` is cut over them, by the `shares` of each, [] for equal ones; this node has part
    `shard` of each linear. `parts` say which of the node's devices have which of the layers, []
    that the first has all. The stage has its layers' parts of `adapters`, which the node fetches
    too.
    """

    form: StageForm
    rank: schema.Rank
    n_stages: Annotated[int, Meta(ge=1, le=schema.MAX_STAGES)]
    layers: schema.Layers
    wire_dtype: WireDType
    received_dtype: WireDType
    threads: schema.Threads
    addresses: schema.Addresses
    sources: schema.Addresses = []
    n_streamed: LayerNumber = 0
    beside: bool = False
    stands_for: schema.Name = ""
    kv_only: bool = False
    arith: Arith = Arith.FAST
    instead_of: schema.Name = ""
    shard_nodes: schema.Addresses = []
    shard: schema.Rank = 0
    shares: schema.Shares = []
    parts: Annotated[list[DevicePart], Meta(max_length=schema.MAX_DEVICES)] = []
    adapters: Annotated[list[RingAdapter], Meta(max_length=MAX_ADAPTERS)] = []
    border_width: U32 = 0


class LoadProgress(schema.Reply, frozen=True, kw_only=True):
    """How far a LoadStage or MeasureStage is. Sent every few seconds: it is not silence."""

    done_bytes: schema.Count
    total_bytes: schema.Count
    phase: schema.Phase = "loading"


class StageReady(schema.Reply, frozen=True, kw_only=True):
    """Answers LoadStage: the stage is loaded. `kernel` names the matrix products' path.

    `room_blocks` is the KV room that is really there; `reused` that the weights were there already.
    A row's bits do not depend on the rows beside it in steps of at most `exact_rows` rows.
    `arithmetic` stands for everything but the model that decides the bits of its keys and values,
    "" where the node keeps no prefixes on disk. With `shares_blocks` a slot that is copied shares
    whole blocks with its source, and they count once. `room_states` is the room for states of
    layers that keep one.
    """

    weight_bytes: schema.Count
    room_blocks: U32
    reused: bool
    kernel: schema.Name
    load_s: schema.Seconds
    exact_rows: U32
    arithmetic: schema.DigestOrNone = ""
    shares_blocks: bool = False
    room_states: U32 = 0


class RingBroken(TaggedReport, frozen=True, kw_only=True):
    """Tell the head, unasked, that the sender's stage left a ring, and why.

    `silent` is the neighbour from which nothing came any more, or what breaks the protocol, ""
    unless that is why.
    """

    ring: schema.Name
    epoch: U32
    code: U32
    message: schema.Explanation
    silent: schema.Name = ""


class ConnectRing(schema.OfRing, frozen=True, kw_only=True):
    """Tell a node to open its data link to the next node of a ring."""


class UnloadStage(schema.Numbered, frozen=True, kw_only=True):
    """Tell a node to free its stage of a ring."""

    ring: schema.Name


class Drain(schema.Numbered, frozen=True, kw_only=True):
    """Tell a node to give its layers to others, and to end when it is empty.

    After `deadline_s` seconds it ends in any case.
    """

    deadline_s: schema.Seconds


class LeaveRing(schema.Numbered, frozen=True, kw_only=True):
    """Ask the head of a ring to do without the sender: it is draining, or `why` it rests.

    A head that cannot holds its requests until the node is back, for `returns_s` seconds at most.
    """

    ring: schema.Name
    why: schema.Explanation = ""
    returns_s: schema.Seconds = 0.0


class DropWarm(schema.Numbered, frozen=True, kw_only=True):
    """Ask the head of a ring to free what it keeps in KV caches for requests to come."""

    ring: schema.Name


class FindPrefix(schema.OfRing, frozen=True, kw_only=True):
    """Ask a stage which of a prompt's first blocks it has on disk."""

    keys: BlockKeys


class PrefixFound(schema.Reply, frozen=True, kw_only=True):
    """Answers FindPrefix: bit `n % 8` of byte `n // 8` is 1 if the first `n + 1` can be restored.

    Reading one takes `block_bytes`, at `bytes_per_s` as measured, 0 if it was not.
    """

    restorable: Annotated[bytes, Meta(max_length=-(-MAX_STORED_BLOCKS // 8))]
    block_bytes: schema.Count
    bytes_per_s: schema.Figure = 0.0


class RestorePrefix(schema.OfRing, frozen=True, kw_only=True):
    """Tell a stage to read all blocks of `keys`, for a sequence that is opened then.

    `token_ids` are those of their positions, u32 little-endian. Without keys what was read for the
    sequence is forgotten.
    """

    sequence_id: U64
    keys: BlockKeys
    token_ids: Annotated[bytes, Meta(max_length=4 * BLOCK_POSITIONS * MAX_STORED_BLOCKS)] = b""


class PrefixRestored(schema.Reply, frozen=True, kw_only=True):
    """Answers RestorePrefix: whether all of it is there. Nothing is kept if not."""

    is_whole: bool


class ReadAhead(schema.OfRing, frozen=True, kw_only=True):
    """Have a stage read into memory what tokens of a prompt look up in files, until Cancel."""

    token_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_AHEAD_IDS)]


class KvSource(Row, frozen=True, array_like=True):
    """The node at `address` has `layers` in the ring that goes on."""

    layers: schema.Layers
    address: schema.Address


class MoveKv(schema.OfRing, frozen=True, kw_only=True):
    """Tell a node to bring the first positions of a sequence to its stage for ring `to`.

    They are in `slot` of the stages of `ring` and `epoch`, which `sources` are. `token_ids` are
    those of the positions, u32 little-endian. While the ring goes on this may be said again with
    more of them; the last time, with `is_last`, no step is in flight. Without any token ids what
    has come is dropped. What is kept as `state` follows them, if it is not None, and else what
    slots hold.
    """

    to: schema.Name
    sequence_id: U64
    slot: U32
    token_ids: Annotated[bytes, Meta(max_length=4 * BLOCK_POSITIONS * MAX_STORED_BLOCKS)]
    sources: Annotated[list[KvSource], Meta(max_length=schema.MAX_STAGES)]
    is_last: bool = False
    state: U32 | None = None


class KvMoved(schema.Reply, frozen=True, kw_only=True):
    """Answers MoveKv: whether all of it is there. `n_bytes` came over links for it."""

    is_whole: bool
    n_bytes: schema.Count


class AuditStage(schema.OfRing, frozen=True, kw_only=True):
    """Have a stage look at some of its memory, and compute rows that it computes each time.

    It looks at memory for as long as the rows have taken. Those before and after `layer` are asked
    for; without `with_rows` it computes none. Failed says what is wrong with rows by code 51, by 52
    what is wrong with weights.
    """

    layer: LayerNumber
    with_rows: bool = True


class StageAudited(schema.Reply, frozen=True, kw_only=True):
    """Answers AuditStage: nothing is wrong. The stage was kept from steps for `took_s`.

    It has looked at `looked_bytes` of `weight_bytes`. Rows `before` the model's first layer are
    not sent: token ids are embedded there, the same everywhere. `after` is b"" for a stage whose
    arithmetic promises no bits.
    """

    took_s: schema.Seconds
    looked_bytes: schema.Count
    weight_bytes: schema.Count
    before: AuditedRows = b""
    after: AuditedRows = b""


class CountExperts(schema.OfRing, frozen=True, kw_only=True):
    """Ask how many of the experts that steps used were read from disk, of streamed layers."""


class ExpertsCounted(schema.Reply, frozen=True, kw_only=True):
    """Answers CountExperts: the experts that each step's rows used, since the stage was loaded, and
    how many of them had to be read.
    """

    n_used: schema.Count
    n_read: schema.Count


class ComputeLayer(schema.OfRing, frozen=True, kw_only=True):
    """Have a node of a ring compute rows with a layer that it reads from its checkpoint for this.

    It need not be a layer of its stage. LoadProgress precedes the answer where it takes long.
    """

    layer: LayerNumber
    before: AuditedRows


class LayerComputed(schema.Reply, frozen=True, kw_only=True):
    """Answers ComputeLayer, in `took_s` of one thread."""

    took_s: schema.Seconds
    after: AuditedRows


StageRequest: TypeAlias = (
    LoadStage
    | ConnectRing
    | UnloadStage
    | Drain
    | DropWarm
    | LeaveRing
    | FindPrefix
    | RestorePrefix
    | ReadAhead
    | MoveKv
    | AuditStage
    | ComputeLayer
    | CountExperts
)
"""Requests about stages."""
StageMessage: TypeAlias = (
    StageRequest
    | LoadProgress
    | StageReady
    | RingBroken
    | PrefixFound
    | PrefixRestored
    | KvMoved
    | StageAudited
    | ExpertsCounted
    | LayerComputed
)
"""These, their answers, and what is sent unasked."""
