"""Divide a ring's layers over its stages, and compute what a trip round it costs.

Knows nodes as indices and times as numbers. Pure. Must not know which rings there are to choose
from (placement/search.py), nor models, memory sizes or names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from shardnet.cluster.placement.figures import Objective
from shardnet.cluster.placement.room import Room, StageRole
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
