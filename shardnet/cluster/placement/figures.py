"""Inputs and result of the planner: sizes of a model, speeds of nodes and links, a placement.

Knows sizes and times as plain figures, and the memory of a stage. Pure. Must not know how the
figures were measured, nor how a plan is chosen from them.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from msgspec import structs

from shardnet.errors import UsageError
from shardnet.model.shards.cut import Cut, head_ends
from shardnet.stage.estimate.memory_estimate import N_BUFFERS, streamed_layers
from shardnet.types import BLOCK_POSITIONS, LayerRange, NodeId, blocks_for
from shardnet.wire.framing.schema import LinkFigures
from shardnet.wire.messages.measurements import StageSeconds

MARGIN = 0.02
"""Share of a stage's predicted memory that is kept free for what is not predicted."""


PREFILL_ROWS = 256
"""Rows of a prompt's chunk, whose time nodes measure."""
LEAST_S = 1e-12
"""A layer takes no less: what another node reports may be nonsense."""
LEAST_BYTES_PER_S = 1.0
"""Nor is a link or a disk slower."""


class Objective(enum.Enum):
    """What a plan minimises. The value is the name used in flags.

    LATENCY is the seconds per token of one sequence: all stages and all hops of one trip.
    THROUGHPUT is the slowest stage's seconds per step, its sending included: what bounds the tokens
    of many sequences in flight.
    """

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model that quantisation can change, in bytes; ModelShape says what each is."""

    layer_bytes: int
    head_bytes: int
    kv_block_bytes: int
    activation_bytes: int
    activation_position_bytes: int = 0
    state_bytes: int = 0
    layer_kv: tuple[tuple[int, int], ...] = ()
    spared_bytes: tuple[int, ...] = ()
    tied_bytes: int = 0

    @property
    def each(self) -> dict[str, Any]:
        """The sizes by their names, without what a class adds to them."""
        return {size.name: getattr(self, size.name) for size in fields(Sizes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSizes(Sizes):
    """Sizes of a model with `flags`, which quantise weights, keys and values, or both."""

    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Bytes of streaming a layer from disk.

    `read_bytes` of a layer are read at every step and not kept: of experts, those that a row
    visits. A buffer for the largest layer takes `buffer_bytes`. A stage that streams any needs
    `working_bytes` more: for packed weights of linears, and rows that wait within a layer.
    """

    read_bytes: int
    buffer_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """What the nodes of one stage tell each other of one row, in bytes of all their parts.

    `layers` has the bytes of each gather in each layer. `head_bytes` are those of the gather behind
    the LM head, `embedding_bytes` those of each node's part behind the embedding; 0 where there is
    none. Attention is cut by `heads`, those of queries and of keys
    and values; (1, 1) where it is whole in every shard. Of a layer's weights `head_weights` are
    those of queries, keys and values.
    """

    layers: tuple[tuple[int, ...], ...]
    embedding_bytes: int
    head_bytes: int
    heads: tuple[int, int] = (1, 1)
    head_weights: Fraction = Fraction(0)

    def of(self, layers: LayerRange, n_shards: int) -> list[int]:
        """Return the bytes of each gather in a stage with these layers."""
        found = [n_bytes for layer in self.layers[layers.start : layers.end] for n_bytes in layer]
        if layers.start == 0 and self.embedding_bytes:
            found.append(n_shards * self.embedding_bytes)
        if layers.end == len(self.layers) and self.head_bytes:
            found.append(self.head_bytes)
        return found

    def added_to(
        self, speed: StageSpeed, gather_s: Callable[[int, int], float], n_shards: int
    ) -> StageSpeed:
        """Return the speed of what computes so fast and gathers, too.

        `gather_s` says what a gather of so many bytes takes for so many rows. Layers are taken for
        equal: each as long as all of them on average.
        """
        each = Counter(size for layer in self.layers for size in layer)

        def layer_s(n_rows: int) -> float:
            taken_s = sum(n * gather_s(size, n_rows) for size, n in each.items())
            return taken_s / max(1, len(self.layers))

        def once_s(size: int) -> float:
            return gather_s(size, 1) if size else 0.0

        return structs.replace(
            speed,
            layer_s=speed.layer_s + layer_s(1),
            layer_256_s=speed.layer_256_s + layer_s(PREFILL_ROWS),
            embed_s=speed.embed_s + once_s(n_shards * self.embedding_bytes),
            head_s=speed.head_s + once_s(self.head_bytes),
        )

    def cuts(self, weights: Sequence[int]) -> list[Cut]:
        """Return what each of several nodes has by its weight."""
        heads, kv_heads = self.heads
        return [
            Cut(
                index=index,
                weights=tuple(weights),
                n_heads=heads,
                n_kv_heads=kv_heads,
                head_ends=head_ends(heads, kv_heads, weights),
            )
            for index in range(len(weights))
        ]


