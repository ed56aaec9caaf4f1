"""Rings of more than a node a stage: stages that span several, and several rings behind a head.

A row passes through such a stage as if it were one node that computes a part of the time and waits
for the others' parts at every gather.

With many sequences in flight a ring gives as many tokens as its slowest stage computes. Rings
beside each other send each other nothing, and one that is lost leaves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Final

from shardnet.cluster.placement.estimate import (
    ASSUMED_LINK,
    fetching_problem,
    measured_link,
    measured_problem,
    paces_of,
)
from shardnet.cluster.placement.figures import (
    MARGIN,
    CandidateNode,
    Exclusion,
    Gathers,
    Links,
    LinkSpeed,
    ModelShape,
    Objective,
    Placement,
    StageSpeed,
)
from shardnet.cluster.placement.placement import place, place_exactly
from shardnet.cluster.placement.split import Problem, RingSplit, find_ring
from shardnet.cluster.placement.words import LISTED, ms_words, rings_words
from shardnet.errors import PlanError
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.types import LayerRange, NodeId

FURTHER_GAIN = 0.03
"""What each further node must make a token faster by: with it the stage is lost, too."""
ALIKE = 0.1
"""Nodes whose times differ by no more have equal parts: they may take as long tomorrow."""
PARTS = 1000
"""All shares together, about."""
_ROUNDS = 12
"""How often shares are made smaller where memory lacks: heads are not cut as finely."""
SPAN_GAIN = 0.10
"""What it must at least give more of one answer's tokens: a stage over two nodes is lost with
either."""
_PAIRS = 2
"""So many pairs of nodes are looked at in rings with others: each takes a search."""


def gather_s(link: LinkSpeed, n_shards: int, n_bytes: int, n_rows: int = 1) -> float:
    """Return the seconds of a gather of `n_bytes` per row in all parts, over links like `link`.

    As was measured; else a whole round trip, which passes two loops, and the time that a node takes
    to send its part to each of the others.
    """
    sent = n_rows * n_bytes * (n_shards - 1) // n_shards
    if link.gather_s is None or link.gather_bytes_per_s is None:
        return link.round_trip_s + link.send_s(sent)
    return link.gather_s + sent / link.gather_bytes_per_s


def spanning(
    shape: ModelShape, nodes: Sequence[CandidateNode], links: Links, n_stages: int = 1
) -> CandidateNode:
    """Return what one of `n_stages` that spans `nodes` is to the planner; the first is the ring's
    member.

    Each node has a share by its speed and its memory, so that all take about as long. Links that
    were not measured are assumed to be like the slowest one that was. Raises PlanError for a model
    that cannot be cut so.
    """
    gathers = shape.gathers
    if gathers is None:
        raise PlanError(
            "a stage of this model cannot span several nodes", remedy="use --nodes-per-stage 1"
        )
    link, held = _slowest(nodes, links), nodes[0].held(shape)
    has_speed = all(node.speed is not None for node in nodes)
    weights = _shares(shape, nodes, n_stages)
    joined = held.shared_by(weights, [node.memory_bytes for node in nodes])
    return replace(
        nodes[0],
        name="+".join(node.name for node in nodes[:LISTED]),
        memory_bytes=joined.memory_bytes,
        shape=joined.shape,
        speed=_speed(shape, gathers, nodes, weights, link) if has_speed else None,
        lacking=max((node.lacking for node in nodes), key=sum),
        rows_bytes=max(node.rows_bytes for node in nodes),
        members=tuple(nodes),
        shards=tuple(node.node for node in nodes[1:]),
        shares=weights if len(set(weights)) > 1 else (),
    )


def _shares(shape: ModelShape, nodes: Sequence[CandidateNode], n_stages: int) -> tuple[int, ...]:
    """Say what of a layer each node has: by its speed where all were measured, and no more than it
    has memory for; all 1 for equal parts.
    """
    rates = [1.0] * len(nodes)
    if all(node.speed is not None for node in nodes):
        rates = [1 / pace.speed.layer_s for pace in paces_of(shape, nodes)]
    if max(rates) < min(rates) * (1 + ALIKE):
        rates = [1.0] * len(nodes)
    held, weights, most = nodes[0].held(shape), (1,) * len(nodes), [1.0] * len(nodes)
    weight_bytes, kv_bytes = (
        n_bytes(shape.whole) * (1 + MARGIN) / n_stages
        for n_bytes in (held.shape.weight_bytes, held.shape.kv_bytes)
    )
    for _ in range(_ROUNDS):
        shares = _divided(rates, most)
        if len({*shares}) > 1:
            weights = tuple(max(1, round(PARTS * share / sum(shares))) for share in shares)
        rooms = [node.memory_bytes - held.working_bytes for node in nodes]
        over = [
            float(own * weight_bytes + kv * kv_bytes - room) / weight_bytes
            for (own, kv), room in zip(held.parts(weights), rooms, strict=True)
        ]
        if max(over) <= 0:
            break
        most = [
            max(share - more - 1 / PARTS, 1 / PARTS) if more > 0 else limit
            for share, more, limit in zip(shares, over, most, strict=True)
        ]
    return weights


def _divided(rates: Sequence[float], most: Sequence[float]) -> list[float]:
    """Divide 1 by `rates`, but give each `most` at most; less than 1 in all where that is full."""
    found, left, free = [*most], 1.0, [*range(len(rates))]
    while free:
        unit = left / sum(rates[node] for node in free)
        full = [node for node in free if unit * rates[node] > most[node]]
        if not full:
            for node in free:
                found[node] = unit * rates[node]
            break
        left -= sum(most[node] for node in full)
        free = [node for node in free if node not in full]
    return found


def grouped(
    shape: ModelShape, nodes: Sequence[CandidateNode], links: Links, n_shards: int
) -> list[CandidateNode]:
    """Join every `n_shards` consecutive nodes to one that a stage spans; those that are left over
    have a stage of their own.

    Raises PlanError where there are fewer nodes, and as `spanning`.
    """
    if len(nodes) < n_shards:
        raise PlanError(
            f"--nodes-per-stage {n_shards}: {len(nodes)} nodes make no stage of {n_shards}",
            remedy=f"name {n_shards} nodes at least",
        )
    groups = [nodes[start : start + n_shards] for start in range(0, len(nodes), n_shards)]
    return [
        spanning(shape, group, links, len(groups)) if len(group) > 1 else group[0]
        for group in groups
    ]


def place_span(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    links: Links,
    n_shards: int,
    able: Collection[NodeId],
) -> Placement:
    """Place the model on one stage that spans the best `n_shards` of the nodes `able`, as asked.

    Raises PlanError where there are fewer, or the model does not fit them.
    """
    usable = [candidate for candidate in candidates if candidate.node in able]
    if len(usable) < n_shards:
        raise PlanError(
            f"--nodes-per-stage {n_shards}: only {len(usable)} nodes can share a stage",
            remedy=f"start {n_shards - len(usable)} more, or lower it",
        )
    groups = _groups(usable, n_shards) or [usable[:n_shards]]
    placed = [(found, group) for group in groups if (found := _placed(shape, group, links))]
    if placed:
        best, members = max(placed, key=lambda found: found[0].predicted_tok_s or 0.0)
    else:
        members = groups[0]
        best = place_exactly(shape, [spanning(shape, members, links)])
    return replace(
        best,
        left_out=_left_out(candidates, members, f"{n_shards} nodes were asked for"),
        why=f"each layer is cut over {_names(members)}, as was asked; "
        f"{_gather_words(shape, members, links, shape.whole)}",
    )


def weigh_spans(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    links: Links,
    objective: Objective,
    best: Placement,
    able: Collection[NodeId],
) -> Placement:
    """Return the placement with a stage that spans nodes if that pays, else `best`; both say why.

    It is the only stage, or one that spans two nodes in a ring with others. Only nodes that are
    `able` to share one do. It must have been measured, as must `best`, while its nodes were not
    busy, and give SPAN_GAIN more tokens of one sequence. Throughput is never better for it: the
    ring's stages work side by side as it is.
    """
    if objective is not Objective.LATENCY or best.predicted_tok_s is None or not shape.gathers:
        return best
    spans = _spans(shape, candidates, links, best, able)
    if not spans:
        return best
    span, members = max(
        spans,
        key=lambda found: (
            (found[0].predicted_tok_s or 0.0)
            * (1 - FURTHER_GAIN) ** sum(1 + len(stage.shards) for stage in found[0].stages)
        ),
    )
    rate = span.predicted_tok_s or 0.0
    layers = next(stage.layers for stage in span.stages if stage.shards)
    alone, told = _other_ways(shape, candidates, members, links, best)
    what = "each layer" if len(span.stages) == 1 else layers.words
    figure = f"{what} over {_names(members)} {_rate(rate)} tokens/s"
    words = _gather_words(shape, members, links, layers)
    if alone is not None and alone.predicted_tok_s is not None:
        words += f", one node alone takes {ms_words(1 / alone.predicted_tok_s)}"
    gains = rate >= best.predicted_tok_s * (1 + SPAN_GAIN)
    is_steady = all(node.speed and node.speed.is_steady for node in members)
    if gains and not is_steady:
        words += "; some of them were busy when they were measured, which makes gathers look cheap"
    if not (gains and is_steady):
        others = [] if len(best.stages) == 1 else told  # which what is said of `best` has
        return replace(best, why=f"{best.why}; {', '.join([*others, figure])}: {words}")
    if len(span.stages) == 1:
        why_not = "each layer is cut over the nodes that gain by it"
        left_out = _left_out(candidates, members, why_not)
    else:
        inside = {node for stage in span.stages for node in (stage.node, *stage.shards)}
        named = {out.node: out for out in (*best.left_out, *span.left_out)}
        left_out = tuple(out for node, out in named.items() if node not in inside)
    return replace(span, left_out=left_out, why=f"{', '.join([*told, figure])}; {words}")


def _spans(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    links: Links,
    best: Placement,
    able: Collection[NodeId],
) -> list[tuple[Placement, Sequence[CandidateNode]]]:
    """Place the model on stages that span nodes: alone, or with other nodes of the `best` ring.

    At most two groups of each size, LISTED nodes in pairs, and _PAIRS of these with others.
    """
    usable = [candidate for candidate in candidates if candidate.node in able]
    found: list[tuple[Placement, Sequence[CandidateNode]]] = [
        (placed, members)
        for n_shards in range(2, min(MAX_SHARDS, len(usable)) + 1)
        for members in _groups(usable, n_shards)
        if (placed := _placed(shape, members, links)) is not None
    ]
    in_ring = {stage.node for stage in best.stages}
    for members in _groups(usable, 2)[:_PAIRS]:
        ring = [node for node in candidates if node.node in in_ring or node in members]
        if (placed := _placed_beside(shape, members, ring, links)) is not None:
            found.append((placed, members))
    return found


def _other_ways(
    shape: ModelShape,
    candidates: Sequence[CandidateNode],
    members: Sequence[CandidateNode],
    links: Links,
    best: Placement,
) -> tuple[Placement | None, list[str]]:
    """Say how fast the fastest node is alone, and several by layers, where each is possible.

    By layers are `members` where the `best` plan is one node. Returns the plan of one node, too.
    """
    alone: Placement | None = best
    by_layers = _placed_on(shape, members, links)
    if len(best.stages) > 1:
        fastest = sorted(_measured(candidates), key=_layer_s)[:LISTED]
        each = (_placed_on(shape, [node], links) for node in fastest)
        alone, by_layers = next(filter(None, each), None), best
    told = []
    if alone is not None and alone.predicted_tok_s is not None:
        name = next(c.name for c in candidates if c.node == alone.stages[0].node)
        told.append(f"alone on {name} {_rate(alone.predicted_tok_s)}")
    if by_layers is not None and by_layers.predicted_tok_s is not None:
        told.append(f"by layers {_rate(by_layers.predicted_tok_s)}")
    return alone, told


def _placed_on(shape: ModelShape, nodes: Sequence[CandidateNode], links: Links) -> Placement | None:
    """Place the model on just these nodes, each with a stage; None where it does not fit."""
    try:
        return place_exactly(shape, nodes, links=links)
    except PlanError:
        return None


def _rate(tok_s: float) -> str:
    return f"{tok_s:.1f}" if tok_s >= 1 else f"{tok_s:.2g}"


def _layer_s(candidate: CandidateNode) -> float:
    return candidate.speed.layer_s if candidate.speed else 0.0


def _measured(candidates: Sequence[CandidateNode]) -> list[CandidateNode]:
    """Return the nodes that were measured and have the model."""
    return [c for c in candidates if c.speed is not None and not any(c.lacking)]


def _left_out(
    candidates: Sequence[CandidateNode], members: Sequence[CandidateNode], why: str
) -> tuple[Exclusion, ...]:
    inside = {member.node for member in members}
    return tuple(Exclusion(node=c.node, why=why) for c in candidates if c.node not in inside)


def _groups(candidates: Sequence[CandidateNode], n: int) -> list[list[CandidateNode]]:
    """Return groups of `n` measured nodes: the fastest, and each with the one that was asked."""
    able = _measured(candidates)
    if len(able) < n:
        return []
    by_speed = sorted(able, key=_layer_s)
    chosen = by_speed[:n]
    asked = candidates[0]
    groups = [chosen]
    if asked in able and asked not in chosen:
        groups.append([asked, *chosen[:-1]])
    if n == 2:
        pairs = map(list, combinations(by_speed[:LISTED], 2))
        groups += [pair for pair in pairs if pair not in groups]
    return [sorted(group, key=lambda c: c is not asked) for group in groups]


def _placed(shape: ModelShape, members: Sequence[CandidateNode], links: Links) -> Placement | None:
    """Place the model on one stage that spans `members`; None where it does not fit or a link
    between them was not measured."""
    if any(measured_link(links, *pair) is None for pair in combinations(members, 2)):
        return None
    return _placed_on(shape, [spanning(shape, members, links)], links)


def _placed_beside(
    shape: ModelShape,
    members: Sequence[CandidateNode],
    candidates: Sequence[CandidateNode],
    links: Links,
) -> Placement | None:
    """Place the model on a ring of which one stage spans `members`; None if none of several does,
    or a link between them was not measured."""
    others = [candidate for candidate in candidates if candidate not in members]
    if not others or any(measured_link(links, *pair) is None for pair in combinations(members, 2)):
        return None
    joined = spanning(shape, members, links, 2)
    asked_first = [joined, *others] if candidates[0] in members else [*others, joined]
    try:
        placed = place(shape, asked_first, links)
    except PlanError:
        return None
    has_span = len(placed.stages) > 1 and any(stage.shards for stage in placed.stages)
    return placed if has_span and placed.predicted_tok_s is not None else None


def _speed(
    shape: ModelShape,
    gathers: Gathers,
    nodes: Sequence[CandidateNode],
    weights: Sequence[int],
    link: LinkSpeed,
) -> StageSpeed:
    """Return the speed of a stage that spans `nodes`, whose links are like `link`.

    It takes as long as the one that takes longest for its share, and as the gathers; a step of a
    head begins on the others a hop later. A small LM head is whole on each.
    """
    n_shards = len(nodes)
    speeds = [pace.speed for pace in paces_of(shape, nodes)]
    shares = [weight / sum(weights) for weight in weights]
    largest, heads_s = n_shards * max(shares), [s.head_s for s in speeds]

    def shared_s(times_s: Sequence[float]) -> float:
        return max(time_s * share for time_s, share in zip(times_s, shares, strict=True))

    def taken_s(n_bytes: int, n_rows: int) -> float:
        return gather_s(link, n_shards, round(largest * n_bytes), n_rows)

    computing = StageSpeed(
        layer_s=shared_s([s.layer_s for s in speeds]),
        layer_256_s=shared_s([s.layer_256_s for s in speeds]),
        embed_s=max(s.embed_s for s in speeds),
        head_s=shared_s(heads_s) if gathers.head_bytes else max(heads_s),
        step_s=speeds[0].step_s + link.round_trip_s / 2,
        is_steady=all(s.is_steady for s in speeds),
    )
    return gathers.added_to(computing, taken_s, n_shards)


def _slowest(nodes: Sequence[CandidateNode], links: Links) -> LinkSpeed:
    """Return the worst figures of the links between `nodes`, or of all links.

    Those of gathers count where all of them were measured.
    """
    own = [measured_link(links, *pair) for pair in combinations(nodes, 2)]
    known = [link for link in own if link is not None] or [*links.values()] or [ASSUMED_LINK]
    gathers = [link.gather_s for link in known if link.gather_s is not None]
    rates = [link.gather_bytes_per_s for link in known if link.gather_bytes_per_s is not None]
    has_gathers = len(known) == len(gathers) == len(rates)
    return LinkSpeed(
        round_trip_s=max(link.round_trip_s for link in known),
        bytes_per_s=min(link.bytes_per_s for link in known),
        is_steady=all(link.is_steady for link in known),
        gather_s=max(gathers) if has_gathers else None,
        gather_bytes_per_s=min(rates) if has_gathers else None,
    )


def _gather_words(
    shape: ModelShape, members: Sequence[CandidateNode], links: Links, layers: LayerRange
) -> str:
    """Say how often a token waits for the others' parts, and how long in all."""
    gathers = shape.gathers
    assert gathers is not None
    link, n_shards = _slowest(members, links), len(members)
    sizes = gathers.of(layers, n_shards)
    total_s = sum(gather_s(link, n_shards, n_bytes) for n_bytes in sizes)
    words = f"its {len(sizes)} gathers take {ms_words(total_s)} per token"
    each, rate = f"{ms_words(link.round_trip_s)} there and back", link.bytes_per_s
    if link.gather_s is not None and link.gather_bytes_per_s is not None:
        each, rate = f"{ms_words(link.gather_s)} each", link.gather_bytes_per_s
    return f"{words} ({each}, {rate / 1e6:.6g} MB/s)"


