"""The one estimate of stages and rings, resident or streamed: seconds, and the plan they make.

Knows what is assumed of nodes, disks and links without figures. Pure. Must not know how a ring is
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardnet.cluster.placement.figures import (
    CandidateNode,
    Exclusion,
    Links,
    LinkSpeed,
    ModelShape,
    Objective,
    Placement,
    StagePlan,
    StageSpeed,
)
from shardnet.cluster.placement.room import rooms_of
from shardnet.cluster.placement.split import Problem
from shardnet.types import LayerRange, NodeId
from shardnet.wire.payloads.data import TOKEN_BYTES

ASSUMED_LINK = LinkSpeed(round_trip_s=1e-3, bytes_per_s=12.5e6)
"""What a link is taken to be when none at all was measured: Ethernet of 100 Mbit/s."""

FETCH_STEPS = {Objective.LATENCY: 2000, Objective.THROUGHPUT: 20000}
"""A model that is fetched must pay for that within so many steps: about ten long answers; ten times
as many where a ring is made to serve many for long."""

ASSUMED_DISK_BYTES_PER_S = 500e6
"""What a disk is taken to give when none at all was measured."""
ASSUMED_MEMORY_BYTES_PER_S = 10e9
"""How fast a node is taken to read weights when no node was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a node is, measured or assumed."""

    speed: StageSpeed
    disk_bytes_per_s: float

    def stage_s(self, shape: ModelShape, layers: LayerRange, n_streamed: int = 0) -> float:
        """Seconds of a stage for one row, its hop aside.

        A stage reads its `n_streamed` layers while it computes: it takes the longer of both.
        """
        is_first, is_last = layers.start == 0, layers.end == shape.n_layers
        read_s = shape.read_bytes(n_streamed) / self.disk_bytes_per_s
        layers_s = max(len(layers) * self.speed.layer_s, read_s)
        return layers_s + is_first * self.speed.embed_s + is_last * self.speed.head_s


def paces_of(shape: ModelShape, candidates: Sequence[CandidateNode]) -> list[Pace]:
    """Return the pace of each candidate, in their order.

    A node without figures is assumed to be as slow as the slowest in each of them; where no node
    has figures, to read weights at ASSUMED_MEMORY_BYTES_PER_S. The same for its disk.
    """
    known = [candidate.speed for candidate in candidates if candidate.speed]
    slowest = (
        StageSpeed(
            layer_s=max(speed.layer_s for speed in known),
            layer_256_s=max(speed.layer_256_s for speed in known),
            embed_s=max(speed.embed_s for speed in known),
            head_s=max(speed.head_s for speed in known),
            step_s=max(speed.step_s for speed in known),
        )
        if known
        else None
    )
    disks = [candidate.disk_bytes_per_s for candidate in candidates if candidate.disk_bytes_per_s]
    slowest_disk = min(disks, default=ASSUMED_DISK_BYTES_PER_S)
    return [
        Pace(
            speed=candidate.speed
            or slowest
            or speed_by_bytes(candidate.held(shape).shape, ASSUMED_MEMORY_BYTES_PER_S),
            disk_bytes_per_s=candidate.disk_bytes_per_s or slowest_disk,
        )
        for candidate in candidates
    ]


def speed_by_bytes(shape: ModelShape, bytes_per_s: float) -> StageSpeed:
    """Return the speed of a node that reads weights at `bytes_per_s` and does nothing else.

    Of the embedding one row is read: nothing.
    """
    layer_s = (shape.layer_read_bytes or shape.layer_bytes) / bytes_per_s
    head_s = shape.head_bytes / bytes_per_s
    return StageSpeed(layer_s=layer_s, layer_256_s=layer_s, embed_s=0.0, head_s=head_s)


def measured_problem(
    shape: ModelShape, candidates: Sequence[CandidateNode], links: Links, objective: Objective
) -> Problem:
    """State the search for a ring in seconds. At least one candidate must have a speed.

    What was not measured is assumed as in `paces_of`; a link without figures is assumed to be like
    its other direction, else like the slowest link.
    """
    return _problem(
        shape,
        candidates,
        [pace.speed for pace in paces_of(shape, candidates)],
        objective,
        hop_s=ways_s(candidates, links, objective, shape),
        home_s=ways_s(candidates, links, objective),
    )


def fetching_problem(
    problem: Problem, candidates: Sequence[CandidateNode], links: Links
) -> Problem:
    """Add to each layer its share of what its node would have to fetch first (docs/adr/0039).

    Each of FETCH_STEPS steps bears as much of the fetch: a ring is only worth it that saves more.
    What a node lacks is spread over all layers, since which of them it would get is open. Returns
    the same problem where nothing lacks.
    """
    if not any(candidate.lacking for candidate in candidates):
        return problem
    slowest = _slowest(links).bytes_per_s
    shares_s = [
        candidate.fetch_bytes(LayerRange(0, problem.n_layers))
        / (candidate.fetch_bytes_per_s or slowest)
        / problem.n_layers
        / FETCH_STEPS[problem.objective]
        for candidate in candidates
    ]
    layer_s = [own_s + fetch_s for own_s, fetch_s in zip(problem.layer_s, shares_s, strict=True)]
    return replace(problem, layer_s=layer_s)


def bytes_problem(shape: ModelShape, candidates: Sequence[CandidateNode]) -> Problem:
    """State the search where no figures count: all nodes read one byte a second, hops are free."""
    free = [[0.0] * len(candidates) for _ in candidates]
    speeds = [speed_by_bytes(candidate.held(shape).shape, 1.0) for candidate in candidates]
    return _problem(shape, candidates, speeds, Objective.THROUGHPUT, hop_s=free, home_s=free)


def _problem(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    speeds: Sequence[StageSpeed],
    objective: Objective,
    *,
    hop_s: Sequence[Sequence[float]],
    home_s: Sequence[Sequence[float]],
) -> Problem:
    return Problem(
        objective=objective,
        n_layers=shape.n_layers,
        room=rooms_of([candidate.held(shape) for candidate in candidates]),
        layer_s=[speed.layer_s for speed in speeds],
        embed_s=[speed.embed_s + speed.step_s for speed in speeds],
        head_s=[speed.head_s for speed in speeds],
        hop_s=hop_s,
        home_s=home_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage that was decided on. `compute_s` is its time for one row, None if not measured."""

    candidate: CandidateNode
    layers: LayerRange
    n_streamed: int = 0
    compute_s: float | None = None


