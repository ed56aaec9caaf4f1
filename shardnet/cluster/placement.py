"""Placement: which node runs which layers. Pure.

Knows what a model's layers weigh and what each node has room for. Must not know how those figures
were found, nor time, sockets or torch.

Until nodes measure themselves, a stage's time is taken to be the bytes it reads per step: its
layers, and on the tail the LM head (design decision 10). A ring is never longer than it must be:
every hop costs time that one sequence cannot win back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from shardnet.errors import PlanError
from shardnet.types import LayerRange, NodeId

MARGIN = 0.02
"""Share of a stage's predicted memory that is kept free for what nothing predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model weighs in the dtype it will compute in. All sizes in bytes.

    `kv_layer_bytes` is one layer's KV cache for one sequence of the whole context, and
    `activation_bytes` the peak of one stage's intermediate results.
    """

    n_layers: int
    layer_bytes: int
    embedding_bytes: int
    head_bytes: int
    kv_layer_bytes: int
    activation_bytes: int

    def weight_bytes(self, layers: LayerRange) -> int:
        """Weights of a stage: its layers, the embedding if first, norm and LM head if last."""
        is_first, is_last = layers.start == 0, layers.end == self.n_layers
        return (
            len(layers) * self.layer_bytes
            + is_first * self.embedding_bytes
            + is_last * self.head_bytes
        )

    def read_bytes(self, layers: LayerRange) -> int:
        """Bytes a stage reads for one row. Of the embedding that is one row: nothing."""
        return len(layers) * self.layer_bytes + (layers.end == self.n_layers) * self.head_bytes

    def memory_bytes(self, layers: LayerRange) -> int:
        """Memory a stage needs for one sequence of the whole context."""
        used = self.weight_bytes(layers) + len(layers) * self.kv_layer_bytes + self.activation_bytes
        return int(used * (1 + MARGIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that could run a stage, with the memory it may use for one in bytes."""

    node: NodeId
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a plan, with the memory it is predicted to take."""

    node: NodeId
    layers: LayerRange
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A candidate that the plan does not use."""

    node: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages in ring order, who was left out, and why it is so."""

    stages: tuple[StagePlan, ...]
    left_out: tuple[Exclusion, ...]
    why: str


def place_exactly(
    shape: ModelShape, ring: Sequence[Candidate], layers: Sequence[LayerRange] | None = None
) -> Placement:
    """Place the model on exactly these nodes in this order, the first being the head.

    `layers` fixes the ranges; without it they are divided by bytes read per step.

    Raises PlanError when there are more nodes than layers, the ranges do not match nodes or model,
    or a stage does not fit its node; the message has the figures and a way out.
    """
    if len(ring) > shape.n_layers:
        raise PlanError(
            f"{len(ring)} nodes were named and the model has {shape.n_layers} layers: "
            "name at most one node per layer"
        )
    if layers is None:
        ranges = _balanced(shape, [candidate.memory_bytes for candidate in ring])
        if ranges is None:
            raise PlanError(_shortfall(shape, ring))
        why = "the nodes that were named, layers divided by bytes read per step"
    else:
        ranges = _checked(shape, ring, layers)
        why = "the nodes and layers that were named"
    return Placement(stages=_stages(shape, ring, ranges), left_out=(), why=why)


def place(shape: ModelShape, candidates: Sequence[Candidate]) -> Placement:
    """Choose the shortest ring that fits, the first candidate before the others.

    The first candidate is the node that was asked: it is the head unless it is too small for any
    stage. The others follow by memory, largest first.

    Raises PlanError with the figures when the model does not fit all of them together.
    """
    asked, *others = candidates
    by_memory = [asked, *sorted(others, key=lambda c: (-c.memory_bytes, c.node))]
    for n_stages in range(1, min(len(by_memory), shape.n_layers) + 1):
        for ring in _rings(by_memory, n_stages):
            ranges = _balanced(shape, [candidate.memory_bytes for candidate in ring])
            if ranges is not None:
                return _shortest(shape, by_memory, ring, ranges)
    raise PlanError(_shortfall(shape, by_memory))


def _rings(by_memory: Sequence[Candidate], n_stages: int) -> list[list[Candidate]]:
    """Rings of `n_stages` to try: the asked node with the largest others, then without it."""
    asked, *others = by_memory
    rings = [[asked, *others[: n_stages - 1]]]
    if len(others) >= n_stages:
        rings.append(list(others[:n_stages]))
    return rings


def _shortest(
    shape: ModelShape,
    candidates: Sequence[Candidate],
    ring: Sequence[Candidate],
    ranges: Sequence[LayerRange],
) -> Placement:
    n_stages = len(ring)
    if n_stages == 1:
        why = f"the whole model fits on {ring[0].name}; a split would only add trips"
        reason = "not needed: the model fits on one node, and every hop costs time"
    else:
        why = f"no {n_stages - 1} of these nodes hold the model; {n_stages} do"
        reason = f"not needed: {n_stages} nodes hold the model, and every hop costs time"
    chosen = {candidate.node for candidate in ring}
    left_out = tuple(Exclusion(node=c.node, why=reason) for c in candidates if c.node not in chosen)
    return Placement(stages=_stages(shape, ring, ranges), left_out=left_out, why=why)


def _stages(
    shape: ModelShape, ring: Sequence[Candidate], ranges: Sequence[LayerRange]
) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            node=candidate.node,
            layers=layers,
            weight_bytes=shape.weight_bytes(layers),
            kv_bytes=len(layers) * shape.kv_layer_bytes,
        )
        for candidate, layers in zip(ring, ranges, strict=True)
    )


def _balanced(shape: ModelShape, memory: Sequence[int]) -> tuple[LayerRange, ...] | None:
    """Split the layers so that the largest stage reads least, each stage fitting its memory.

    Among equal splits the one that gives earlier stages more layers wins. None when nothing fits.
    """
    n_layers, n_stages = shape.n_layers, len(memory)

    @cache
    def best(rank: int, start: int) -> tuple[int, tuple[LayerRange, ...]] | None:
        """The least largest reading of stages `rank`.. over layers `start`.., and their ranges."""
        remaining = n_stages - rank - 1
        found: tuple[int, tuple[LayerRange, ...]] | None = None
        ends = range(n_layers - remaining, start, -1) if remaining else [n_layers]
        for end in ends:
            layers = LayerRange(start, end)
            if shape.memory_bytes(layers) > memory[rank]:
                continue
            rest = best(rank + 1, end) if remaining else (0, ())
            if rest is None:
                continue
            largest = max(shape.read_bytes(layers), rest[0])
            if found is None or largest < found[0]:
                found = (largest, (layers, *rest[1]))
        return found

    solution = best(0, 0)
    return solution[1] if solution else None


def _checked(
    shape: ModelShape, ring: Sequence[Candidate], layers: Sequence[LayerRange]
) -> tuple[LayerRange, ...]:
    if len(layers) != len(ring):
        raise PlanError(
            f"--layers names {len(layers)} ranges for {len(ring)} nodes: give one range per node"
        )
    if layers[-1].end != shape.n_layers:
        raise PlanError(
            f"--layers ends at {layers[-1].end} and the model has {shape.n_layers} layers: "
            f"end the last range at {shape.n_layers}"
        )
    for candidate, part in zip(ring, layers, strict=True):
        needed = shape.memory_bytes(part)
        if needed > candidate.memory_bytes:
            raise PlanError(
                f"node {candidate.name} lacks {_gib(needed - candidate.memory_bytes)} for layers "
                f"{part} (needs {_gib(needed)}): give it fewer layers or a smaller --context"
            )
    return tuple(layers)


def _shortfall(shape: ModelShape, candidates: Sequence[Candidate]) -> str:
    whole = shape.memory_bytes(LayerRange(0, shape.n_layers))
    have = ", ".join(f"{c.name} {_gib(c.memory_bytes)}" for c in candidates)
    return (
        f"the model needs {_gib(whole)} with its context and does not fit: {have}; add a node, "
        "raise --memory or lower --context"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