NO_GATHERS = Gathers(layers=(), embedding_bytes=0, head_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Sizes):
    """Sizes of a model in the dtype that it computes in, in bytes.

    `context` is the positions of the one sequence there must be room for. `kv_block_bytes` is one
    layer's KV cache of one block of positions, `activation_bytes` the peak of one stage's
    intermediate results and `activation_position_bytes` how much of it each position of the context
    adds. `hop_bytes` is one row's activations as they travel from stage to stage.
    `quantized_sizes` are those with more of it quantised, those of one flag first.
    `layer_read_bytes` is what one row reads of a layer, None if that is all of it; it is less if
    there are experts. `layer_bytes` is the size of the largest layer, and `spared_bytes` how much
    less each one takes, () if all are equal. A stage with both embedding and LM head takes
    `tied_bytes` less than the two. `state_bytes` are the states of all slots in a layer; 0 where no
    layer keeps one. Where layers differ, `layer_kv` are the bytes of a block and of the states of
    each, and the two are the most of any.
    The last stage has `n_tail_layers` more that keep keys and values, which are the last ones of
    `layer_kv`; their weights are part of `head_bytes`. `streaming` is None if weights have to be
    converted on loading, so cannot be streamed.
    `narrow_hops` are the `hop_bytes` from one node to another where that link has its own dtype.
    `gathers` is None where a stage cannot span several nodes.
    """

    n_layers: int
    embedding_bytes: int
    hop_bytes: int
    context: int
    quantized_sizes: tuple[QuantizedSizes, ...] = ()
    layer_read_bytes: int | None = None
    streaming: Streaming | None = None
    n_tail_layers: int = 0
    narrow_hops: Mapping[tuple[NodeId, NodeId], int] = field(default_factory=dict)
    gathers: Gathers | None = None

    @property
    def n_blocks(self) -> int:
        """Blocks of positions in the context."""
        return blocks_for(self.context)

    @property
    def kv_layer_bytes(self) -> int:
        """The most that one layer's KV cache for one sequence of the whole context takes."""
        return max(self._each_kv)

    @property
    def _each_kv(self) -> list[int]:
        """KV cache and states of each layer, those behind the last one included."""
        alike = ((self.kv_block_bytes, self.state_bytes),) * (self.n_layers + self.n_tail_layers)
        return [self.n_blocks * block + states for block, states in self.layer_kv or alike]

    @property
    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.n_layers)

    def hop_bytes_on(self, sender: NodeId, receiver: NodeId) -> int:
        """Bytes of one row's activations from one node to another."""
        return self.narrow_hops.get((sender, receiver), self.hop_bytes)

    def with_blocks(self, n_blocks: int) -> ModelShape:
        """Return the shape with a context of so many whole blocks, fewer than the present ones."""
        context = n_blocks * BLOCK_POSITIONS
        saved_bytes = (self.context - context) * self.activation_position_bytes
        return replace(self, context=context, activation_bytes=self.activation_bytes - saved_bytes)

    def quantized(self, sizes: QuantizedSizes) -> ModelShape:
        """Return the shape with more of it quantised: with `sizes`."""
        return replace(self, **sizes.each, quantized_sizes=())

    def enlarged(self, kv: Fraction, activations: Fraction, states: Fraction) -> ModelShape:
        """Return the sizes with more keys and values, activations and states, by such factors."""

        def several(sizes: Sizes) -> dict[str, Any]:
            return {
                "kv_block_bytes": math.ceil(sizes.kv_block_bytes * kv),
                "activation_bytes": math.ceil(sizes.activation_bytes * activations),
                "activation_position_bytes": int(sizes.activation_position_bytes * activations),
                "state_bytes": math.ceil(sizes.state_bytes * states),
                "layer_kv": tuple(
                    (math.ceil(block * kv), math.ceil(own * states))
                    for block, own in sizes.layer_kv
                ),
            }

        quantized = tuple(replace(sizes, **several(sizes)) for sizes in self.quantized_sizes)
        return replace(self, **several(self), quantized_sizes=quantized)

    def weight_bytes(self, layers: LayerRange, n_streamed: int = 0) -> int:
        """Weights of a stage: its layers, the embedding if first, norm and LM head if last.

        Of `n_streamed` layers only what is not streamed, and two buffers for all of them.
        """
        is_first, is_last = layers.start == 0, layers.end == self.n_layers
        saved_bytes = 0
        if n_streamed:
            assert self.streaming is not None
            whole, spared = self.streaming.buffer_bytes, self.spared_bytes or (0,) * self.n_layers
            on_disk = [whole - spared[layer] for layer in streamed_layers(layers, n_streamed)]
            saved_bytes = sum(on_disk) - min(N_BUFFERS, len(on_disk)) * max(on_disk)
        return (
            len(layers) * self.layer_bytes
            - sum(self.spared_bytes[layers.start : layers.end])
            + is_first * self.embedding_bytes
            + is_last * self.head_bytes
            - (is_first and is_last) * self.tied_bytes
            - saved_bytes
        )

    def read_bytes(self, n_streamed: int) -> int:
        """Bytes that a stage reads from disk at every step: of two layers or less nothing."""
        if self.streaming is None or n_streamed <= N_BUFFERS:
            return 0
        return n_streamed * self.streaming.read_bytes

    def kv_bytes(self, layers: LayerRange) -> int:
        """KV cache and states of a stage for one sequence of the whole context."""
        n_more = self.n_tail_layers if layers.end == self.n_layers else 0
        return sum(self._each_kv[layers.start : layers.end + n_more])

    def memory_bytes(self, layers: LayerRange, n_streamed: int = 0) -> int:
        """Memory a stage needs for one sequence of the whole context; see `weight_bytes`."""
        weight_bytes = self.weight_bytes(layers, n_streamed)
        used = weight_bytes + self.kv_bytes(layers) + self.activation_bytes
        if n_streamed and self.streaming is not None:
            used += self.streaming.working_bytes
        return int(used * (1 + MARGIN))

    def most_memory_bytes(self, n: int) -> int:
        """Memory that a stage of any `n` layers needs that has neither the first nor the last."""
        spared = self.spared_bytes or (0,) * self.n_layers
        each = [kv - less for kv, less in zip(self._each_kv, spared, strict=False)]
        sums = [0, *accumulate(each[1:-1])]
        most = max(end - begin for begin, end in zip(sums, sums[n:], strict=False))
        return int((n * self.layer_bytes + most + self.activation_bytes) * (1 + MARGIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """A model as one node would hold it, and the memory that the node has for a stage."""

    shape: ModelShape
    memory_bytes: int

    @property
    def working_bytes(self) -> int:
        """What activations take, and what is kept free."""
        return math.ceil(self.shape.activation_bytes * (1 + MARGIN))

    def parts(self, weights: Sequence[int]) -> list[tuple[Fraction, Fraction]]:
        """Return what each shard has by its weight: of the model's weights, of keys and values."""
        gathers = self.shape.gathers or NO_GATHERS
        return [
            (cut.share(gathers.head_weights), Fraction(cut.n_own_kv_heads, cut.n_kv_heads))
            for cut in gathers.cuts(weights)
        ]

    def shared_by(self, weights: Sequence[int], memory_bytes: Sequence[int]) -> HeldModel:
        """Return it in shards, each with a share by its weight and so much memory.

        Each has all activations and states. What fits there fits each of them: where one is full
        before the others, of these only as much memory counts as goes with its share.
        """
        parts = self.parts(weights)
        shares, working = [share for share, _ in parts], self.working_bytes
        rooms = [(own - working) / share for own, share in zip(memory_bytes, shares, strict=True)]
        most = 1 / max(shares)
        return HeldModel(
            shape=self.shape.enlarged(
                max(kv / share for share, kv in parts), most, 1 / min(shares)
            ),
            memory_bytes=max(0, int(min(rooms) + most * working)),
        )

    def with_blocks(self, n_blocks: int) -> HeldModel:
        """Return it with a context of so many whole blocks, fewer than the present ones."""
        return replace(self, shape=self.shape.with_blocks(n_blocks))

    def quantized(self, choice: int) -> HeldModel:
        """Return it with the quantisation that is listed at `choice`, the same for every node."""
        return replace(self, shape=self.shape.quantized(self.shape.quantized_sizes[choice]))


class StageSpeed(StageSeconds, frozen=True, kw_only=True):
    """Times that a node has measured for one model shape.

    `layer_s` decides plans; `layer_256_s` says what a prefill chunk costs. Without `is_steady` the
    node was busy when it measured.
    Raises UsageError for an impossible time, since other nodes report these.
    """

    is_steady: bool = True

    def __post_init__(self) -> None:
        _check(self.layer_s >= LEAST_S, "a layer's time for 1 row", self.layer_s)
        _check(self.layer_256_s >= LEAST_S, "a layer's time for 256 rows", self.layer_256_s)
        _check(self.embed_s >= 0, "the embedding's time", self.embed_s)
        _check(self.head_s >= 0, "the LM head's time", self.head_s)
        _check(self.step_s >= 0, "a step's fixed time", self.step_s)


class LinkSpeed(LinkFigures, frozen=True, kw_only=True):
    """Figures of the link from one node to another. Without `is_steady` a node was busy then.

    Raises UsageError for impossible figures.
    """

    def __post_init__(self) -> None:
        _check(self.round_trip_s >= 0, "a round trip", self.round_trip_s)
        _check(self.bytes_per_s >= LEAST_BYTES_PER_S, "a bandwidth", self.bytes_per_s)
        if self.gather_s is not None:
            _check(self.gather_s >= 0, "a gather's time", self.gather_s)
        if (rate := self.gather_bytes_per_s) is not None:
            _check(rate >= LEAST_BYTES_PER_S, "a bandwidth of gathers", rate)

    def hop_s(self, size_bytes: int) -> float:
        """Seconds from the first byte sent to the last one received."""
        return self.round_trip_s / 2 + self.send_s(size_bytes)

    def send_s(self, size_bytes: int) -> float:
        """Seconds that the sender is busy; latency costs the sender nothing."""
        return size_bytes / self.bytes_per_s


Links = Mapping[tuple[NodeId, NodeId], LinkSpeed]
"""From (sender, receiver) to what was measured of the way between them."""

NO_LINKS: Links = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevice:
    """One of several devices of a node: the model as it would hold it, and how fast it is.

    Devices of one `kind` can share layers. `speed` is None where nothing was measured.
    """

    name: str
    kind: str
    held: HeldModel
    speed: StageSpeed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevices:
    """The devices of a node. `tensor_parallel` of them share each layer, 0 for as is best.

    `gather` is what it takes to join the parts of one row, None where that was not measured.
    `why_not_shared` says why they cannot share layers, "" where they can. So many shards as in
    `whole_heads` do not divide the heads: each computes all of the attention, which is
    `attention_share` of a layer.
    """

    each: tuple[NodeDevice, ...]
    tensor_parallel: int = 0
    gather: LinkSpeed | None = None
    why_not_shared: str = ""
    whole_heads: frozenset[int] = frozenset()
    attention_share: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether all of them are."""
        return all(device.speed is not None for device in self.each)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateNode:
    """A node that could run a stage, with the memory it may use for one in bytes.

    `speed` is None where nothing was measured, and so is the speed of the disk with the checkpoint.
    `lacking` are the stored bytes of each layer that it would have to fetch, () for none, and
    `fetch_bytes_per_s` how fast they would come, None where that was not measured. Where more than
    `room_bytes` lack, other nodes give rows of tables, `table_bytes` of each layer; of a node that
    may come to that `rows_bytes` more are for these rows. `shape` are the model's sizes on this
    node where it holds the model in another form than most, as in float32 where it has no
    instructions for the ring's dtype. A stage of it spans the nodes `shards` too,
    each with its part by `shares`, () for equal ones: the figures are those of all of them
    together, but what lacks is said by these `members`. Where it has several `devices`, the figures
    are those that placement/devices.py makes of them.
    """

    node: NodeId
    name: str
    memory_bytes: int
    speed: StageSpeed | None = None
    disk_bytes_per_s: float | None = None
    lacking: tuple[int, ...] = ()
    fetch_bytes_per_s: float | None = None
    table_bytes: tuple[int, ...] = ()
    room_bytes: int | None = None
    rows_bytes: int = 0
    shape: ModelShape | None = None
    shards: tuple[NodeId, ...] = ()
    shares: tuple[int, ...] = ()
    members: tuple[CandidateNode, ...] = ()
    devices: NodeDevices | None = None

    def held(self, shape: ModelShape) -> HeldModel:
        """Return the model of `shape` as this node would hold it."""
        return HeldModel(shape=self.shape or shape, memory_bytes=self.memory_bytes)

    def fetch_bytes(self, layers: LayerRange) -> int:
        """Bytes to fetch before these layers can be loaded here; of several nodes the most."""
        if self.members:
            return max(one.fetch_bytes(layers) for one in self.members)
        return sum(self.lacking[layers.start : layers.end]) - self.elsewhere_bytes(layers)

    def elsewhere_bytes(self, layers: LayerRange) -> int:
        """Bytes of these layers' tables that stay at other nodes, where its disk lacks room."""
        if self.members:
            return max(one.elsewhere_bytes(layers) for one in self.members)
        own = self.lacking[layers.start : layers.end]
        if self.room_bytes is None or sum(own) <= self.room_bytes:
            return 0
        tables = self.table_bytes[layers.start : layers.end]
        return sum(table for lacking, table in zip(own, tables, strict=False) if lacking)

    def fetch_s(self, layers: LayerRange) -> float | None:
        """Seconds of that, None where the way to a node that has them was not measured."""
        if self.members:
            return max(self.members, key=lambda one: one.fetch_bytes(layers)).fetch_s(layers)
        if not (n_bytes := self.fetch_bytes(layers)):
            return 0.0
        return n_bytes / self.fetch_bytes_per_s if self.fetch_bytes_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """Layers of a stage on one device of its node, or shared by several.

    `devices` are their places and `names` what the node calls them; the rest as in StagePlan.
    """

    layers: LayerRange
    devices: tuple[int, ...]
    names: tuple[str, ...]
    weight_bytes: int
    kv_bytes: int
    compute_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a plan, with the memory it is predicted to take.

    `compute_s` is the predicted time of one row in this stage and `hop_s` of its hop to the next
    stage, from the tail to the head; None if not measured, `hop_s` also in a ring of one.
    `working_bytes` it needs while it computes. `n_streamed` of its layers are streamed from disk.
    `fetch_bytes` are fetched from other nodes first, in about `fetch_s`; with `asks_rows` its
    tables stay there, and `rows_bytes` are a part of what it needs. The stage spans the nodes
    `shards` too, of which each has its part of the bytes by `shares`, its own first, () for equal
    ones. Where the node has several devices, `parts` say which has what, `parts_why` for what
    reason.
    """

    node: NodeId
    layers: LayerRange
    weight_bytes: int
    kv_bytes: int
    working_bytes: int = 0
    compute_s: float | None = None
    hop_s: float | None = None
    n_streamed: int = 0
    fetch_bytes: int = 0
    fetch_s: float | None = None
    asks_rows: bool = False
    rows_bytes: int = 0
    shards: tuple[NodeId, ...] = ()
    shares: tuple[int, ...] = ()
    parts: tuple[PartPlan, ...] = ()
    parts_why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A candidate that the plan does not use."""

    node: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages in ring order, who was left out, and why it is so.

    `predicted_tok_s` is None where not every figure that it needs was measured.
    """

    stages: tuple[StagePlan, ...]
    left_out: tuple[Exclusion, ...]
    predicted_tok_s: float | None
    why: str


def _check(holds: bool, what: str, value: float) -> None:
    if not (holds and math.isfinite(value)):
        raise UsageError(
            f"{what} of {value} cannot have been measured", remedy="measure that node again"
        )