def placement_of(
    shape: ModelShape,
    stages: Sequence[PlacedStage],
    links: Links,
    cost_s: float,
    *,
    left_out: Iterable[Exclusion],
    why: str,
) -> Placement:
    """Make the result of planning, resident stages and streamed ones alike.

    `cost_s` is what the objective makes of the ring: the prediction where everything was measured.
    """
    ring = [stage.candidate for stage in stages]
    hops_s = [_hop_s(shape, links, *hop, ring[0]) for hop in hops_of(ring)] or [None]
    is_measured = all(stage.compute_s is not None for stage in stages)
    is_measured = is_measured and not unmeasured_hops(ring, links)
    return Placement(
        stages=tuple(
            _stage_plan(shape, stage, hop_s) for stage, hop_s in zip(stages, hops_s, strict=True)
        ),
        left_out=tuple(left_out),
        predicted_tok_s=1 / cost_s if is_measured else None,
        why=why,
    )


def _hop_s(
    shape: ModelShape,
    links: Links,
    sender: CandidateNode,
    receiver: CandidateNode,
    head: CandidateNode,
) -> float | None:
    """Return the seconds of a hop, the tail's to the head included; None if not measured."""
    link = measured_link(links, sender, receiver)
    if link is None:
        return None
    is_home = receiver is head
    return link.hop_s(TOKEN_BYTES if is_home else shape.hop_bytes_on(sender.node, receiver.node))


def _stage_plan(shape: ModelShape, stage: PlacedStage, hop_s: float | None) -> StagePlan:
    layers, held = stage.layers, stage.candidate.held(shape).shape
    weight_bytes, kv_bytes = held.weight_bytes(layers, stage.n_streamed), held.kv_bytes(layers)
    used_bytes = held.memory_bytes(layers, stage.n_streamed) + stage.candidate.rows_bytes
    return StagePlan(
        node=stage.candidate.node,
        layers=layers,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        working_bytes=used_bytes - weight_bytes - kv_bytes,
        compute_s=stage.compute_s,
        hop_s=hop_s,
        n_streamed=stage.n_streamed,
        fetch_bytes=stage.candidate.fetch_bytes(layers),
        fetch_s=stage.candidate.fetch_s(layers),
        asks_rows=stage.candidate.elsewhere_bytes(layers) > 0,
        rows_bytes=stage.candidate.rows_bytes,
        shards=stage.candidate.shards,
        shares=stage.candidate.shares,
    )