def _names(nodes: Sequence[CandidateNode]) -> str:
    return "+".join(node.name for node in nodes[:LISTED])


MOST_EXACT: Final = 7
"""Of so many nodes every division is looked at; of more the nodes that hold the model alone are
rings, and the others form the shortest ones that do."""
AS_GOOD: Final = 0.95
"""Rings are chosen over a single one that promises no more than this share allows: a plan counts of
a hop only what its sender does for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The nodes of each ring in their order, the best ring first, and why there are several."""

    rings: tuple[tuple[CandidateNode, ...], ...]
    why: str


def divide(shape: ModelShape, candidates: Sequence[CandidateNode], links: Links) -> Division | None:
    """Divide nodes into the rings that promise most tokens together; None if that is one ring.

    Each ring has room for one whole context at least. None too where no node has figures: nothing
    is known then of what several rings would gain.
    """
    if len(candidates) < 2 or all(candidate.speed is None for candidate in candidates):
        return None
    plain = measured_problem(shape, candidates, links, Objective.THROUGHPUT)
    problem = fetching_problem(plain, candidates, links)
    one = find_ring(problem)
    if one is None:
        return None
    found = cache(lambda mask: _ring_of(problem, mask))
    n_nodes = len(candidates)
    masks = _best(n_nodes, found) if n_nodes <= MOST_EXACT else _short(n_nodes, found)
    rings = sorted((ring for mask in masks if (ring := found(mask))), key=lambda r: r.cost_s)
    if len(rings) < 2 or _tok_s(rings) < AS_GOOD / one.cost_s:
        return None
    return Division(
        rings=tuple(tuple(candidates[node] for node in ring.nodes) for ring in rings),
        why=rings_words(candidates, problem, rings, one),
    )


