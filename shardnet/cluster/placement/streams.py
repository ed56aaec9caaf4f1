"""Choose rings whose stages stream layers from disk: how many each, and how layers are divided.

Knows bytes and times alone; times are placement/estimate.py's. Pure. Must not know words, nor when
streaming is wanted. Layers are assigned one by one to the stage on which the next one costs least,
so memory is filled first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardnet.cluster.placement.estimate import Pace, PlacedStage, paces_of, ways_s
from shardnet.cluster.placement.figures import CandidateNode, Links, ModelShape, Objective
from shardnet.types import LayerRange


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
