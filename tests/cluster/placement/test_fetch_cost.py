"""What has to be fetched first counts in the choice of a ring, and in nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.rings.clusters import candidate, equal_links, shape, speed

from shardnet.cluster.placement.estimate import FETCH_STEPS
from shardnet.cluster.placement.figures import CandidateNode, Objective
from shardnet.cluster.placement.placement import place, place_exactly
from shardnet.types import LayerRange

GB = 10**9
LAYERS = (2 * GB,) * 8


def lacking(layer_ms: float, layers: tuple[int, ...] = LAYERS) -> CandidateNode:
    """A node that lacks the model, 16 GB, on a network of 1 Gbit/s: about two minutes."""
    node = candidate("lacking", 500, speed(layer_ms))
    return replace(node, lacking=layers, fetch_bytes_per_s=125e6)


HOLDER = candidate("holder", 500, speed(10))


def test_a_model_is_not_copied_for_a_tenth_more_speed() -> None:
    nodes = [HOLDER, lacking(9)]
    placement = place(shape(), nodes, equal_links(nodes))
    assert [stage.node for stage in placement.stages] == ["id-holder"]
    assert placement.predicted_tok_s == pytest.approx(12.5)
    assert placement.why.endswith(
        "; faster, 14 tok/s, would be lacking, but 14.91 GiB would have to be fetched first in "
        "about 2 min: name these nodes if that is worth it"
    )
    [out] = placement.left_out
    assert out.why == "with it 14 tok/s, without 12, but it lacks the model"


def test_it_is_copied_where_that_pays_within_so_many_tokens() -> None:
    fetch_ms = sum(LAYERS) / 125e6 / FETCH_STEPS[Objective.LATENCY] * 1e3
    for more_ms, node in ((-1, "id-lacking"), (1, "id-holder")):
        nodes = [HOLDER, lacking((80 - fetch_ms + more_ms) / 8)]
        placement = place(shape(), nodes, equal_links(nodes, round_trip_ms=200))
        assert [stage.node for stage in placement.stages] == [node]


@pytest.mark.parametrize("objective", Objective)
def test_what_is_fetched_is_said_and_slows_no_stage(objective: Objective) -> None:
    nodes = [HOLDER, lacking(1)]
    placement = place(shape(), nodes, equal_links(nodes), objective)
    [stage] = [stage for stage in placement.stages if stage.node == "id-lacking"]
    assert stage.fetch_bytes == len(stage.layers) * 2 * GB
    assert stage.fetch_s == pytest.approx(stage.fetch_bytes / 125e6)
    assert ("fetched" in placement.why) is (stage.layers != shape().whole)
    assert stage.compute_s == pytest.approx(len(stage.layers) * 0.001), "it is no slower for that"


def test_a_ring_that_was_named_is_taken_and_says_what_it_fetches() -> None:
    nodes = [HOLDER, lacking(9, layers=(*LAYERS[:6], 0, 2 * GB))]
    placement = place_exactly(
        shape(), nodes, [LayerRange(0, 5), LayerRange(5, 8)], equal_links(nodes)
    )
    assert [stage.fetch_bytes for stage in placement.stages] == [0, 4 * GB]
    assert [stage.fetch_s for stage in placement.stages] == [0, pytest.approx(32)]


def test_without_anything_to_fetch_nothing_changes() -> None:
    nodes = [HOLDER, lacking(9, layers=())]
    assert [stage.node for stage in place(shape(), nodes, equal_links(nodes)).stages] == [
        "id-lacking"
    ]


def test_tables_that_do_not_fit_the_disk_are_not_fetched() -> None:
    """They are where all that lacks of the stage is more than there is room for."""
    node = replace(lacking(9), table_bytes=(GB, 0) * 4, room_bytes=7 * GB)
    ends = (0, 2, 4, 8)
    ranges = [LayerRange(*ends[n : n + 2]) for n in range(3)]
    assert [node.fetch_bytes(layers) for layers in ranges] == [4 * GB, 4 * GB, 6 * GB]
    nodes = [HOLDER, node]
    split = [LayerRange(0, 4), LayerRange(4, 8)]
    stages = place_exactly(shape(), nodes, split, equal_links(nodes)).stages
    assert [stage.fetch_bytes for stage in stages] == [0, 6 * GB]
    assert [stage.asks_rows for stage in stages] == [False, True]
    for other in (replace(node, room_bytes=None), replace(node, table_bytes=())):
        assert other.fetch_bytes(split[1]) == 8 * GB
    nodes = [HOLDER, replace(node, table_bytes=LAYERS)]
    assert [stage.node for stage in place(shape(), nodes, equal_links(nodes)).stages] == [
        "id-lacking"
    ], "it has nothing to fetch, and is a tenth faster"
