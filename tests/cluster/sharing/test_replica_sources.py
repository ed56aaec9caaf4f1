"""Who has a model, and who has another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardnet.cluster.sharing.replica_sources import (
    ReplicaSource,
    agreed,
    check_same_model,
    choose_sources,
)
from shardnet.errors import PlanError
from shardnet.types import LayerRange, NodeId

ONE, OTHER = "a" * 64, "b" * 64


def holder(
    name: str, model_id: str = ONE, *, complete: bool = True, address: str = ""
) -> ReplicaSource:
    return ReplicaSource(
        node=NodeId(name),
        name=name,
        address=address or f"{name}:1",
        model_id=model_id,
        is_complete=complete,
    )


NOTHING = holder("none", "", complete=False)


def test_nodes_with_different_models_are_both_named_with_both_ids() -> None:
    check_same_model([holder("near"), NOTHING, holder("far")])
    check_same_model([holder("near"), holder("far", OTHER, complete=False)])
    with pytest.raises(PlanError, match="near has aaaaaaaaaaaa, far has bbbbbbbbbbbb"):
        check_same_model([holder("near"), holder("good"), holder("far", OTHER)])


def test_a_checkpoint_folder_counts_before_parts() -> None:
    whole, old_parts = holder("whole"), holder("parts", OTHER, complete=False)
    assert agreed([old_parts, NOTHING, whole]) == [whole]
    assert agreed([NOTHING, old_parts]) == [old_parts]
    assert agreed([NOTHING]) == []
    with pytest.raises(PlanError, match="parts and more have parts of different models"):
        agreed([old_parts, holder("more", complete=False)])


def test_sources_are_those_with_the_model_whole_ones_first() -> None:
    holders = [
        holder("parts", complete=False),
        NOTHING,
        holder("other", OTHER),
        holder("whole"),
        holder("again", address="whole:1"),
        holder("second"),
    ]
    assert choose_sources(ONE, holders, limit=9) == ["whole:1", "second:1", "parts:1"]
    assert choose_sources(ONE, holders, limit=1) == ["whole:1"]


def test_what_a_node_lacks_is_counted_by_layer() -> None:
    sizes = (40, 10, 10, 30)
    assert holder("whole").lacking_bytes(ONE, sizes) == ()
    assert NOTHING.lacking_bytes(ONE, sizes) == sizes
    assert holder("other", OTHER).lacking_bytes(ONE, sizes) == sizes
    part = replace(holder("part", complete=False), layers=(LayerRange(0, 1), LayerRange(2, 3)))
    assert part.lacking_bytes(ONE, sizes) == (0, 10, 0, 30)
