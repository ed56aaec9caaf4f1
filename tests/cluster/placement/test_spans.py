"""When a stage should span several nodes, and what that is said to cost."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from msgspec import structs
from support.rings.clusters import MIB, candidate, shape, speed

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.cluster.placement import spans
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
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.errors import PlanError
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.runtime.loading.model_facts import identify
from shardnet.types import DType, NodeId

LAYERS = 22
LAYER = (4096, 4096, 11264, 4096)
"""Bytes of each gather of a layer."""
GIGABIT = LinkSpeed(round_trip_s=400e-6, bytes_per_s=118e6)
"""Ordinary Ethernet: 200 us from program to program."""
LOOPBACK = LinkSpeed(round_trip_s=150e-6, bytes_per_s=2e9)
THUNDERBOLT = LinkSpeed(round_trip_s=120e-6, bytes_per_s=1.2e9)


def model() -> ModelShape:
    """1.1 thousand million parameters in bfloat16, as TinyLlama has them."""
    made = shape(n_layers=LAYERS, layer_mib=84, head_mib=125, embedding_mib=125)
    gathers = Gathers(
        layers=(LAYER,) * LAYERS,
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
        (20, GIGABIT, True),
        (25, GIGABIT, False),
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
        assert placement.why.startswith("alone on n0 ")
        assert ", by layers " in placement.why
    else:
        assert [out.node for out in placement.left_out] == ["id-n1"]
        assert "each layer over n0+n1 " in placement.why
        assert f"({link.round_trip_s * 1e3:.2g} ms there and back, " in placement.why


def test_what_is_predicted_is_the_sum_of_its_parts() -> None:
    (first, second), of = nodes(2, 10), model()
    links = {(first.node, second.node): THUNDERBOLT}
    assert gather_s(THUNDERBOLT, 2, 4096) == pytest.approx(120e-6 + 2048 / 1.2e9)
    assert gather_s(THUNDERBOLT, 4, 4096) == pytest.approx(120e-6 + 3072 / 1.2e9)
    one = spanning(of, [first, second], links)
    assert one.speed is not None
    assert first.speed is not None
    gathers = sum(gather_s(THUNDERBOLT, 2, n) for n in LAYER)
    assert one.speed.layer_s == pytest.approx(first.speed.layer_s / 2 + gathers)
    placement = place_exactly(of, [one], links=links)
    assert placement.predicted_tok_s == pytest.approx(
        1 / (LAYERS * one.speed.layer_s + one.speed.embed_s + one.speed.head_s + 60e-6)
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
    gathers = sum(gather_s(LOOPBACK, 2, round(1.6 * size)) for size in LAYER)
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
    assert mixed.why.startswith("by layers ")
    assert ", layers " in mixed.why
    assert " over n0+n1 " in mixed.why


PART = LinkSpeed(round_trip_s=400e-6, bytes_per_s=118e6, gather_s=60e-6, gather_bytes_per_s=110e6)
"""Ordinary Ethernet, past the loops: a wait of 60 us."""


def test_measured_gathers_count_before_round_trips() -> None:
    assert gather_s(PART, 2, 4096) == pytest.approx(60e-6 + 2048 / 110e6)
    assert gather_s(PART, 2, 4096, 256) == pytest.approx(60e-6 + 256 * 2048 / 110e6)
    first, second = nodes(2, 50)
    unmeasured = {(first.node, second.node): replace_gather(PART)}
    slow, fast = (
        spanning(model(), [first, second], links).speed
        for links in (unmeasured, {(first.node, second.node): PART})
    )
    assert slow is not None
    assert fast is not None
    assert slow.layer_s - fast.layer_s == pytest.approx(4 * 340e-6, rel=0.02)
    assert weighed([first, second], PART).stages[0].shards == ("id-n1",)
    assert "(0.06 ms each, 110 MB/s)" in weighed([first, second], PART).why


def replace_gather(link: LinkSpeed) -> LinkSpeed:
    """The same link, whose gathers were not measured."""
    return LinkSpeed(round_trip_s=link.round_trip_s, bytes_per_s=link.bytes_per_s)


def test_the_slowest_gathers_count_where_all_were_measured() -> None:
    three, of = nodes(3, 50), model()
    a, b, c = (node.node for node in three)
    links = {(a, b): PART, (a, c): PART, (b, c): replace_gather(PART)}
    mixed = spanning(of, three, links).speed
    plain = spanning(of, three, {way: replace_gather(PART) for way in links}).speed
    assert mixed == plain
    slower = structs.replace(PART, gather_s=90e-6)
    measured = spanning(of, three, links | {(b, c): slower}).speed
    assert measured == spanning(of, three, dict.fromkeys(links, slower)).speed


def test_the_plan_says_all_three_figures() -> None:
    """Where it spans nodes, and why not where one node is as fast."""
    chosen = weighed(nodes(2, 50), PART).why
    alone, by_layers, spanned, gathers = chosen.split(", ", 3)
    assert alone.startswith("alone on n0 2")
    assert by_layers.startswith("by layers 2")
    assert spanned.startswith("each layer over n0+n1 ")
    assert "one node alone takes 41 ms" in gathers


def test_the_bundled_model_stays_on_one_node_and_the_plan_says_why() -> None:
    config = identify(DEFAULT_MODEL_PATH).config
    small = model_shape(config, DType.FLOAT32, context=512)
    pair = [candidate(f"n{n}", 8192, speed(0.08, 0.1)) for n in range(2)]
    loopback = structs.replace(LOOPBACK, gather_s=20e-6, gather_bytes_per_s=1e9)
    placement = weighed(pair, loopback, built=small)
    assert placement.stages[0].shards == ()
    assert placement.why.startswith("alone on n0: 1351 tok/s; split n0+n1: about 1")
    assert "; each layer over n0+n1 863.9 tokens/s: " in placement.why
    assert "its 32 gathers take 0.66 ms per token (0.02 ms each, 1000 MB/s)" in placement.why
    assert placement.why.endswith("one node alone takes 0.74 ms")


def test_nodes_that_were_busy_are_not_joined_by_themselves() -> None:
    first, second = nodes(2, 10)
    assert second.speed is not None
    busy = replace(second, speed=structs.replace(second.speed, is_steady=False))
    assert weighed([first, second], PART).stages[0].shards
    placement = weighed([first, busy], PART)
    assert not placement.stages[0].shards
    assert "some of them were busy when they were measured" in placement.why


@pytest.mark.parametrize(("gain", "spans"), [(1.09, False), (1.12, True)])
def test_one_answer_has_to_gain_a_tenth(gain: float, spans: bool) -> None:
    pair, of = nodes(2, 10), model()
    alone = place(of, pair[:1], {}).predicted_tok_s
    assert alone is not None
    whole = spanning(of, pair, {(pair[0].node, pair[1].node): free()})
    rest_s = 1 / (alone * gain) - 1 / (place_exactly(of, [whole]).predicted_tok_s or 0.0)
    link = LinkSpeed(
        round_trip_s=0.0, bytes_per_s=1.0, gather_s=rest_s / 90, gather_bytes_per_s=1e15
    )
    assert bool(weighed(pair, link).stages[0].shards) is spans


def free() -> LinkSpeed:
    """A link that costs nothing."""
    return LinkSpeed(round_trip_s=0.0, bytes_per_s=1e15)


@pytest.mark.parametrize("memory_mib", [8192, 300])
def test_few_placements_are_looked_at_for_many_nodes(
    memory_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 nodes, of which each holds the model, or eleven do together."""
    n_nodes: list[int] = []

    def counted(name: str) -> None:
        real = getattr(spans, name)

        def count(of: ModelShape, stages: list[CandidateNode], *more: Any, **named: Any) -> Any:
            n_nodes.append(len(stages))
            return real(of, stages, *more, **named)

        monkeypatch.setattr(spans, name, count)

    many = [candidate(f"n{n}", memory_mib, speed(8 + 0.3 * n, 10)) for n in range(30)]
    ids = [node.node for node in many]
    links = {(a, b): LOOPBACK for a in ids for b in ids if a != b}
    best = place(model(), many, links)
    counted("place")
    counted("place_exactly")
    placed = weigh_spans(model(), many, links, Objective.LATENCY, best, ids)
    assert placed.stages[0].shards
    assert len(n_nodes) < 80
    assert sum(n > 1 for n in n_nodes) <= 3
    assert max(n_nodes) <= MAX_SHARDS
