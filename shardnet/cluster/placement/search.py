"""Find the nodes of the best ring and their order: exact for small clusters, a beam above.

Knows nodes as indices, the cost of rings (placement/split.py) and the bounds of unfinished ones
(placement/rules.py). Pure. Must not know models, names or words.

Rings grow stage by stage from every head at once. Of all the paths from one head over one set of
nodes to one last node only the best can be part of the best ring (Held and Karp 1962, "A dynamic
programming approach to sequencing problems"), and a path that even at best cannot beat the best
ring so far is dropped. Up to 8 nodes nothing else is dropped, and the result is exact.
Above that at most `width_for` paths of each length are kept, those that promise most: a beam. It is
exact too whenever fewer are left. It starts from the best single node, the best pair and the
shortest ring, each grown while another node helps, and so is never worse than these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import permutations

from shardnet.cluster.placement.room import shortest_ring
from shardnet.cluster.placement.rules import Rules, rules_for
from shardnet.cluster.placement.split import (
    Problem,
    RingSplit,
    best_split,
    cost_of,
)

EXACT_WIDTH = 1120
"""The most paths of one length over 8 nodes: 8 heads, 4 of 7 nodes on the way, 4 last ones."""

SAME = 1e-9
"""Rings whose costs differ by less than this share are equals: the one found first stays."""

_Key = tuple[int, int, int]
"""Head, the set of nodes as a mask, last node."""
_Paths = dict[_Key, tuple[float, tuple[int, ...]]]


def width_for(n_nodes: int) -> int:
    """Return how many paths of one length are kept: fewer the more steps each of them has."""
    return min(EXACT_WIDTH, EXACT_WIDTH * 12**2 // n_nodes**2)


def find_ring(problem: Problem, width: int | None = None) -> RingSplit | None:
    """Return the best ring found, None only when the model fits none.

    `width` is how many paths of one length are kept. The order of the nodes is an order of
    preference among equals.
    """
    best = _good_ring(problem)
    if best is None:
        return None
    width = width or width_for(problem.n_nodes)
    for kept in (width // 10, width):
        while better := _sweep(problem, best, kept):
            best = better
    return best


def best_of(problem: Problem, rings: Iterable[tuple[int, ...]]) -> RingSplit | None:
    """Return the best of some rings with its split, None when none of them fits."""
    best, limit_s = None, math.inf
    for nodes in rings:
        cost_s = cost_of(problem, nodes, limit_s)
        if cost_s < limit_s:
            best, limit_s = nodes, cost_s * (1 - SAME)
    return best_split(problem, best) if best else None


def best_single(problem: Problem) -> RingSplit | None:
    """Return the best ring of one node, None when none holds the model."""
    return best_of(problem, permutations(range(problem.n_nodes), 1))


def best_pair(problem: Problem) -> RingSplit | None:
    """Return the best ring of two nodes, None when no two hold the model."""
    return best_of(problem, permutations(range(problem.n_nodes), 2))


def rings_with(node: int, ring: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """List the rings that differ by one more node, or by it in another's place."""
    nodes = tuple(ring)
    for rank in range(len(nodes) + 1):
        yield (*nodes[:rank], node, *nodes[rank:])
    for rank in range(len(nodes)):
        yield (*nodes[:rank], node, *nodes[rank + 1 :])


def _good_ring(problem: Problem) -> RingSplit | None:
    shortest = shortest_ring(problem.room, problem.n_layers)
    if shortest is None:
        return None
    starts = [best_single(problem), best_pair(problem), best_split(problem, shortest)]
    grown = [_grown(problem, start) for start in starts if start]
    best = grown[0]
    for ring in grown[1:]:
        if ring.cost_s < best.cost_s * (1 - SAME):
            best = ring
    return best


def _grown(problem: Problem, ring: RingSplit) -> RingSplit:
    """Take in one more node, or one for another, while that makes the ring better."""
    while True:
        outside = [node for node in range(problem.n_nodes) if node not in ring.nodes]
        rings = (nodes for node in outside for nodes in rings_with(node, ring.nodes))
        better = best_of(problem, rings)
        if better is None or better.cost_s >= ring.cost_s * (1 - SAME):
            return ring
        ring = better


def _sweep(problem: Problem, best: RingSplit, width: int) -> RingSplit | None:
    """Look for a ring better than the best, keeping so many paths; None if none was found."""
    rules = rules_for(problem, best.cost_s * (1 - SAME))
    nodes = range(problem.n_nodes)
    paths: _Paths = {(head, 1 << head, head): (rules.start(head), (head,)) for head in nodes}
    found = None
    for _ in range(1, min(problem.n_nodes, problem.n_layers)):
        paths = _longer(paths, rules, problem.n_nodes)
        for worth, path in paths.values():
            total = rules.closed(worth, path)
            if total < rules.limit:
                found, rules.limit = path, total
        if len(paths) > width:
            promising = nsmallest(width, paths.items(), key=lambda item: _promise(rules, *item))
            paths = dict(promising)
    return best_split(problem, found) if found else None


def _promise(rules: Rules, key: _Key, path: tuple[float, tuple[int, ...]]) -> float:
    _, mask, last = key
    return path[0] + rules.floor(mask, last)


def _longer(paths: _Paths, rules: Rules, n_nodes: int) -> _Paths:
    """Take every step from every path, keeping the best path of each head, set and last node."""
    longer: _Paths = {}
    limit = rules.limit
    bits = [(node, 1 << node) for node in range(n_nodes)]
    for (head, mask, last), (worth, path) in paths.items():
        steps = rules.steps(head, last)
        for node, bit in bits:
            if mask & bit:
                continue
            key, stepped = (head, mask | bit, node), worth + steps[node]
            known = longer.get(key)
            if known is not None and known[0] <= stepped:
                continue
            if stepped + rules.floor(mask | bit, node) < limit:
                longer[key] = (stepped, (*path, node))
    return longer
