"""Gather what a head needs before it plans: the speed of every candidate and of every link.

Knows the order in which nodes measure, so that no two disturb each other, and that a node which
cannot be measured remains a candidate. Must not know how a node measures, nor plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec.structs import asdict, replace

from shardnet.cluster.placement.figures import Links, LinkSpeed, StageSpeed
from shardnet.errors import ShardnetError, UsageError
from shardnet.types import Arith, LayerRange, NodeId
from shardnet.wire.framing.schema import LinkFigures
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.measurements import (
    LinksMeasured,
    MeasureLinks,
    MeasureStage,
    NodeMeasured,
    StageMeasured,
    StageSeconds,
    WayMeasured,
)
from shardnet.wire.messages.membership import NodeInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures for one model shape: of nodes by id, of links by (sender, receiver).

    `reports` holds each node's own report, or why it has no figures.
    """

    speeds: Mapping[NodeId, StageSpeed] = field(default_factory=dict)
    links: Links = field(default_factory=dict)
    reports: tuple[NodeMeasured, ...] = ()

    @property
    def ways(self) -> list[WayMeasured]:
        """The figures of links as a message."""
        return [
            WayMeasured(sender=sender, receiver=receiver, **asdict(speed))
            for (sender, receiver), speed in self.links.items()
        ]


NOTHING_MEASURED = Measured()

WRONG_BY: Final = 1.5
"""A figure is corrected when a generation shows a stage so many times faster or slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What a generation showed of a stage: its seconds for one token.

    `step_s`, of the head alone: what a token took beside computing and wire.
    """

    node: NodeId
    layers: LayerRange
    compute_s: float
    step_s: float | None = None


class Instruments(NamedTuple):
    """How nodes, this one included, and their links are measured.

    Both raise the error that a node reports, LinkError if it is lost.
    """

    measure_stage: Callable[[NodeInfo, MeasureStage], Awaitable[StageMeasured]]
    measure_links: Callable[[NodeInfo, MeasureLinks], Awaitable[LinksMeasured]]


Ariths = Mapping[NodeId, Arith]
"""How nodes compute, by their ids."""
NO_ARITHS: Final[Ariths] = MappingProxyType({})

OnMeasured = Callable[[int, int], None]
"""Takes (nodes and links that were measured or have failed, nodes and links in all)."""


class _Count:
    """Counts what is done of `n_all`, and reports it."""

    def __init__(self, n_all: int, on_measured: OnMeasured) -> None:
        self._n_all = n_all
        self._on_measured = on_measured
        self._n_done = 0

    def one_more(self) -> None:
        self._n_done += 1
        self._on_measured(self._n_done, self._n_all)


async def gather(
    nodes: Sequence[NodeInfo],
    stage: MeasureStage,
    payload_bytes: int,
    instruments: Instruments,
    on_measured: OnMeasured = lambda n_done, n_all: None,
    ariths: Ariths = NO_ARITHS,
) -> Measured:
    """Have all nodes measured for the model of `stage`, then all links between two of them.

    Machines measure at the same time, the nodes of one machine one after the other. A link is
    measured by the node with the smaller id. What fails is left out, and `reports` gives the
    reason. `on_measured` is called after each node and link, and must not raise. `ariths` are the
    arithmetics of nodes where these differ from what `stage` says.
    """
    count = _Count(len(nodes) * (len(nodes) + 1) // 2, on_measured)
    stages = {
        node.node: replace(stage, arith=ariths[NodeId(node.node)].value)
        if NodeId(node.node) in ariths
        else stage
        for node in nodes
    }
    reports = await _all_nodes(nodes, stages, instruments, count)
    speeds = {}
    for place, entry in enumerate(reports):
        if entry.seconds is None:
            continue
        try:
            speeds[NodeId(entry.node)] = stage_speed(entry.seconds, is_steady=entry.is_steady)
        except UsageError as error:
            reports[place] = _without(nodes[place], error)
    links = await _all_links(nodes, payload_bytes, stage.again, instruments, count)
    return Measured(speeds=speeds, links=links, reports=tuple(reports))


def stage_speed(seconds: StageSeconds, *, is_steady: bool) -> StageSpeed:
    """Read a measured speed. Raises UsageError for one that cannot be."""
    return StageSpeed(**asdict(seconds), is_steady=is_steady)


def rounds_of_pairs(nodes: Iterable[NodeId]) -> list[list[tuple[NodeId, NodeId]]]:
    """Pair every node with every other once, in rounds in which each node has one partner at most.

    A round-robin tournament by the circle method: one less rounds than nodes where these are even,
    else as many. The smaller id stands first in its pair; equal nodes in any order give the same.
    """
    circle: list[NodeId | None] = [*sorted(nodes)]
    if len(circle) % 2:
        circle.append(None)  # its partner rests
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return rounds


async def _all_nodes(
    nodes: Sequence[NodeInfo],
    stages: Mapping[str, MeasureStage],
    instruments: Instruments,
    count: _Count,
) -> list[NodeMeasured]:
    by_host: dict[str, list[NodeInfo]] = {}
    for node in nodes:
        by_host.setdefault(node.host_id, []).append(node)
    found: dict[str, NodeMeasured] = {}

    async def one_host(here: Sequence[NodeInfo]) -> None:
        for node in here:
            found[node.node] = await _one_node(node, stages[node.node], instruments)
            count.one_more()

    async with asyncio.TaskGroup() as tasks:
        for here in by_host.values():
            tasks.create_task(one_host(here))
    return [found[node.node] for node in nodes]


async def _one_node(node: NodeInfo, stage: MeasureStage, instruments: Instruments) -> NodeMeasured:
    try:
        answer = await instruments.measure_stage(node, stage)
    except ShardnetError as error:
        return _without(node, error)
    measured = asdict(answer)
    del measured["request"]
    return NodeMeasured(node=node.node, name=node.name, isa=node.isa, **measured)


def _without(node: NodeInfo, error: ShardnetError) -> NodeMeasured:
    return NodeMeasured(
        node=node.node,
        name=node.name,
        memory_bytes=node.memory_bytes,
        isa=node.isa,
        why_not=explanation(error),
    )


async def _all_links(
    nodes: Sequence[NodeInfo],
    payload_bytes: int,
    again: bool,
    instruments: Instruments,
    count: _Count,
) -> dict[tuple[NodeId, NodeId], LinkSpeed]:
    by_id = {NodeId(node.node): node for node in nodes}
    links: dict[tuple[NodeId, NodeId], LinkSpeed] = {}

    async def one_link(pair: tuple[NodeId, NodeId]) -> None:
        ask = MeasureLinks(request=0, nodes=[pair[1]], payload_bytes=payload_bytes, again=again)
        try:
            answer = await instruments.measure_links(by_id[pair[0]], ask)
            for row in answer.links:
                if row.node == pair[1]:
                    figures = {name: getattr(row, name) for name in LinkFigures.__struct_fields__}
                    links[pair] = LinkSpeed(**figures)
        except ShardnetError:  # assumed to be slow, which the plan says
            pass
        count.one_more()

    for pairs in rounds_of_pairs(by_id):
        async with asyncio.TaskGroup() as tasks:
            for pair in pairs:
                tasks.create_task(one_link(pair))
    return links
