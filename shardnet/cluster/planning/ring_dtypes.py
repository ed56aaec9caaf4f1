"""Settle how a ring computes: its dtype and arithmetic, what each node makes of them, its wires.

Knows what the client asked for and what the nodes say of themselves. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Final

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.device_list import CUDA, MPS
from shardnet.cluster.placement.figures import Links
from shardnet.errors import UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.module_outline import ModuleOutline
from shardnet.types import (
    PAIRS_ARITHMETIC,
    PORTABLE_ARITHMETIC,
    TILES_ARITHMETIC,
    Arith,
    DType,
    NodeId,
    WireChoice,
    WireDType,
    parse_wires,
)
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import MIXED_WIRES, RingExactness

SLOW_BYTES_PER_S: Final = 40e6
"""A link that was measured below this is slow: Wi-Fi, and Ethernet of 100 Mbit/s."""

_HALVES: Final = (DType.BFLOAT16, DType.FLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeForm:
    """In which dtypes a node holds a ring's model: what it computes in, and linear weights.

    `arithmetic` stands for how it computes: nodes of equal ones give equal bits. `by_library`: the
    compiled library computes all of it, so that a token's bits depend on nothing beside it.
    """

    dtype: DType
    linear: DType
    arithmetic: str
    by_library: bool
    unpacks: bool = False
    """Whether packed weights are unpacked when they are loaded: nothing multiplies them there."""
    held: DType | None = None
    """In what keys and values are held that are not quantised, if that is not `dtype`."""

    @property
    def kv(self) -> DType:
        """The dtype of keys and values that are not quantised."""
        return self.held or self.dtype


def settle_dtype(requested: str, config: ModelConfig, nodes: Sequence[NodeInfo]) -> DType:
    """Settle the dtype that a ring's hidden states are rounded to: `requested`, else the model's.

    A node that has no instructions for it computes in float32, and rounds after every layer. Of
    float16 that is asked of none: where a node does not compute in it, bfloat16 takes its place.
    Raises UsageError for an unknown name.
    """
    if requested != "auto":
        try:
            return DType(requested)
        except ValueError:
            raise UsageError(
                f"--dtype {requested}: choose auto, bfloat16, float16 or float32"
            ) from None
    own = config.checkpoint_dtype or DType.FLOAT32
    if own is DType.FLOAT16 and not all(own.value in node.dtypes for node in nodes):
        return DType.BFLOAT16
    return own


def settle_arith(requested: str, nodes: Sequence[NodeInfo]) -> Arith:
    """Settle how the CPUs of a ring compute: `requested`, else portable where they are unlike.

    Raises UsageError for an unknown name.
    """
    if requested != "auto":
        return Arith.named(requested)
    kinds = {node.arithmetic for node in nodes if _is_cpu(node)}
    return Arith.PORTABLE if len(kinds) > 1 else Arith.FAST


def node_ariths(requested: str, arith: Arith, nodes: Sequence[NodeInfo]) -> dict[NodeId, Arith]:
    """Return how each node of a ring of `arith` computes.

    Unless portable arithmetic was `requested`, a CPU without vector instructions leaves that to
    torch: the library's plain C is 6 to 140 times slower.
    """
    is_insisted = requested != "auto"
    return {
        NodeId(node.node): arith if is_insisted or node.isa != kernels.PLAIN_C else Arith.FAST
        for node in nodes
    }


def node_form(
    node: NodeInfo,
    dtype: DType,
    arith: Arith,
    config: ModelConfig,
    linear_dtype: DType | None,
    *,
    is_packed: bool = False,
) -> NodeForm:
    """Tell how `node` holds a model in a ring of `dtype`; it mirrors model/kernels/linear.probe.

    `linear_dtype` is that of all linear weights as stored, None where there is no such. With
    `is_packed` all linear weights are quantised in the file. A node computes in float32 where it
    has no instructions for `dtype`, and where weights are packed; its library then keeps linear
    weights of 16 bits.
    """
    is_cpu, is_portable = _is_cpu(node), arith is Arith.PORTABLE
    has_vectors = is_cpu and node.isa in (*kernels.VECTORS, kernels.TEXT)
    has_library = has_vectors or (is_cpu and is_portable and node.isa == kernels.PLAIN_C)
    arithmetic = node.arithmetic
    own = config.checkpoint_dtype
    has_pairs = has_library and arithmetic in (PAIRS_ARITHMETIC, TILES_ARITHMETIC)
    holds_half = is_packed and has_pairs and not is_portable and dtype is DType.BFLOAT16
    is_wider = is_portable or holds_half or (has_library and own is DType.FLOAT16)
    is_native = dtype.value in node.dtypes and not (is_cpu and is_wider)
    computes = dtype if is_native else DType.FLOAT32
    if config.outline is not None:
        return NodeForm(
            dtype=computes,
            linear=computes,
            arithmetic=f"transformers, {node.arithmetic or node.device}",
            by_library=False,
        )
    if computes is not DType.FLOAT32 or not is_cpu:
        by_library = is_cpu and arithmetic in (PAIRS_ARITHMETIC, TILES_ARITHMETIC)
        return NodeForm(
            dtype=computes,
            linear=computes,
            arithmetic=arithmetic,
            by_library=by_library,
            unpacks=node.device.startswith((CUDA, MPS)),
        )
    keeps = has_library and own in _HALVES and linear_dtype is own
    return NodeForm(
        dtype=DType.FLOAT32,
        linear=own if keeps and own is not None else DType.FLOAT32,
        arithmetic=arithmetic
        if node.isa == kernels.TEXT or holds_half
        else PORTABLE_ARITHMETIC
        if has_library
        else arithmetic,
        by_library=has_library,
        held=DType.BFLOAT16 if holds_half else None,
    )


def exactness(
    nodes: Sequence[NodeInfo],
    forms: Sequence[NodeForm],
    dtype: DType,
    wires: Sequence[WireDType],
    gathers: Sequence[WireDType | None] = (),
    *,
    outline: ModuleOutline | None = None,
) -> RingExactness:
    """Tell what changes no bit of a ring's outputs (docs/exactness.md).

    `gathers` are the dtypes in which parts of each stage travel between its nodes, None for what
    keeps their bits. With an `outline` transformers' own modules compute, one sequence at a time.
    """
    kinds = list(dict.fromkeys(form.arithmetic for form in forms))
    by_library = all(form.by_library for form in forms)
    is_rounded = any(wire is not WireDType.own(dtype) for wire in wires) or any(
        wire is not None and wire is not WireDType.own(form.dtype)
        for wire, form in zip(gathers, forms, strict=False)
    )
    if len(kinds) > 1:
        named = [
            f"{node.name} ({form.arithmetic or node.device})"
            for node, form in zip(nodes, forms, strict=True)
        ]
        why = f"nodes compute unlike, so another split gives other bits: {', '.join(named[:8])}"
    elif is_rounded:
        why = "a narrower wire rounds on the way, so another split gives other bits"
    elif outline is not None and outline.has_state:
        why = "states go row by row in some stages, so another split may give other bits"
    else:
        why = "whatever the split"
    if by_library:
        why += "; the same in any batch, chunks and threads"
        if kinds == [PORTABLE_ARITHMETIC]:
            why += ", on every CPU with the compiled kernels and every GPU with their bits"
        elif len(kinds) == 1:
            why += f", on CPUs with {kinds[0]}"
    elif outline is not None:
        why += "; the same beside any others, not in other chunks: for that --deterministic"
    else:
        why += "; the same in a batch as far as a test at loading finds, else --deterministic"
    is_anew = outline is not None and outline.has_state
    is_same = len(kinds) == 1 and not is_rounded and not is_anew
    return RingExactness(split=is_same, batch=by_library, threads=by_library, why=why)


def settle_wires(
    requested: str, dtype: DType, ring: Sequence[NodeInfo], links: Links
) -> tuple[WireDType, ...]:
    """Settle the dtype of activations on each link of a ring, from its head on.

    What is not asked for is `dtype`, which is lossless. Raises UsageError as `parse_wires`.
    """
    choice = parse_wires(requested)
    return tuple(
        _wire(choice, dtype, (sender, receiver), f"{rank}-{rank + 1}", links)
        for rank, (sender, receiver) in enumerate(pairwise(ring))
    )


def narrow_hops(
    choice: WireChoice,
    dtype: DType,
    nodes: Sequence[NodeInfo],
    links: Links,
    width: int,
    *,
    in_order: bool,
) -> Mapping[tuple[NodeId, NodeId], int]:
    """Return the bytes of a row between nodes whose link has a wire dtype of its own.

    Ranks name links only where the nodes are those of the ring, `in_order`.
    """
    if not choice.varies:
        return {}
    ranks = {pair: f"{pair[0]}-{pair[1]}" for pair in pairwise(range(len(nodes)))}
    hops = {}
    for here, there in permutations(range(len(nodes)), 2):
        pair = (nodes[here], nodes[there])
        rank_name = ranks.get((here, there), "") if in_order else ""
        wire = _wire(choice, dtype, pair, rank_name, links)
        hops[NodeId(pair[0].node), NodeId(pair[1].node)] = wire.row_bytes(width)
    return hops


def unused_links(requested: str, ring: Sequence[NodeInfo]) -> list[str]:
    """List the links that --wire-dtype names and that are none of this ring."""
    own = {f"{rank}-{rank + 1}" for rank in range(len(ring) - 1)}
    own |= {f"{sender.name}-{receiver.name}" for sender, receiver in pairwise(ring)}
    return [name for name, _ in parse_wires(requested).named if name not in own]


def wire_name(wires: Sequence[WireDType], dtype: DType) -> str:
    """Name the wire dtype of a ring of `dtype` for people: MIXED_WIRES where links differ."""
    names = {wire.value for wire in wires} or {dtype.value}
    return names.pop() if len(names) == 1 else MIXED_WIRES


def _wire(
    choice: WireChoice, dtype: DType, pair: tuple[NodeInfo, NodeInfo], rank_name: str, links: Links
) -> WireDType:
    """Return the wire dtype of one link, from the first node of `pair` to the second."""
    names = (rank_name, f"{pair[0].name}-{pair[1].name}")
    for name, wire in choice.named:
        if name in names:
            return wire
    if choice.slow is not None:
        way = (NodeId(pair[0].node), NodeId(pair[1].node))
        link = links.get(way) or links.get(way[::-1])
        if link is not None and link.bytes_per_s < SLOW_BYTES_PER_S:
            return choice.slow
    return choice.every or WireDType.own(dtype)


def _is_cpu(node: NodeInfo) -> bool:
    """Whether it computes as the compiled library does: a CPU, or what has the kernel text."""
    return node.device == "cpu" or node.isa == kernels.TEXT
