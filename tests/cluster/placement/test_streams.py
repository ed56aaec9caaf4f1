"""Plans with layers streamed from disk: memory kept, as little as it takes, honest times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.rings.clusters import MIB, candidate, equal_links, shape, speed

from shardnet.cluster.placement.figures import (
    NO_LINKS,
    CandidateNode,
    ModelShape,
    Objective,
    Placement,
    Streaming,
)
from shardnet.cluster.placement.placement import place, place_exactly, place_streaming
from shardnet.errors import PlanError
from shardnet.stage.estimate.memory_estimate import streamed_layers
from shardnet.types import LayerRange


def streamable(n_layers: int = 20, read_mib: int = 9) -> ModelShape:
    streaming = Streaming(
        read_bytes=read_mib * MIB, buffer_bytes=read_mib * MIB, working_bytes=2 * MIB
    )
    return replace(shape(n_layers=n_layers), streaming=streaming)


def node(name: str, memory_mib: int, disk_mib_s: float | None = 100.0) -> CandidateNode:
    disk = disk_mib_s * MIB if disk_mib_s else None
    return replace(candidate(name, memory_mib, speed(5.0, 2.0)), disk_bytes_per_s=disk)


def streamed(model: ModelShape, *nodes: CandidateNode, n: int | None = None) -> Placement | None:
    return place_streaming(model, nodes, exactly=False, n_streamed=n)


def test_a_lone_node_streams_as_few_as_make_it_fit() -> None:
    model, anna = streamable(), node("anna", 160)
    with pytest.raises(PlanError, match=r"use --stream-layers auto \(anna streams 11 of 20 layers"):
        place(model, [anna])
    plan = streamed(model, anna)
    assert plan is not None
    [stage] = plan.stages
    assert stage.n_streamed == 11
    assert model.memory_bytes(stage.layers, 11) <= anna.memory_bytes
    assert model.memory_bytes(stage.layers, 10) > anna.memory_bytes
    read_s = 11 * 9 / 100
    assert stage.compute_s == pytest.approx(read_s + 0.002)
    assert plan.predicted_tok_s == pytest.approx(1 / (read_s + 0.002))
    assert "anna streams 11 of 20 layers from disk, 99 MiB a step in about 990 ms" in plan.why
    assert "about 1 tok/s" in plan.why


@pytest.mark.parametrize("objective", Objective)
def test_a_ring_that_streams_nothing_takes_as_long_as_a_resident_one(objective: Objective) -> None:
    """With what a token costs its head beside computing."""
    nodes = [
        replace(node(name, 500), speed=structs.replace(speed(5), step_s=0.003))
        for name in ("anna", "bert")
    ]
    model, links = streamable(), equal_links(nodes)
    resident = place_exactly(model, nodes, None, links, objective)
    plan = place_streaming(model, nodes, None, links, objective, exactly=True, n_streamed=0)
    assert plan is not None
    assert plan.predicted_tok_s == pytest.approx(resident.predicted_tok_s)
    assert not plan.why.endswith(")")
    plan = place_streaming(model, nodes, None, NO_LINKS, objective, exactly=True, n_streamed=0)
    assert plan is not None
    assert plan.predicted_tok_s is None
    assert "(wire not measured: anna to bert, bert to anna)" in plan.why


def test_of_unlike_layers_those_that_are_streamed_count() -> None:
    """Every other layer is smaller: as in files that store some tensors in more bits."""
    alike = streamable()
    model = replace(alike, spared_bytes=(0, 3 * MIB) * 10)
    for n in (1, 2, 10, 20):
        streams = streamed_layers(model.whole, n)
        sizes = [9 * MIB - model.spared_bytes[layer] for layer in streams]
        saved = sum(sizes) - min(n, 2) * max(sizes)
        assert model.weight_bytes(model.whole, n) == model.weight_bytes(model.whole) - saved
    assert model.weight_bytes(model.whole, 20) == alike.weight_bytes(model.whole, 20)


def test_computing_hides_a_fast_disk() -> None:
    plan = streamed(streamable(), node("anna", 160, 1e5))
    assert plan is not None
    assert plan.stages[0].compute_s == pytest.approx(20 * 0.005 + 0.002)


def test_without_a_measured_disk_nothing_is_promised() -> None:
    plan = streamed(streamable(), node("anna", 160, None))
    assert plan is not None
    assert plan.predicted_tok_s is None
    assert plan.stages[0].compute_s is None
    assert "99 MiB a step" in plan.why
    assert "not everything is measured" in plan.why


def test_two_nodes_fill_their_memory_before_one_streams() -> None:
    nodes = [node("anna", 120), node("bert", 100)]
    plan = place_streaming(
        streamable(), nodes, links=equal_links(nodes), exactly=False, n_streamed=None
    )
    assert plan is not None
    assert len(plan.stages) == 2
    assert plan.predicted_tok_s is not None
    streams = [stage.n_streamed for stage in plan.stages]
    assert 0 < sum(streams) < 11
    assert min(streams) == 0


def test_so_many_are_streamed_as_are_asked_for() -> None:
    nodes = [node("anna", 1000), node("bert", 1000)]
    layers = [LayerRange(0, 4), LayerRange(4, 20)]
    plan = place_streaming(streamable(), nodes, layers, exactly=True, n_streamed=6)
    assert plan is not None
    assert [(stage.layers, stage.n_streamed) for stage in plan.stages] == [
        (layers[0], 4),
        (layers[1], 6),
    ]
    two = streamed(streamable(), nodes[0], n=2)
    assert two is not None
    assert "once: two fit its buffers" in two.why
    with pytest.raises(PlanError, match="gap"):
        place_streaming(
            streamable(), nodes, [LayerRange(0, 4), LayerRange(5, 20)], exactly=True, n_streamed=1
        )


def test_streaming_is_named_only_where_it_helps() -> None:
    assert streamed(streamable(), node("anna", 30)) is None
    with pytest.raises(PlanError) as made:
        place(shape(n_layers=20), [node("anna", 160)])
    assert "stream" not in str(made.value)


@given(
    memory=st.lists(st.integers(40, 400), min_size=1, max_size=4),
    n_layers=st.integers(4, 24),
    objective=st.sampled_from(Objective),
)
def test_streaming_plans_fit_and_are_whole(
    memory: list[int], n_layers: int, objective: Objective
) -> None:
    model = streamable(n_layers)
    nodes = [node(f"n{index}", mib, 50.0 + index) for index, mib in enumerate(memory)]
    for exactly in (False, True):
        plan = place_streaming(
            model, nodes, None, NO_LINKS, objective, exactly=exactly, n_streamed=None
        )
        if plan is None:
            assert exactly or all(
                model.memory_bytes(model.whole, n_layers) > c.memory_bytes for c in nodes
            )
            continue
        start = 0
        by_id = {c.node: c for c in nodes}
        for stage in plan.stages:
            assert stage.layers.start == start
            start = stage.layers.end
            needed = model.memory_bytes(stage.layers, stage.n_streamed)
            assert needed <= by_id[stage.node].memory_bytes
            assert not stage.n_streamed or (
                model.memory_bytes(stage.layers) > by_id[stage.node].memory_bytes
            )
        assert start == n_layers
