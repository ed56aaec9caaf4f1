"""How memory is divided between models: what is needed, who makes room, who makes up for a loss."""

from __future__ import annotations

import pytest

from shardnet.cluster.household.allotment import (
    Loaded,
    is_better_alone,
    made_up,
    needed,
    victim,
)
from shardnet.types import NodeId
from shardnet.wire.messages.plans import PlannedShard, PlannedStage, PlanReply

GIB = 1 << 30


def plan(*stages: PlannedStage, tok_s: float | None = None, **more: int) -> PlanReply:
    return PlanReply(
        request=1,
        model="m",
        model_id="0" * 64,
        dtype="float32",
        wire_dtype="float32",
        context=64,
        stages=list(stages),
        predicted_tok_s=tok_s,
        why="",
        **more,
    )


def stage(rank: int, node: str, weight_bytes: int, kv_bytes: int, *shards: str) -> PlannedStage:
    return PlannedStage(
        rank=rank,
        node=node,
        name=node,
        address=f"{node}:1",
        layers=(0, 1),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        working_bytes=GIB // 8,
        shards=[PlannedShard(node=each, name=each, address=f"{each}:1") for each in shards],
    )


def test_a_node_needs_weights_and_so_many_contexts_and_what_computing_takes() -> None:
    found = needed(
        plan(stage(0, "a", 4 * GIB, GIB, "b"), stage(1, "c", GIB, GIB // 2), mtp_bytes=GIB), 4
    )
    least = {"a": 4 * GIB + GIB // 8, "b": 4 * GIB + GIB // 8, "c": 4 * GIB + GIB // 8}
    assert found.keys() == least.keys()
    for node, n_bytes in least.items():
        assert n_bytes < found[NodeId(node)] < n_bytes * 1.02


@pytest.mark.parametrize(
    ("alone", "shared", "is_better"),
    [
        ((10.0,), (19.0,), True),
        ((10.0,), (21.0,), False),
        ((10.0,), None, True),
        (None, (10.0,), False),
        (None, None, False),
        ((None,), (10.0,), True),
    ],
)
def test_nodes_for_itself_are_worth_half_the_speed(
    alone: tuple[float | None] | None, shared: tuple[float | None] | None, is_better: bool
) -> None:
    plans = [None if tok_s is None else plan(tok_s=tok_s[0]) for tok_s in (alone, shared)]
    assert is_better_alone(*plans) == is_better


def loaded(name: str, priority: int = 0, asked_s: float = 0.0, **more: bool) -> Loaded:
    states = {"kept": False, "is_in_use": False} | more
    return Loaded(name=name, priority=priority, asked_s=asked_s, **states)


def test_the_least_important_of_those_that_nobody_uses_makes_room() -> None:
    kept, used = loaded("kept", -9, kept=True), loaded("used", -9, is_in_use=True)
    old, new, dear = loaded("old", 1, 1.0), loaded("new", 1, 2.0), loaded("dear", 5)
    assert victim([kept, used, new, old, dear]) == "old"
    assert victim([kept, used, new, dear]) == "new"
    assert victim([kept, used]) == ""


def test_for_a_lost_node_a_kept_model_of_less_importance_goes_too() -> None:
    kept, dear = loaded("kept", 1, kept=True), loaded("dear", 5)
    assert victim([kept, dear], below=5) == "kept"
    assert victim([kept, dear], below=1) == ""


def test_what_a_lost_node_had_is_divided_by_what_others_have_free() -> None:
    free = {NodeId("a"): 6 * GIB, NodeId("b"): 2 * GIB, NodeId("c"): 0}
    assert made_up(4 * GIB, free) == {"a": 3 * GIB, "b": GIB, "c": 0}
    assert made_up(100 * GIB, free) == free
    assert made_up(GIB, {}) == {}