def measured_link(links: Links, sender: CandidateNode, receiver: CandidateNode) -> LinkSpeed | None:
    """Return what was measured of the way between two candidates, or of the other way."""
    return way_between(links, sender.node, receiver.node)


def way_between(links: Links, sender: NodeId, receiver: NodeId) -> LinkSpeed | None:
    """Return what was measured of the way between two nodes, or of the other way."""
    return links.get((sender, receiver)) or links.get((receiver, sender))


def unmeasured_nodes(ring: Sequence[CandidateNode]) -> list[CandidateNode]:
    """List the nodes of a ring that have no figures."""
    return [candidate for candidate in ring if candidate.speed is None]


def unmeasured_hops(
    ring: Sequence[CandidateNode], links: Links
) -> list[tuple[CandidateNode, CandidateNode]]:
    """List the hops of a ring that have no figures, as (sender, receiver)."""
    return [way for way in hops_of(ring) if measured_link(links, *way) is None]


def hops_of(ring: Sequence[CandidateNode]) -> list[tuple[CandidateNode, CandidateNode]]:
    """List the hops of a ring, the tail's to the head last; a ring of one has none."""
    return list(zip(ring, [*ring[1:], ring[0]], strict=True)) if len(ring) > 1 else []


def ways_s(
    candidates: Sequence[CandidateNode],
    links: Links,
    objective: Objective,
    shape: ModelShape | None = None,
) -> list[list[float]]:
    """Seconds that the objective counts from each candidate to each other.

    They are for one row's activations of the model of `shape`, None for the tail's token.
    """
    slowest = _slowest(links)

    def way_s(sender: CandidateNode, receiver: CandidateNode) -> float:
        if sender is receiver:
            return 0.0
        link = measured_link(links, sender, receiver) or slowest
        size_bytes = (
            TOKEN_BYTES if shape is None else shape.hop_bytes_on(sender.node, receiver.node)
        )
        is_latency = objective is Objective.LATENCY
        return link.hop_s(size_bytes) if is_latency else link.send_s(size_bytes)

    return [[way_s(sender, receiver) for receiver in candidates] for sender in candidates]


