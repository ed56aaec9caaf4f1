"""Divide nodes into several rings, each of which holds the whole model, behind one head. Pure.

Knows what all rings together promise, as search.py finds the best of each set of nodes. Must not
know who routes requests to them.

With many sequences in flight a ring gives as many tokens as its slowest stage computes. Rings
beside each other send each other nothing, and one that is lost leaves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from shardnet.cluster.placement.estimate import fetching_problem, measured_problem
from shardnet.cluster.placement.figures import CandidateNode, Links, ModelShape, Objective
from shardnet.cluster.placement.search import find_ring
from shardnet.cluster.placement.split import Problem, RingSplit
from shardnet.cluster.placement.words import rings_words

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
