"""Divide a ring's layers over its stages, compute what a trip round costs, find the best ring.

The search is exact for small clusters, a beam above. Knows nodes as indices and times as numbers,
the cost of rings, and the cost and lower bound of unfinished ones for each of the two objectives.
Pure. Must not know models, memory sizes, names or words.

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
from dataclasses import dataclass
from heapq import heapify, heapreplace, nsmallest
from itertools import accumulate, groupby, pairwise, permutations
from operator import attrgetter
from typing import NamedTuple

from shardnet.cluster.placement.figures import Objective
from shardnet.cluster.placement.room import Room, StageRole, shortest_ring
from shardnet.types import LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One model and the nodes that could run it, as numbers. Times in seconds, for one row.

    Of each node: `room`, the layers it has memory for; `layer_s`, above 0; `embed_s` and `head_s`,
    its extra time as the head and as the tail. From node to node: `hop_s` for activations and
    `home_s` for the tail's token, as far as the objective counts them.
    """

    objective: Objective
    n_layers: int
    room: Sequence[Room]
    layer_s: Sequence[float]
    embed_s: Sequence[float]
    head_s: Sequence[float]
    hop_s: Sequence[Sequence[float]]
    home_s: Sequence[Sequence[float]]

    @property
    def n_nodes(self) -> int:
        """Nodes to choose from."""
        return len(self.room)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSplit:
    """Nodes in ring order, the number of layers of each, and the cost under the objective."""

    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    cost_s: float


class Stage(NamedTuple):
    """A stage without layers yet: room for how many, seconds for each, fixed seconds."""

    room: int
    layer_s: float
    fixed_s: float


_LAYER_S = attrgetter("layer_s")


def stages_of(problem: Problem, nodes: Sequence[int]) -> list[Stage]:
    """List the stages of a ring. The fixed seconds of a stage include its hop."""
    head, tail = nodes[0], nodes[-1]
    if len(nodes) == 1:
        fixed_s = problem.embed_s[head] + problem.head_s[head]
        return [Stage(problem.room[head][StageRole.ALONE], problem.layer_s[head], fixed_s)]
    stages = [
        Stage(
            problem.room[node][StageRole.MIDDLE],
            problem.layer_s[node],
            problem.hop_s[node][following],
        )
        for node, following in pairwise(nodes[1:])
    ]
    first_s = problem.embed_s[head] + problem.hop_s[head][nodes[1]]
    last_s = problem.head_s[tail] + problem.home_s[tail][head]
    stages.insert(0, Stage(problem.room[head][StageRole.FIRST], problem.layer_s[head], first_s))
    stages.append(Stage(problem.room[tail][StageRole.LAST], problem.layer_s[tail], last_s))
    return stages


def cost_of(problem: Problem, nodes: Sequence[int], limit_s: float = math.inf) -> float:
    """Return what a ring costs with its best split, infinity unless that is below `limit_s`."""
    if len(nodes) > problem.n_layers:
        return math.inf
    stages = stages_of(problem, nodes)
    if problem.objective is Objective.LATENCY:
        cost_s = _least_sum_s(stages, problem.n_layers)
    elif _layers_within(stages, limit_s) < problem.n_layers:
        return math.inf
    else:
        cost_s = _slowest_s(stages, _even(stages, problem.n_layers))
    return cost_s if cost_s < limit_s else math.inf


def best_split(problem: Problem, nodes: Sequence[int]) -> RingSplit | None:
    """Divide the layers at the least cost. None if they do not fit.

    Exact. For one sequence the fastest stages get all they have room for; stages of equal speed
    share evenly.
    """
    stages = stages_of(problem, nodes)
    if not _holds(stages, problem.n_layers):
        return None
    if problem.objective is Objective.THROUGHPUT:
        return _ring(problem, nodes, stages, _even(stages, problem.n_layers))
    return _ring(problem, nodes, stages, _fastest_first(stages, problem.n_layers))


def even_split(problem: Problem, nodes: Sequence[int]) -> RingSplit | None:
    """Divide the layers so that the slowest stage is as fast as can be, whatever the objective.

    Exact; among equals the earlier stage gets the layer. None when the layers do not fit.
    """
    stages = stages_of(problem, nodes)
    if not _holds(stages, problem.n_layers):
        return None
    return _ring(problem, nodes, stages, _even(stages, problem.n_layers))


