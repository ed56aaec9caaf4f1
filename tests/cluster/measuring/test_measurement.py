"""Gathering figures: who measures when, and what a node that fails costs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.measuring.measurement import Measured, gather, rounds_of_pairs
from shardnet.errors import BusyError, LinkClosedError, ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.measurements import (
    LinkMeasured,
    LinksMeasured,
    MeasureLinks,
    MeasureStage,
    StageMeasured,
    StageSeconds,
)
from shardnet.wire.messages.membership import NodeInfo

ASK = MeasureStage(request=0, config="{}", dtype="bfloat16", threads=0)


def node(name: str, host: str) -> NodeInfo:
    return NodeInfo(
        node=name,
        name=name,
        address=f"{name}:1",
        version="0",
        device="cpu",
        memory_bytes=1000,
        memory_free_bytes=1000,
        cores=1,
        threads=1,
        dtypes=["bfloat16"],
        host_id=host,
    )


class Lab:
    """Nodes that answer at once, but record who measures beside whom."""

    def __init__(
        self,
        *,
        failing: dict[str, ShardnetError] | None = None,
        cut: frozenset[frozenset[str]] = frozenset(),
        layer_s: float = 0.001,
    ) -> None:
        self.failing = failing or {}
        self.cut = cut
        self.layer_s = layer_s
        self.at_work: Counter[str] = Counter()
        self.hosts_at_once = 0
        self.links: list[tuple[str, str]] = []
        self.asked: list[MeasureLinks] = []

    async def measure_stage(self, node: NodeInfo, message: MeasureStage) -> StageMeasured:
        assert self.at_work[node.host_id] == 0, "two nodes of one machine measure at once"
        await self._work(node.host_id)
        if node.node in self.failing:
            raise self.failing[node.node]
        return StageMeasured(
            request=0,
            seconds=StageSeconds(layer_s=self.layer_s, layer_256_s=1, embed_s=0, head_s=0),
            kernel="k",
            threads=1,
            measured_at_s=5,
            memory_bytes=900,
        )

    async def measure_links(self, node: NodeInfo, message: MeasureLinks) -> LinksMeasured:
        [other] = message.nodes
        self.asked.append(message)
        for end in (node.node, other):
            assert self.at_work[end] == 0, f"{end} measures two links at once"
        self.at_work[other] += 1
        await self._work(node.node)
        self.at_work[other] -= 1
        self.links.append((node.node, other))
        if frozenset((node.node, other)) in self.cut:
            raise LinkClosedError("the link ended")
        row = LinkMeasured(node=other, round_trip_s=0.002, bytes_per_s=1e6)
        strange = LinkMeasured(node="stranger", round_trip_s=1, bytes_per_s=1)
        return LinksMeasured(request=0, links=[strange, row])

    async def _work(self, who: str) -> None:
        self.at_work[who] += 1
        self.hosts_at_once = max(self.hosts_at_once, sum(self.at_work.values()))
        await asyncio.sleep(0)
        self.at_work[who] -= 1


def gathered(lab: Lab, nodes: Sequence[NodeInfo]) -> Measured:
    return asyncio.run(gather(nodes, ASK, 4096, lab))


@given(st.lists(st.text("abcdef", min_size=1, max_size=3), unique=True, max_size=17))
def test_every_two_nodes_meet_once_and_nobody_twice_in_a_round(names: list[str]) -> None:
    nodes = [NodeId(name) for name in names]
    rounds = rounds_of_pairs(nodes)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == sorted(combinations(sorted(nodes), 2))
    for pairs in rounds:
        assert max(Counter(end for pair in pairs for end in pair).values(), default=0) <= 1
    even = len(nodes) + len(nodes) % 2
    assert len(rounds) == max(0, even - 1)
    assert rounds == rounds_of_pairs(reversed(nodes))


def test_machines_measure_at_once_and_the_nodes_of_one_in_turn() -> None:
    lab = Lab()
    nodes = [node("a", "h1"), node("b", "h1"), node("c", "h2"), node("d", "h2"), node("e", "h3")]
    measured = gathered(lab, nodes)
    assert lab.hosts_at_once >= 3
    assert [told.node for told in measured.reports] == ["a", "b", "c", "d", "e"]
    assert measured.speeds.keys() == set("abcde")
    assert measured.reports[0].memory_bytes == 900
    assert measured.reports[0].why_not == ""


def test_each_node_and_link_is_told_when_it_is_done_or_has_failed() -> None:
    lab = Lab(failing={"b": BusyError("it generates")}, cut=frozenset({frozenset("ac")}))
    told: list[tuple[int, int]] = []
    nodes = [node(name, name) for name in "abc"]
    asyncio.run(gather(nodes, ASK, 4096, lab, lambda done, total: told.append((done, total))))
    assert told == [(n_done, 6) for n_done in range(1, 7)]


def test_each_link_is_measured_once_by_the_smaller_id() -> None:
    lab = Lab()
    measured = gathered(lab, [node(name, name) for name in "cbad"])
    assert sorted(lab.links) == sorted(combinations("abcd", 2))
    assert measured.links.keys() == set(combinations("abcd", 2))
    assert {ask.payload_bytes for ask in lab.asked} == {4096}
    assert {(way.sender, way.receiver) for way in measured.ways} == set(combinations("abcd", 2))


def test_what_fails_is_left_out_and_said() -> None:
    lab = Lab(failing={"b": BusyError("it generates")}, cut=frozenset({frozenset("ac")}))
    measured = gathered(lab, [node(name, name) for name in "abc"])
    assert measured.speeds.keys() == {"a", "c"}
    assert measured.links.keys() == {("a", "b"), ("b", "c")}
    _, told, _ = measured.reports
    assert (told.seconds, told.why_not, told.memory_bytes) == (None, "it generates", 1000)


@pytest.mark.parametrize("layer_s", [0.0, 5e-324, float("inf")])
def test_a_figure_that_is_no_time_counts_as_none(layer_s: float) -> None:
    measured = gathered(Lab(layer_s=layer_s), [node("a", "a")])
    assert measured.speeds == {}
    assert "cannot have been measured" in measured.reports[0].why_not


def test_one_node_has_no_links() -> None:
    lab = Lab()
    assert gathered(lab, [node("a", "a")]).links == {}
    assert lab.links == []