Found = Callable[[int], RingSplit | None]
"""The best ring of a set of nodes, given as a mask."""


def _best(n_nodes: int, found: Found) -> tuple[int, ...]:
    """Return the sets of nodes that promise most together. Exact; a node may be in none."""

    @cache
    def best(free: int) -> tuple[float, tuple[int, ...]]:
        if not free:
            return 0.0, ()
        lowest = free & -free
        others = free ^ lowest
        choice, part = best(others), others
        while True:
            ring = found(part | lowest)
            if ring is not None:
                rest_tok_s, rest = best(others ^ part)
                tok_s = rest_tok_s + 1 / ring.cost_s
                if tok_s > choice[0]:
                    choice = (tok_s, (part | lowest, *rest))
            if not part:
                return choice
            part = (part - 1) & others

    return best((1 << n_nodes) - 1)[1]


def _short(n_nodes: int, found: Found) -> tuple[int, ...]:
    """Return the nodes that hold the model alone, and short rings of the others."""
    alone = [1 << node for node in range(n_nodes) if found(1 << node) is not None]
    rings, free = [*alone], [n for n in range(n_nodes) if 1 << n not in alone]
    while (ring := found(sum(1 << node for node in free))) is not None:
        nodes = [*ring.nodes]
        for node in ring.nodes:  # without each that is not needed
            mask = sum(1 << other for other in nodes if other != node)
            if mask and found(mask) is not None:
                nodes.remove(node)
        rings.append(sum(1 << node for node in nodes))
        free = [node for node in free if node not in nodes]
    return tuple(rings)


def _ring_of(problem: Problem, mask: int) -> RingSplit | None:
    """Return the best ring of some of the nodes, None if they do not hold the model."""
    nodes = [node for node in range(problem.n_nodes) if mask >> node & 1]
    if not nodes:
        return None
    ring = find_ring(
        replace(
            problem,
            room=[problem.room[node] for node in nodes],
            layer_s=[problem.layer_s[node] for node in nodes],
            embed_s=[problem.embed_s[node] for node in nodes],
            head_s=[problem.head_s[node] for node in nodes],
            hop_s=[[problem.hop_s[a][b] for b in nodes] for a in nodes],
            home_s=[[problem.home_s[a][b] for b in nodes] for a in nodes],
        )
    )
    return (
        None if ring is None else replace(ring, nodes=tuple(nodes[place] for place in ring.nodes))
    )


def _tok_s(rings: Sequence[RingSplit]) -> float:
    return sum(1 / ring.cost_s for ring in rings)
