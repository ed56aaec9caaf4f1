"""Placement: which node runs which layers. Pure.

Knows the two ways to ask for a plan: the best of some nodes, or exactly these. The figures that go
in and come out are in placement/figures.py. Must not know how those figures were found, nor time,
sockets or torch.

Where nodes have measured themselves, the ring that the objective likes best is searched. Where none
has, a stage's time is taken to be the bytes it reads per step (design decision 10), and a ring is
never longer than it must be: every hop costs time that one sequence cannot win back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardnet.cluster.placement import words
from shardnet.cluster.placement.estimate import (
    PlacedStage,
    best_streamed_ring,
    bytes_problem,
    fetching_problem,
    measured_problem,
    paces_of,
    placement_of,
    streamed_ring,
    unmeasured_nodes,
)
from shardnet.cluster.placement.figures import (
    NO_LINKS,
    CandidateNode,
    Exclusion,
    Links,
    ModelShape,
    Objective,
    Placement,
)
from shardnet.cluster.placement.room import shortest_ring
from shardnet.cluster.placement.split import RingSplit, even_split, find_ring, given_split
from shardnet.errors import PlanError
from shardnet.types import LayerRange


def place(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    links: Links = NO_LINKS,
    objective: Objective = Objective.LATENCY,
) -> Placement:
    """Choose nodes, their order and the layers of each, so that `objective` is best met.

    The first candidate is the node that was asked: among equals it is the head. A ring that has to
    fetch weights first must pay for that within FETCH_STEPS steps. Without any measured speed the
    shortest ring that fits is taken, its layers divided by bytes.

    Raises PlanError when the model does not fit, with what lacks where and the ways out.
    """
    if all(candidate.speed is None for candidate in candidates):
        return _place_by_bytes(shape, candidates)
    problem = measured_problem(shape, candidates, links, objective)
    with_fetch = fetching_problem(problem, candidates, links)
    found = find_ring(with_fetch)
    if found is None:
        raise PlanError(words.shortfall_words(shape, candidates))
    ring = given_split(problem, found.nodes, found.counts)
    left_out = tuple(
        Exclusion(node=c.node, why=words.exclusion_words(shape, candidates, problem, ring, index))
        for index, c in enumerate(candidates)
        if index not in ring.nodes
    )
    why = words.choice_words(candidates, problem, ring)
    if with_fetch is not problem:
        why += words.fetch_words(candidates, problem, ring, find_ring(problem))
    return _resident(shape, candidates, ring, links, left_out=left_out, why=why)


def place_exactly(
    shape: ModelShape,
    ring: Sequence[CandidateNode],
    layers: Sequence[LayerRange] | None = None,
    links: Links = NO_LINKS,
    objective: Objective = Objective.LATENCY,
) -> Placement:
    """Place the model on exactly these nodes in this order, the first being the head.

    `layers` fixes the ranges. Without it they are divided so that the slowest stage is as fast as
    can be: by measured time if every node has its speed, else by bytes read per step. Who names
    nodes wants them all at work, so `objective` only says what is predicted.

    Raises PlanError when there are more nodes than layers, the ranges do not match nodes or model,
    or a stage does not fit its node; the message has the figures and a way out.
    """
    if len(ring) > shape.n_layers:
        raise PlanError(
            f"{len(ring)} nodes were named and the model has {shape.n_layers} layers",
            remedy="name at most one node per layer",
        )
    is_measured = not unmeasured_nodes(ring)
    if is_measured:
        problem = measured_problem(shape, ring, links, objective)
    else:
        problem = bytes_problem(shape, ring)
    nodes = range(len(ring))
    if layers is not None:
        _check_layers(shape, ring, layers)
        split = given_split(problem, nodes, [len(part) for part in layers])
        why = "the nodes and layers that were named"
    else:
        even = even_split(problem, nodes)
        if even is None:
            raise PlanError(words.ring_shortfall_words(shape, ring))
        split = even
        by = "measured time" if is_measured else "bytes read per step"
        why = f"the nodes that were named, layers divided by {by}"
    if is_measured:
        why += f": {words.named_words(ring, problem, split)}"
    return _resident(shape, ring, split, links, left_out=(), why=why)


def place_streaming(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    layers: Sequence[LayerRange] | None = None,
    links: Links = NO_LINKS,
    objective: Objective = Objective.LATENCY,
    *,
    exactly: bool,
    n_streamed: int | None,
) -> Placement | None:
    """Place a model of which stages stream layers from disk; see placement/streams.py.

    With `exactly` on all these nodes in this order, `layers` as in place_exactly; else on some of
    them. Each stage streams `n_streamed` layers, None for as few as make it fit. Returns None where
    they have no memory for it. Raises PlanError for `layers` that match neither nodes nor model.
    """
    if layers is not None:
        _check_ranges(shape, candidates, layers)
    if exactly:
        counts = None if layers is None else [len(part) for part in layers]
        ring = streamed_ring(
            shape, candidates, links, objective, n_streamed=n_streamed, counts=counts
        )
    else:
        ring = best_streamed_ring(shape, candidates, links, objective, n_streamed=n_streamed)
    if ring is None:
        return None
    chosen = [stage.candidate for stage in ring.stages]
    left_out = [
        Exclusion(node=candidate.node, why="no faster with it, as far as is known")
        for candidate in candidates
        if candidate not in chosen
    ]
    why = words.streaming_words(shape, ring, was_asked=n_streamed is not None)
    if ring.is_measured:
        why += words.assumption_words(chosen, links)
    return placement_of(shape, ring.placed(), links, ring.cost_s, left_out=left_out, why=why)


def _place_by_bytes(shape: ModelShape, candidates: Sequence[CandidateNode]) -> Placement:
    """Take the shortest ring; the asked node first, the others by memory, largest first."""
    asked, *others = candidates
    by_memory = [asked, *sorted(others, key=lambda c: (-c.memory_bytes, c.node))]
    problem = bytes_problem(shape, by_memory)
    nodes = shortest_ring(problem.room, shape.n_layers)
    ring = even_split(problem, nodes) if nodes else None
    if ring is None:
        raise PlanError(words.shortfall_words(shape, candidates))
    n_stages = len(ring.nodes)
    if n_stages == 1:
        why = f"the whole model fits on {by_memory[ring.nodes[0]].name}; a split would add trips"
        reason = "not needed: the model fits on one node, and every hop costs time"
    else:
        why = f"no {n_stages - 1} of these nodes hold the model; {n_stages} do"
        reason = f"not needed: {n_stages} nodes hold the model, and every hop costs time"
    left_out = tuple(
        Exclusion(node=candidate.node, why=reason)
        for index, candidate in enumerate(by_memory)
        if index not in ring.nodes
    )
    why += " (nothing is measured yet)"
    return _resident(shape, by_memory, ring, NO_LINKS, left_out=left_out, why=why)


def _resident(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    ring: RingSplit,
    links: Links,
    *,
    left_out: Iterable[Exclusion],
    why: str,
) -> Placement:
    """Make the plan of a ring without streamed layers."""
    chosen = [candidates[node] for node in ring.nodes]
    if not all(candidate.speed is None for candidate in candidates):
        why += words.assumption_words(chosen, links)
    stages, start = [], 0
    for candidate, pace, count in zip(chosen, paces_of(shape, chosen), ring.counts, strict=True):
        layers = LayerRange(start, start + count)
        held = candidate.held(shape).shape
        compute_s = pace.stage_s(held, layers) if candidate.speed else None
        stages.append(PlacedStage(candidate=candidate, layers=layers, compute_s=compute_s))
        start = layers.end
    return placement_of(shape, stages, links, ring.cost_s, left_out=left_out, why=why)


def _check_layers(
    shape: ModelShape, ring: Sequence[CandidateNode], layers: Sequence[LayerRange]
) -> None:
    """Raise PlanError unless the ranges are one per node, join from 0 to the end, and fit."""
    _check_ranges(shape, ring, layers)
    for candidate, part in zip(ring, layers, strict=True):
        needed = candidate.held(shape).shape.memory_bytes(part)
        if needed > candidate.memory_bytes:
            raise PlanError(
                f"node {candidate.name} lacks {words.size(needed - candidate.memory_bytes)} for "
                f"{part.words} (needs {words.size(needed)})",
                remedy="give it fewer layers or a smaller --context",
            )


def _check_ranges(
    shape: ModelShape, ring: Sequence[CandidateNode], layers: Sequence[LayerRange]
) -> None:
    """Raise PlanError unless the ranges are one per node and join from 0 to the end."""
    if len(layers) != len(ring):
        raise PlanError(
            f"--layers names {len(layers)} ranges for {len(ring)} nodes",
            remedy="give one range per node",
        )
    expected = 0
    for part in layers:
        if part.start != expected:
            fault = "leaves a gap" if part.start > expected else "overlaps"
            raise PlanError(
                f"--layers {fault}: range {part} should start at {expected}",
                remedy="let each range start where the one before ends",
            )
        expected = part.end
    if expected != shape.n_layers:
        raise PlanError(
            f"--layers ends at {expected} and the model has {shape.n_layers} layers",
            remedy=f"end the last range at {shape.n_layers}",
        )