def _slowest(links: Links) -> LinkSpeed:
    """Return the worst figures of all links: what a link without figures is assumed to be."""
    return LinkSpeed(
        round_trip_s=max((link.round_trip_s for link in links.values()), default=0)
        or ASSUMED_LINK.round_trip_s,
        bytes_per_s=min((link.bytes_per_s for link in links.values()), default=0)
        or ASSUMED_LINK.bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedStage:
    """A stage of such a ring. `stage_s` is its time for one row, its hop aside."""

    candidate: CandidateNode
    layers: LayerRange
    n_streamed: int
    stage_s: float

    def read_s(self, shape: ModelShape) -> float | None:
        """Seconds that the disk takes for a step, None where it was not measured."""
        rate = self.candidate.disk_bytes_per_s
        return self.read_bytes(shape) / rate if rate else None

    def read_bytes(self, shape: ModelShape) -> int:
        """Bytes that the stage reads from disk at every step."""
        return self.candidate.held(shape).shape.read_bytes(self.n_streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRing:
    """A ring, and what the objective makes of it. `is_measured`: nothing in it is assumed."""

    stages: tuple[StreamedStage, ...]
    cost_s: float
    is_measured: bool

    def placed(self) -> list[PlacedStage]:
        """List the stages for a plan, with their times if everything in the ring is measured."""
        return [
            PlacedStage(
                candidate=stage.candidate,
                layers=stage.layers,
                n_streamed=stage.n_streamed,
                compute_s=stage.stage_s if self.is_measured else None,
            )
            for stage in self.stages
        ]


def streamed_ring(
    shape: ModelShape,
    ring: Sequence[CandidateNode],
    links: Links,
    objective: Objective,
    *,
    n_streamed: int | None = None,
    counts: Sequence[int] | None = None,
) -> StreamedRing | None:
    """Divide the layers over exactly these nodes. None where they have no memory for it.

    Each stage streams `n_streamed` layers, all it has if those are fewer; None is as few as make it
    fit. `counts` are the layers of each stage, None as is best.
    """
    if len(ring) > shape.n_layers:
        return None
    paces = paces_of(shape, ring)

    def stage(rank: int, count: int) -> StreamedStage | None:
        start = 0 if rank == 0 else shape.n_layers - count if rank == len(ring) - 1 else 1
        layers = LayerRange(start, start + count)
        return _stage(shape, ring[rank], paces[rank], layers, n_streamed)

    counts = _divided(shape, ring, objective, stage) if counts is None else counts
    if counts is None:
        return None
    stages, start = [], 0
    for rank, count in enumerate(counts):
        layers = LayerRange(start, start + count)
        made = _stage(shape, ring[rank], paces[rank], layers, n_streamed)
        if made is None:
            return None
        stages.append(made)
        start += count
    ways = ways_s(ring, links, objective, shape)
    home = ways_s(ring, links, objective)
    last = len(ring) - 1
    hops = [home[rank][0] if rank == last else ways[rank][rank + 1] for rank in range(len(ring))]
    times = [made.stage_s + hop_s for made, hop_s in zip(stages, hops, strict=True)]
    times[0] += paces[0].speed.step_s
    return StreamedRing(
        stages=tuple(stages),
        cost_s=sum(times) if objective is Objective.LATENCY else max(times),
        is_measured=all(
            made.candidate.speed is not None
            and (not made.read_bytes(shape) or made.candidate.disk_bytes_per_s)
            for made in stages
        ),
    )


def best_streamed_ring(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    links: Links,
    objective: Objective,
    *,
    n_streamed: int | None = None,
) -> StreamedRing | None:
    """Choose among each node alone, and the roomiest nodes together, the asked one first.

    Not every ring is tried: where layers come from disk, which nodes lend their memory counts far
    more than their order.
    """
    rings = (
        streamed_ring(shape, ring, links, objective, n_streamed=n_streamed)
        for ring in _rings(candidates)
    )
    found = [ring for ring in rings if ring is not None]
    return min(found, key=lambda ring: ring.cost_s, default=None)


def _rings(candidates: Sequence[CandidateNode]) -> Iterator[list[CandidateNode]]:
    asked, *others = candidates
    yield from ([candidate] for candidate in candidates)
    by_memory = [asked, *sorted(others, key=lambda c: (-c.memory_bytes, c.node))]
    yield from (by_memory[:length] for length in range(2, len(by_memory) + 1))


def _stage(
    shape: ModelShape, candidate: CandidateNode, pace: Pace, layers: LayerRange, n_asked: int | None
) -> StreamedStage | None:
    """Make a stage; None where it does not fit, or layers have to be converted for its node."""
    held = candidate.held(shape).shape
    wanted: Sequence[int] = (
        range(len(layers) + 1) if n_asked is None else (min(n_asked, len(layers)),)
    )
    if held.streaming is None:
        wanted = [n for n in wanted if n == 0]
    fitting = (n for n in wanted if held.memory_bytes(layers, n) <= candidate.memory_bytes)
    n_streamed = next(fitting, None)
    if n_streamed is None:
        return None
    return StreamedStage(
        candidate=candidate,
        layers=layers,
        n_streamed=n_streamed,
        stage_s=pace.stage_s(held, layers, n_streamed),
    )


def _divided(
    shape: ModelShape,
    ring: Sequence[CandidateNode],
    objective: Objective,
    stage: Callable[[int, int], StreamedStage | None],
) -> list[int] | None:
    """One layer each, then every further one where it costs least. None where they do not fit."""
    if len(ring) == 1:
        return [shape.n_layers]
    counts = [1] * len(ring)
    now = [stage(rank, 1) for rank in range(len(ring))]
    if not all(now):
        return None
    following = [stage(rank, 2) for rank in range(len(ring))]
    for _ in range(shape.n_layers - len(ring)):
        best, best_s = None, 0.0
        for rank, (have, more) in enumerate(zip(now, following, strict=True)):
            if have is None or more is None:
                continue
            is_sum = objective is Objective.LATENCY
            cost_s = more.stage_s - have.stage_s if is_sum else more.stage_s
            if best is None or cost_s < best_s:
                best, best_s = rank, cost_s
        if best is None:
            return None
        counts[best] += 1
        now[best] = following[best]
        following[best] = stage(best, counts[best] + 1)
    return counts
