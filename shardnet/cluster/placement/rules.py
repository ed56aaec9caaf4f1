"""Cost and lower bound of an unfinished ring, for each of the two objectives.

Knows the numbers of one problem. Pure. Must not know how paths are chosen and kept
(placement/search.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from shardnet.cluster.placement.figures import Objective
from shardnet.cluster.placement.room import StageRole
from shardnet.cluster.placement.split import Problem, Stage, cost_of, layers_within


class Rules(Protocol):
    """How an objective rates paths: by a number, the worth, of which the least is the best.

    A path is dropped unless worth and floor together stay below `limit`, and so is a ring unless
    it does.
    """

    limit: float

    def start(self, head: int) -> float:
        """Return the worth of a path that is only its head."""

    def steps(self, head: int, last: int) -> Sequence[float]:
        """Return by node what a path becomes worth more by stepping there."""

    def floor(self, mask: int, last: int) -> float:
        """Return the least that a ring can be worth more than its path so far."""

    def closed(self, worth: float, path: tuple[int, ...]) -> float:
        """Return the worth of the path closed to a ring."""


def rules_for(problem: Problem, limit_s: float) -> Rules:
    """Return the rules of the problem's objective for rings that cost less than `limit_s`."""
    if problem.objective is Objective.LATENCY:
        return _SumRules(problem, limit_s)
    return _SlowestRules(problem, limit_s)


class _SumRules:
    """Least sum over stages and hops: the worth of a path is its seconds without its layers."""

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
        """Return the least seconds for all layers, every node of a set taking at least one.

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
    """Least slowest stage: the worth is minus the layers that fit below the limit of time."""

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
