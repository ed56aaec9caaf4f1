"""When a stage should span several nodes, and what that is said to cost."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from support.rings.clusters import MIB, candidate, shape, speed

from shardnet.cluster.placement.figures import (
    CandidateNode,
    Gathers,
    LinkSpeed,
    ModelShape,
    Objective,
    Placement,
)
from shardnet.cluster.placement.placement import place, place_exactly
from shardnet.cluster.placement.spans import gather_s, grouped, spanning, weigh_spans
from shardnet.errors import PlanError
from shardnet.types import NodeId

LAYERS = 22
GIGABIT = LinkSpeed(round_trip_s=400e-6, bytes_per_s=118e6)
"""Ordinary Ethernet: 200 us from program to program."""
LOOPBACK = LinkSpeed(round_trip_s=150e-6, bytes_per_s=2e9)
THUNDERBOLT = LinkSpeed(round_trip_s=120e-6, bytes_per_s=1.2e9)


def model() -> ModelShape:
    """1.1 thousand million parameters in bfloat16, as TinyLlama has them."""
    made = shape(n_layers=LAYERS, layer_mib=84, head_mib=125, embedding_mib=125)
    gathers = Gathers(
        layer_bytes=(4096, 4096, 11264, 4096),
        embedding_bytes=4096,
        head_bytes=64000,
        heads=(32, 4),
        head_weights=Fraction(1, 8),
    )
    return replace(made, gathers=gathers)


def nodes(n: int, gb_per_s: float, memory_mib: int = 8192) -> list[CandidateNode]:
    """Nodes that read weights at a rate, and do nothing else."""
    layer_ms, head_ms = (mib * MIB / gb_per_s / 1e6 for mib in (84, 125))
    return [candidate(f"n{i}", memory_mib, speed(layer_ms, head_ms)) for i in range(n)]


def weighed(
    candidates: list[CandidateNode],
    link: LinkSpeed,
    objective: Objective = Objective.LATENCY,
    built: ModelShape | None = None,
) -> Placement:
    ids = [c.node for c in candidates]
    links = {(a, b): link for a in ids for b in ids if a != b}
    of = built or model()
    best = place(of, candidates, links, objective)
    return weigh_spans(of, candidates, links, objective, best, ids)


@pytest.mark.parametrize(
    ("gb_per_s", "link", "spans"),
    [
        (10, GIGABIT, True),
        (20, GIGABIT, False),
        (50, GIGABIT, False),
        (400, GIGABIT, False),
        (10, LOOPBACK, True),
        (20, THUNDERBOLT, True),
        (400, THUNDERBOLT, False),
    ],
)
def test_a_stage_spans_nodes_where_the_link_allows(
    gb_per_s: float, link: LinkSpeed, spans: bool
) -> None:
    placement = weighed(nodes(2, gb_per_s), link)
    (stage,) = placement.stages
    assert stage.shards == ((NodeId("id-n1"),) if spans else ())
    assert "90 gathers take" in placement.why
    if spans:
        assert placement.left_out == ()
        assert placement.why.startswith("each layer cut over n0+n1: about ")
        assert "; on n0: about " in placement.why
    else:
        assert [out.node for out in placement.left_out] == ["id-n1"]
        assert "each layer cut over n0+n1 would be " in placement.why
        assert f"({link.round_trip_s * 1e3:.2g} ms there and back, " in placement.why


def test_what_is_predicted_is_the_sum_of_its_parts() -> None:
    (first, second), of = nodes(2, 10), model()
    links = {(first.node, second.node): THUNDERBOLT}
    assert gather_s(THUNDERBOLT, 2, 4096) == pytest.approx(120e-6 + 2048 / 1.2e9)
    assert gather_s(THUNDERBOLT, 4, 4096) == pytest.approx(120e-6 + 3072 / 1.2e9)
    one = spanning(of, [first, second], links)
    assert one.speed is not None
    assert first.speed is not None
    gathers = sum(gather_s(THUNDERBOLT, 2, n) for n in (4096, 4096, 11264, 4096))
    assert one.speed.layer_s == pytest.approx(first.speed.layer_s / 2 + gathers)
    placement = place_exactly(of, [one], links=links)
    assert placement.predicted_tok_s == pytest.approx(
        1 / (LAYERS * one.speed.layer_s + one.speed.embed_s + one.speed.head_s)
    )


def test_the_slowest_node_and_the_slowest_link_count() -> None:
    first, second, third = nodes(3, 20)
    slow = replace(second, speed=speed(50.0))
    of, ids = model(), [first.node, second.node, third.node]
    links = {(a, b): LOOPBACK for a in ids for b in ids if a != b}
    links[ids[2], ids[1]] = links[ids[1], ids[2]] = GIGABIT
    one = spanning(of, [first, slow, third], links)
    assert one.speed is not None
    assert first.speed is not None
    assert one.shares == (479, 42, 479)
    whole_s = 1 / (2 / first.speed.layer_s + 1 / 50e-3)
    assert one.speed.layer_s > whole_s + 4 * GIGABIT.round_trip_s


def test_a_model_that_no_node_holds_is_cut_over_two() -> None:
    half = model().memory_bytes(model().whole) // MIB * 6 // 10
    small = nodes(2, 5, memory_mib=half)
    placement = weighed(small, THUNDERBOLT)
    assert placement.stages[0].shards == ("id-n1",)
    with pytest.raises(PlanError):
        place_exactly(model(), [spanning(model(), nodes(2, 5, memory_mib=half // 2), {})])


def test_many_nodes_are_left_out_by_name() -> None:
    placement = weighed([*nodes(2, 10), replace(candidate("old", 8192, speed(500)))], LOOPBACK)
    assert placement.stages[0].shards == ("id-n1",)
    assert [out.node for out in placement.left_out] == ["id-old"]


@pytest.mark.parametrize(
    "change", ["throughput", "not measured", "cannot be cut", "lacks the model"]
)
def test_nothing_is_weighed_without_figures(change: str) -> None:
    candidates, objective, of = nodes(2, 10), Objective.LATENCY, model()
    if change == "throughput":
        objective = Objective.THROUGHPUT
    elif change == "not measured":
        candidates[1] = replace(candidates[1], speed=None)
    elif change == "cannot be cut":
        of = replace(of, gathers=None)
    else:
        candidates[1] = replace(candidates[1], lacking=(1,) * LAYERS)
    placement = weighed(candidates, LOOPBACK, objective, of)
    assert all(not stage.shards for stage in placement.stages)
    assert "gathers" not in placement.why


def test_named_nodes_are_joined_in_their_order() -> None:
    four, of = nodes(4, 10), model()
    joined = grouped(of, four, {}, 2)
    assert [(one.node, one.shards) for one in joined] == [
        ("id-n0", ("id-n1",)),
        ("id-n2", ("id-n3",)),
    ]
    placement = place_exactly(of, joined)
    assert [stage.shards for stage in placement.stages] == [("id-n1",), ("id-n3",)]
    left_over = place_exactly(of, grouped(of, four[:3], {}, 2))
    assert [(one.node, one.shards) for one in left_over.stages] == [
        ("id-n0", ("id-n1",)),
        ("id-n2", ()),
    ]
    with pytest.raises(PlanError, match="1 nodes make no stage of 2"):
        grouped(of, four[:1], {}, 2)
    with pytest.raises(PlanError, match="cannot span several nodes"):
        grouped(replace(of, gathers=None), four, {}, 2)


def test_shares_follow_speed_unless_memory_lacks() -> None:
    """Nodes that are about as fast have equal parts; who has too little memory has no more."""
    fast, slow = nodes(1, 40)[0], replace(nodes(1, 10)[0], node=NodeId("id-old"))
    of, half = model(), model().memory_bytes(model().whole) // MIB // 2
    one = spanning(of, [fast, slow], {(fast.node, slow.node): LOOPBACK})
    assert one.shares == (800, 200)
    assert one.speed is not None
    assert fast.speed is not None
    gathers = sum(gather_s(LOOPBACK, 2, round(1.6 * size)) for size in (4096, 4096, 11264, 4096))
    assert one.speed.layer_s == pytest.approx(0.8 * fast.speed.layer_s + gathers)
    assert spanning(of, nodes(2, 40), {}).shares == ()
    alike = [*nodes(1, 40), replace(nodes(1, 42)[0], node=NodeId("id-old"))]
    assert spanning(of, alike, {}).shares == ()

    full = replace(fast, memory_bytes=half * MIB)
    cut = spanning(of, [full, slow], {})
    assert cut.shares[0] / sum(cut.shares) < 0.5
    assert place_exactly(of, [cut]).stages[0].shares == cut.shares
    with pytest.raises(PlanError):
        place_exactly(of, [spanning(of, [full, replace(slow, memory_bytes=half * MIB // 2)], {})])


@pytest.mark.parametrize(
    ("n_fast", "slow_gb_per_s", "n_used"), [(2, 3, 3), (2, 0.3, 2), (4, 10, 5)]
)
def test_a_slow_node_takes_part_where_that_pays(
    n_fast: int, slow_gb_per_s: float, n_used: int
) -> None:
    slow = replace(nodes(1, slow_gb_per_s)[0], node=NodeId("id-old"), name="old")
    placement = weighed([*nodes(n_fast, 10), slow], LOOPBACK)
    [stage] = placement.stages
    assert 1 + len(stage.shards) == n_used
    assert ("id-old" in stage.shards) == (n_used > n_fast)


def test_a_stage_over_two_nodes_stands_beside_one_behind_a_slow_link() -> None:
    """Two hold too little for the model; the link to the third allows a hop, but no gathers."""
    of = model()
    whole_mib = of.memory_bytes(of.whole) // MIB
    pair = nodes(2, 10, memory_mib=whole_mib * 36 // 100)
    far = replace(candidate("far", whole_mib // 2, pair[0].speed))
    links = {
        (a.node, b.node): LinkSpeed(round_trip_s=3e-3, bytes_per_s=2e7)
        if far in (a, b)
        else LOOPBACK
        for a in (*pair, far)
        for b in (*pair, far)
    }
    best = place(of, [*pair, far], links)
    mixed = weigh_spans(
        of, [*pair, far], links, Objective.LATENCY, best, [c.node for c in (*pair, far)]
    )
    assert {(stage.node, stage.shards) for stage in mixed.stages} == {
        ("id-n0", ("id-n1",)),
        ("id-far", ()),
    }
    assert mixed.left_out == ()
    assert mixed.why.startswith("layers ")
    assert " cut over n0+n1: about " in mixed.why
