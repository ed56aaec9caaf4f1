"""The planner's two entries: partitions that fit, from measured figures and from bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rings.clusters import (
    MIB,
    candidate,
    equal_links,
    fits,
    naive_cost_s,
    random_cluster,
    shape,
    speed,
    splits,
)

from shardnet.cluster.placement.figures import (
    CandidateNode,
    LinkSpeed,
    ModelShape,
    Objective,
    Placement,
    StageSpeed,
)
from shardnet.cluster.placement.placement import place, place_exactly
from shardnet.errors import PlanError, UsageError
from shardnet.types import LayerRange

both = pytest.mark.parametrize("objective", list(Objective))


def unmeasured(*memory_mib: int) -> list[CandidateNode]:
    return [candidate(f"n{i}", mib) for i, mib in enumerate(memory_mib)]


def names(placement: Placement) -> list[str]:
    return [stage.node.removeprefix("id-") for stage in placement.stages]


def counts(placement: Placement) -> list[int]:
    return [len(stage.layers) for stage in placement.stages]


def assert_partition(
    model: ModelShape, candidates: Sequence[CandidateNode], placement: Placement
) -> None:
    layers = [layer for stage in placement.stages for layer in stage.layers]
    assert layers == list(range(model.n_layers))
    by_node = {node.node: node for node in candidates}
    for stage in placement.stages:
        assert model.memory_bytes(stage.layers) <= by_node[stage.node].memory_bytes
    used = [stage.node for stage in placement.stages]
    left_out = [out.node for out in placement.left_out]
    assert sorted([*used, *left_out]) == sorted(by_node)


def read_bytes(model: ModelShape, layers: LayerRange) -> int:
    return len(layers) * model.layer_bytes + (layers.end == model.n_layers) * model.head_bytes


shapes = st.builds(
    shape,
    n_layers=st.integers(1, 10),
    head_mib=st.integers(0, 40),
    kv_mib=st.integers(0, 5),
)
memories = st.lists(st.integers(1, 130), min_size=1, max_size=4)


@given(model=shapes, memory=memories)
def test_an_unmeasured_ring_is_divided_so_that_the_largest_reading_is_least(
    model: ModelShape, memory: list[int]
) -> None:
    ring = unmeasured(*memory)
    every = [split for split in splits(model, len(ring)) if fits(model, ring, split)]
    try:
        placement = place_exactly(model, ring)
    except PlanError:
        assert not every
        return
    assert_partition(model, ring, placement)
    assert [stage.node for stage in placement.stages] == [node.node for node in ring]
    largest = max(read_bytes(model, stage.layers) for stage in placement.stages)
    assert largest == min(max(read_bytes(model, part) for part in split) for split in every)


@given(model=shapes, memory=memories, data=st.data())
def test_a_measured_ring_is_divided_so_that_the_slowest_stage_is_fastest(
    model: ModelShape, memory: list[int], data: st.DataObject
) -> None:
    times_ms = st.floats(0.1, 20)
    ring = [
        candidate(f"n{i}", mib, speed(data.draw(times_ms), data.draw(times_ms)))
        for i, mib in enumerate(memory)
    ]
    links = equal_links(ring)
    every = [split for split in splits(model, len(ring)) if fits(model, ring, split)]
    try:
        placement = place_exactly(model, ring, links=links, objective=Objective.THROUGHPUT)
    except PlanError:
        assert not every
        return
    assert_partition(model, ring, placement)
    slowest_s = min(naive_cost_s(model, ring, s, links, Objective.THROUGHPUT) for s in every)
    assert placement.predicted_tok_s == pytest.approx(1 / slowest_s)


@both
def test_what_is_predicted_is_what_the_stages_and_hops_add_up_to(objective: Objective) -> None:
    for seed in range(12):
        model, nodes, links = random_cluster(seed, n_nodes=5, n_layers=24)
        try:
            placement = place(model, nodes, links, objective)
        except PlanError:
            continue
        assert_partition(model, nodes, placement)
        by_node = {node.node: node for node in nodes}
        ring = [by_node[stage.node] for stage in placement.stages]
        split = [stage.layers for stage in placement.stages]
        cost_s = naive_cost_s(model, ring, split, links, objective)
        assert placement.predicted_tok_s == pytest.approx(1 / cost_s)
        if objective is Objective.LATENCY:
            parts = [(stage.compute_s or 0) + (stage.hop_s or 0) for stage in placement.stages]
            assert sum(parts) == pytest.approx(cost_s)


def test_the_fastest_node_gets_all_it_has_room_for_when_one_sequence_counts() -> None:
    nodes = [candidate("slow", 90, speed(4)), candidate("fast", 90, speed(2))]
    placement = place(shape(), nodes, equal_links(nodes))
    assert dict(zip(names(placement), counts(placement), strict=True)) == {"slow": 1, "fast": 7}


def test_equally_fast_nodes_share_evenly() -> None:
    nodes = [candidate("a", 90, speed(2)), candidate("b", 90, speed(2))]
    assert counts(place(shape(), nodes, equal_links(nodes))) == [4, 4]


def test_throughput_splits_what_latency_keeps_whole() -> None:
    nodes = [candidate("a", 500, speed(4)), candidate("b", 500, speed(4))]
    links = equal_links(nodes)
    assert names(place(shape(), nodes, links)) == ["a"]
    assert counts(place(shape(), nodes, links, Objective.THROUGHPUT)) == [4, 4]


def test_rank_0_is_whose_link_is_better_used_that_way_round() -> None:
    nodes = [candidate("a", 60, speed(2)), candidate("b", 60, speed(2))]
    slow, fast = (LinkSpeed(round_trip_s=0.001, bytes_per_s=x) for x in (1e5, 1e8))
    a, b = (node.node for node in nodes)
    assert names(place(shape(), nodes, {(a, b): slow, (b, a): fast})) == ["b", "a"]
    assert names(place(shape(), nodes, {(a, b): fast, (b, a): slow})) == ["a", "b"]


def test_among_equals_the_node_that_was_asked_is_the_head() -> None:
    alone = [candidate(name, 500, speed(2)) for name in "cab"]
    assert names(place(shape(), alone, equal_links(alone))) == ["c"]
    small = [candidate(name, 60, speed(2)) for name in "cab"]
    assert names(place(shape(), small, equal_links(small)))[0] == "c"


def test_a_node_without_figures_is_taken_to_be_as_slow_as_the_slowest() -> None:
    memory = {"new": 90, "slow": 90, "fast": 60, "mid": 60}
    figures = {"new": None, "slow": speed(4), "fast": speed(2), "mid": speed(3)}
    nodes = [candidate(name, mib, figures[name]) for name, mib in memory.items()]
    links = equal_links(nodes)
    placement = place(shape(), nodes, links)
    assert set(names(placement)) == {"fast", "mid"}
    assert placement.predicted_tok_s is not None
    placement = place(shape(), nodes[:2], links)
    assert names(placement) == ["new", "slow"]
    assert counts(placement) == [4, 4]
    assert placement.predicted_tok_s is None
    assert [stage.compute_s is None for stage in placement.stages].count(True) == 1


def test_a_link_without_figures_is_like_the_other_way_or_the_slowest() -> None:
    nodes = [candidate(name, 60, speed(2)) for name in "abc"]
    a, b, c = (node.node for node in nodes)
    slow, fast = (LinkSpeed(round_trip_s=x, bytes_per_s=1e8) for x in (0.1, 0.001))
    placement = place(shape(), nodes, {(a, c): slow, (b, c): fast})
    assert set(names(placement)) == {"b", "c"}
    assert placement.predicted_tok_s is not None
    placement = place(shape(), nodes[:2], {(c, b): slow})
    assert placement.predicted_tok_s is None
    assert placement.stages[0].hop_s is None


def test_the_lm_head_counts_as_the_layers_it_weighs() -> None:
    placement = place_exactly(shape(n_layers=8, head_mib=20), unmeasured(1000, 1000))
    assert counts(placement) == [5, 3]


def test_unmeasured_a_model_that_fits_one_node_is_not_split_and_the_rest_is_told_why() -> None:
    placement = place(shape(), unmeasured(200, 500, 500))
    assert names(placement) == ["n0"]
    assert [out.node for out in placement.left_out] == ["id-n1", "id-n2"]
    assert all("every hop costs time" in out.why for out in placement.left_out)
    assert placement.predicted_tok_s is None


def test_unmeasured_a_bigger_node_takes_it_whole_when_the_asked_one_is_too_small() -> None:
    assert names(place(shape(), unmeasured(50, 120, 300))) == ["n2"]


def test_unmeasured_the_shortest_ring_that_fits_begins_with_the_asked_node() -> None:
    placement = place(shape(), unmeasured(50, 55, 60))
    assert names(placement) == ["n0", "n2"]
    assert "no 1 of these nodes" in placement.why
    assert [out.node for out in placement.left_out] == ["id-n1"]


def test_named_layers_are_kept_whatever_was_measured() -> None:
    ring = [candidate("a", 500, speed(2)), candidate("b", 500, speed(4))]
    layers = [LayerRange(0, 2), LayerRange(2, 8)]
    placement = place_exactly(shape(), ring, layers, equal_links(ring))
    assert [stage.layers for stage in placement.stages] == layers
    assert [stage.compute_s for stage in placement.stages] == pytest.approx([0.004, 0.024])
    assert placement.predicted_tok_s == pytest.approx(1 / 0.030, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(0, 8)], "1 ranges for 2 nodes"),
        ([(0, 4), (4, 7)], "ends at 7 and the model has 8"),
        ([(0, 4), (4, 9)], "ends at 9 and the model has 8"),
        ([(1, 4), (4, 8)], "gap: range 1-4 should start at 0"),
        ([(0, 4), (5, 8)], "gap: range 5-8 should start at 4"),
        ([(0, 4), (3, 8)], "overlaps: range 3-8 should start at 4"),
        ([(0, 1), (1, 8)], "node n1 lacks 32 MiB for layers 1-7"),
    ],
)
def test_layers_that_do_not_match_are_refused(layers: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place_exactly(shape(), unmeasured(50, 50), [LayerRange(*part) for part in layers])


def test_more_nodes_than_layers_are_refused_when_named_and_left_out_else() -> None:
    model, nodes = shape(n_layers=2), [candidate(f"n{i}", 20, speed(2)) for i in range(3)]
    with pytest.raises(PlanError, match="3 nodes were named and the model has 2 layers"):
        place_exactly(model, nodes)
    assert len(place(model, nodes, equal_links(nodes)).left_out) == 1


@pytest.mark.parametrize(
    "figures",
    [
        lambda x: StageSpeed(layer_s=x, layer_256_s=1, embed_s=0, head_s=0),
        lambda x: StageSpeed(layer_s=1, layer_256_s=x, embed_s=0, head_s=0),
        lambda x: LinkSpeed(round_trip_s=0, bytes_per_s=x),
    ],
)
@pytest.mark.parametrize("value", [0.0, 5e-324, -1.0, math.nan, math.inf])
def test_figures_that_no_clock_measured_are_refused(
    figures: Callable[[float], StageSpeed | LinkSpeed], value: float
) -> None:
    with pytest.raises(UsageError, match="cannot have been measured"):
        figures(value)


def test_negative_times_are_refused() -> None:
    with pytest.raises(UsageError):
        speed(1, head_ms=-1)
    with pytest.raises(UsageError):
        speed(1, embed_ms=-1)
    with pytest.raises(UsageError):
        LinkSpeed(round_trip_s=-1, bytes_per_s=1)


def test_memory_and_kv_of_the_stages_are_told() -> None:
    placement = place_exactly(shape(kv_mib=3, n_blocks=2), unmeasured(500, 500))
    assert [stage.kv_bytes for stage in placement.stages] == [4 * 6 * MIB, 4 * 6 * MIB]
    assert [stage.weight_bytes for stage in placement.stages] == [44 * MIB, 42 * MIB]
