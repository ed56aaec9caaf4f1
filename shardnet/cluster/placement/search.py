"""Find the nodes of the best ring and their order: exact for small clusters, a beam above.

Knows nodes as indices, the cost of rings (placement/split.py), and the cost and lower bound of
unfinished ones for each of the two objectives. Pure. Must not know models, names or words.

Rings grow stage by stage from every head at once. Of all the paths from one head over one set of
nodes to one last node only the best can be part of the best ring (Held and Karp 1962, "A dynamic
programming approach to sequencing problems"), and a path that even at best cannot beat the best
ring so far is dropped. Up to 8 nodes nothing else is dropped, and the result is exact. Above that
the `width_for` most promising paths of each length are kept: a beam, which is exact too if there
are never more. It starts from the best single node, the best pair and the shortest ring, each grown
while another node helps, and so is never worse than these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import permutations
from typing import Protocol

from shardnet.cluster.placement.figures import Objective
from shardnet.cluster.placement.room import StageRole, shortest_ring
from shardnet.cluster.placement.split import (
    Problem,
    RingSplit,
    Stage,
    best_split,
    cost_of,
    layers_within,
)

EXACT_WIDTH = 1120
"""The most paths of one length over 8 nodes: 8 heads, 4 of 7 nodes on the way, 4 last ones."""

SAME = 1e-9
"""Rings whose costs differ by a smaller share count as equal: the one found first stays."""

_Key = tuple[int, int, int]
"""Head, the set of nodes as a mask, last node."""
_Paths = dict[_Key, tuple[float, tuple[int, ...]]]


def width_for(n_nodes: int) -> int:
    """Return how many paths of one length are kept: fewer the more steps each of them has."""
    return min(EXACT_WIDTH, EXACT_WIDTH * 12**2 // n_nodes**2)


def find_ring(problem: Problem, width: int | None = None) -> RingSplit | None:
    """Return the best ring found, None only when the model fits none.

    `width` is how many paths of one length are kept. Among equal rings earlier nodes are preferred.
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
    """Add a node, or replace one, as long as that makes the ring better."""
    while True:
        outside = [node for node in range(problem.n_nodes) if node not in ring.nodes]
        rings = (nodes for node in outside for nodes in rings_with(node, ring.nodes))
        better = best_of(problem, rings)
        if better is None or better.cost_s >= ring.cost_s * (1 - SAME):
            return ring
        ring = better


def _sweep(problem: Problem, best: RingSplit, width: int) -> RingSplit | None:
    """Search for a ring better than `best`, with a beam of `width` paths; None if none is found."""
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


class Rules(Protocol):
    """How an objective rates paths: by a cost, called worth, that is to be minimised.

    A path is dropped unless its worth plus its floor is below `limit`, a ring unless its worth is.
    """

    limit: float

    def start(self, head: int) -> float:
        """Return the worth of a path that is only its head."""

    def steps(self, head: int, last: int) -> Sequence[float]:
        """Return what each node, as the next one, adds to a path's worth."""

    def floor(self, mask: int, last: int) -> float:
        """Return a lower bound of what completing the ring adds to the worth of its path."""

    def closed(self, worth: float, path: tuple[int, ...]) -> float:
        """Return the worth of the path closed to a ring."""


def rules_for(problem: Problem, limit_s: float) -> Rules:
    """Return the rules of the problem's objective for rings that cost less than `limit_s`."""
    if problem.objective is Objective.LATENCY:
        return _SumRules(problem, limit_s)
    return _SlowestRules(problem, limit_s)


class _SumRules:
    """Minimises the sum over stages and hops: a path's worth is its seconds, without its layers."""

    def __init__(self, problem: Problem, limit_s: float) -> None:
        self._problem = problem
        self.limit = limit_s
        self._everything = (1 << problem.n_nodes) - 1
        self._floors: dict[tuple[int, int], float] = {}
        nodes = range(problem.n_nodes)
        self._fastest_first = [
            (problem.layer_s[node], max(problem.room[node][: StageRole.ALONE]), 1 << node)
            for node in sorted(nodes, key=lambda node: problem.layer_s[node])
        ]

    def start(self, head: int) -> float:
        return self._problem.embed_s[head]

    def steps(self, head: int, last: int) -> Sequence[float]:
        return self._problem.hop_s[last]

    def floor(self, mask: int, last: int) -> float:
        return self._layers_s(mask, self._everything)

    def _layers_s(self, mask: int, others: int) -> float:
        """Return the least seconds for all layers, with at least one on every node of `mask`.

        Nodes of `others` may take layers too, as if hops to them were free.
        """
        known_s = self._floors.get((mask, others))
        if known_s is not None:
            return known_s
        spare, total_s = self._problem.n_layers - mask.bit_count(), 0.0
        for layer_s, room, bit in self._fastest_first:
            if mask & bit:
                total_s += layer_s
                more = min(room - 1, spare)
            else:
                more = min(room, spare) if others & bit else 0
            if more < 0:
                total_s = math.inf
            total_s += more * layer_s
            spare -= more
        self._floors[mask, others] = floor_s = math.inf if spare else total_s
        return floor_s

    def closed(self, worth: float, path: tuple[int, ...]) -> float:
        head, tail = path[0], path[-1]
        besides_s = worth + self._problem.head_s[tail] + self._problem.home_s[tail][head]
        mask = sum(1 << node for node in path)
        if besides_s + self._layers_s(mask, mask) >= self.limit:
            return math.inf
        return cost_of(self._problem, path, self.limit)


class _SlowestRules:
    """Minimises the slowest stage: a path's worth is minus the layers that fit the time limit."""

    def __init__(self, problem: Problem, limit_s: float) -> None:
        self._problem, self._limit_s = problem, limit_s
        self.limit: float = 1 - problem.n_layers
        self._first = self._table(StageRole.FIRST, problem.embed_s, problem.hop_s)
        self._middle = self._table(StageRole.MIDDLE, [0.0] * problem.n_nodes, problem.hop_s)
        self._last = self._table(StageRole.LAST, problem.head_s, problem.home_s)
        tables = zip(self._first, self._middle, self._last, strict=True)
        self._most = [min(0.0, *first, *middle, *last) for first, middle, last in tables]
        self._floors: dict[int, float] = {}

    def _table(
        self, role: StageRole, besides_s: Sequence[float], hop_s: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """Return what a stage is worth: [its node][the node it sends to]."""
        problem = self._problem

        def worth(node: int, to: int) -> float:
            fixed_s = besides_s[node] + hop_s[node][to]
            stage = Stage(problem.room[node][role], problem.layer_s[node], fixed_s)
            layers = layers_within(stage, self._limit_s)
            return -layers if layers >= 1 and node != to else math.inf

        nodes = range(problem.n_nodes)
        return [[worth(node, to) for to in nodes] for node in nodes]

    def start(self, head: int) -> float:
        return 0.0

    def steps(self, head: int, last: int) -> Sequence[float]:
        return self._first[head] if last == head else self._middle[last]

    def floor(self, mask: int, last: int) -> float:
        done = mask ^ (1 << last)
        floor = self._floors.get(done)
        if floor is None:
            left = (most for node, most in enumerate(self._most) if not done >> node & 1)
            floor = self._floors[done] = sum(left)
        return floor

    def closed(self, worth: float, path: tuple[int, ...]) -> float:
        return worth + self._last[path[-1]][path[0]]
