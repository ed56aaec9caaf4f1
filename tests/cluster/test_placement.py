"""The planner: partitions that fit, balanced by bytes, and reasons for what it refuses."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.placement import Candidate, ModelShape, place, place_exactly
from shardnet.errors import PlanError
from shardnet.types import LayerRange, NodeId

MIB = 2**20


def shape(n_layers: int = 8, head_mib: int = 2, kv_mib: int = 1) -> ModelShape:
    return ModelShape(
        n_layers=n_layers,
        layer_bytes=10 * MIB,
        embedding_bytes=4 * MIB,
        head_bytes=head_mib * MIB,
        kv_layer_bytes=kv_mib * MIB,
        activation_bytes=MIB,
    )


def candidates(*memory_mib: int) -> list[Candidate]:
    return [
        Candidate(node=NodeId(f"n{i}"), name=f"node-{i}", memory_bytes=mib * MIB)
        for i, mib in enumerate(memory_mib)
    ]


shapes = st.builds(
    shape,
    n_layers=st.integers(1, 10),
    head_mib=st.integers(0, 40),
    kv_mib=st.integers(0, 5),
)


@given(model=shapes, memory=st.lists(st.integers(1, 130), min_size=1, max_size=4))
def test_an_exact_ring_is_a_partition_that_fits_and_no_other_is_better_balanced(
    model: ModelShape, memory: list[int]
) -> None:
    ring = candidates(*memory)
    every = list(all_splits(model, ring))
    try:
        placement = place_exactly(model, ring)
    except PlanError:
        assert not every
        return
    ranges = [stage.layers for stage in placement.stages]
    assert [layer for part in ranges for layer in part] == list(range(model.n_layers))
    for stage, candidate in zip(placement.stages, ring, strict=True):
        assert stage.node == candidate.node
        assert model.memory_bytes(stage.layers) <= candidate.memory_bytes
    assert largest(model, ranges) == min(largest(model, split) for split in every)


def all_splits(model: ModelShape, ring: list[Candidate]) -> list[list[LayerRange]]:
    found = []
    for cuts in combinations(range(1, model.n_layers), len(ring) - 1):
        edges = [0, *cuts, model.n_layers]
        split = [LayerRange(a, b) for a, b in pairwise(edges)]
        fits = (model.memory_bytes(p) <= c.memory_bytes for p, c in zip(split, ring, strict=True))
        if all(fits):
            found.append(split)
    return found


def largest(model: ModelShape, split: list[LayerRange]) -> int:
    return max(model.read_bytes(part) for part in split)


def test_the_lm_head_counts_as_the_layers_it_weighs() -> None:
    placement = place_exactly(shape(n_layers=8, head_mib=20), candidates(1000, 1000))
    assert [len(stage.layers) for stage in placement.stages] == [5, 3]


def test_a_model_that_fits_one_node_is_not_split_and_the_rest_is_told_why() -> None:
    placement = place(shape(), candidates(200, 500, 500))
    assert [stage.node for stage in placement.stages] == ["n0"]
    assert [out.node for out in placement.left_out] == ["n1", "n2"]
    assert all("every hop costs time" in out.why for out in placement.left_out)


def test_a_bigger_node_takes_it_whole_when_the_asked_one_is_too_small() -> None:
    placement = place(shape(), candidates(50, 120, 300))
    assert [stage.node for stage in placement.stages] == ["n2"]


def test_the_shortest_ring_that_fits_begins_with_the_asked_node() -> None:
    placement = place(shape(), candidates(50, 55, 60))
    assert [stage.node for stage in placement.stages] == ["n0", "n2"]
    assert "no 1 of these nodes" in placement.why
    assert [out.node for out in placement.left_out] == ["n1"]


def test_what_fits_nowhere_is_refused_with_figures() -> None:
    with pytest.raises(PlanError, match=r"needs 0\.09 GiB .* node-0 0\.01 GiB, node-1 0\.02 GiB"):
        place(shape(), candidates(10, 20))
    with pytest.raises(PlanError, match="node-0 lacks"):
        place_exactly(shape(), candidates(10, 100), [LayerRange(0, 4), LayerRange(4, 8)])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([LayerRange(0, 8)], "1 ranges for 2 nodes"),
        ([LayerRange(0, 4), LayerRange(4, 7)], "ends at 7 and the model has 8"),
    ],
)
def test_layers_that_do_not_match_are_refused(layers: list[LayerRange], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place_exactly(shape(), candidates(500, 500), layers)


def test_more_nodes_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 nodes were named and the model has 2 layers"):
        place_exactly(shape(n_layers=2), candidates(500, 500, 500))