def given_split(problem: Problem, nodes: Sequence[int], counts: Sequence[int]) -> RingSplit:
    """Return the split with `counts` layers on each node, and its cost."""
    return _ring(problem, nodes, stages_of(problem, nodes), counts)


def ranges_of(counts: Sequence[int]) -> list[LayerRange]:
    """Return the layers of each stage, from the number of each."""
    ends = [*accumulate(counts)]
    return [LayerRange(end - count, end) for end, count in zip(ends, counts, strict=True)]


def layers_within(stage: Stage, limit_s: float) -> int:
    """Count the layers that a stage has room for and computes in less than `limit_s`."""
    if limit_s == math.inf:
        return stage.room
    return min(stage.room, math.ceil((limit_s - stage.fixed_s) / stage.layer_s) - 1)


def _least_sum_s(stages: Sequence[Stage], n_layers: int) -> float:
    """Return the least sum over stages that hold at least a layer each; infinity if none fits."""
    total_s, spare = 0.0, n_layers - len(stages)
    for stage in stages:
        total_s += stage.fixed_s + stage.layer_s
    for room, layer_s, _ in sorted(stages, key=_LAYER_S):
        if room < 1:
            return math.inf
        more = min(room - 1, spare)
        total_s += more * layer_s
        spare -= more
    return math.inf if spare else total_s


def _layers_within(stages: Sequence[Stage], limit_s: float) -> int:
    """Count the layers that a ring computes with every stage below the limit; 0 if one cannot."""
    total = 0
    for stage in stages:
        layers = layers_within(stage, limit_s)
        if layers < 1:
            return 0
        total += layers
    return total


def _holds(stages: Sequence[Stage], n_layers: int) -> bool:
    return len(stages) <= n_layers <= _layers_within(stages, math.inf)


def _even(stages: Sequence[Stage], n_layers: int) -> list[int]:
    """One layer each, then every further one where the stage's time with it is least."""
    counts = [1] * len(stages)
    with_next = [
        (stage.fixed_s + 2 * stage.layer_s if stage.room > 1 else math.inf, rank)
        for rank, stage in enumerate(stages)
    ]
    heapify(with_next)
    for _ in range(n_layers - len(stages)):
        _, rank = with_next[0]
        counts[rank] += 1
        room, layer_s, fixed_s = stages[rank]
        more_s = fixed_s + (counts[rank] + 1) * layer_s if counts[rank] < room else math.inf
        heapreplace(with_next, (more_s, rank))
    return counts


def _fastest_first(stages: Sequence[Stage], n_layers: int) -> list[int]:
    """One layer each, the rest to the fastest; stages of equal speed share evenly."""
    counts = [1] * len(stages)
    ranks = sorted(range(len(stages)), key=lambda rank: stages[rank].layer_s)
    spare = n_layers - len(stages)
    for _, group in groupby(ranks, key=lambda rank: stages[rank].layer_s):
        equals = list(group)
        more = min(spare, sum(stages[rank].room - 1 for rank in equals))
        shares = _even([stages[rank] for rank in equals], len(equals) + more)
        for rank, share in zip(equals, shares, strict=True):
            counts[rank] = share
        spare -= more
    return counts


def _slowest_s(stages: Sequence[Stage], counts: Sequence[int]) -> float:
    return max(
        stage.fixed_s + count * stage.layer_s for stage, count in zip(stages, counts, strict=True)
    )


def _ring(
    problem: Problem, nodes: Sequence[int], stages: Sequence[Stage], counts: Sequence[int]
) -> RingSplit:
    times = [s.fixed_s + count * s.layer_s for s, count in zip(stages, counts, strict=True)]
    cost_s = sum(times) if problem.objective is Objective.LATENCY else max(times)
    return RingSplit(nodes=tuple(nodes), counts=tuple(counts), cost_s=cost_s)


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


Rules = _SumRules | _SlowestRules
"""How an objective rates paths: by a cost, called worth, that is to be minimised.

A path is dropped unless its worth plus its floor is below `limit`, a ring unless its worth is.
`start` is the worth of a path that is only its head; `steps` what each node, as the next one, adds
to it; `floor` a lower bound of what completing the ring adds; `closed` the worth of the path closed
to a ring.
"""
