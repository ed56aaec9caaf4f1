"""Who has a model, and who has another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.checkpoint.replica import TensorPart
from shardnet.cluster.sharing.replica_sources import (
    FetchPlan,
    ReplicaSource,
    agreed,
    check_same_model,
    choose_sources,
)
from shardnet.errors import PlanError
from shardnet.types import LayerRange, NodeId

ONE, OTHER = "a" * 64, "b" * 64


SOURCES = ("anna", "bert", "cleo")


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
    partly = replace(holder("partly"), is_complete=False, but_tables=(LayerRange(0, 2),))
    partly = replace(partly, layers=(LayerRange(1, 2),))
    tables = tuple(size // 2 for size in sizes)
    assert partly.lacking_bytes(ONE, sizes, tables) == (tables[0], 0, *sizes[2:])
    assert partly.lacking_bytes(OTHER, sizes, tables) == sizes
    assert holder("other", OTHER).lacking_bytes(ONE, sizes) == sizes
    part = replace(holder("part", complete=False), layers=(LayerRange(0, 1), LayerRange(2, 3)))
    assert part.lacking_bytes(ONE, sizes) == (0, 10, 0, 30)


def part(number: int, tensor: str = "t") -> TensorPart:
    return TensorPart(tensor=tensor, number=number, file="f", offset=0, size_bytes=1)


def plan(n_parts: int, sources: tuple[str, ...] = SOURCES) -> FetchPlan:
    made = FetchPlan(sources)
    for number in range(n_parts):
        made.want(part(number))
    return made


@given(st.data())
def test_whatever_happens_every_part_is_settled_once_or_is_out_of_reach(
    data: st.DataObject,
) -> None:
    """Sources are lost, leave and refuse at random; whoever is idle takes what there is."""
    n_parts = data.draw(st.integers(0, 12))
    work = plan(n_parts)
    work.close()
    asked: dict[str, list[TensorPart]] = {source: [] for source in SOURCES}
    settled: list[TensorPart] = []
    idle: set[str] = set()
    n_lost = 0
    while not (work.finished or work.unobtainable()):
        source = data.draw(st.sampled_from(sorted(work.sources - idle)))
        while len(asked[source]) < 2 and (taken := work.take(source, len(asked[source]))):
            asked[source].append(taken)
        if not asked[source]:
            idle.add(source)
            assert idle != work.sources, "everybody waits for something else"
            continue
        idle.clear()
        # Whoever is lost may come again and again: in the end something comes.
        kinds = ["come", "come", "come", "refuse", "lost", "leave"] if n_lost < 100 else ["come"]
        match data.draw(st.sampled_from(kinds)):
            case "come":
                first = asked[source].pop(0)
                if work.begin(first, source):
                    work.settled(first)
                    settled.append(first)
            case "refuse":
                first = asked[source].pop(0)
                if work.begin(first, source):
                    work.bar(first)
            case "lost":
                n_lost += 1
                asked[source].clear()
                work.lost(source)
            case "leave":
                asked[source].clear()
                work.drop_source(source)
    assert len(set(settled)) == len(settled)
    if work.finished:
        assert set(settled) == {part(number) for number in range(n_parts)}
    else:
        assert work.unobtainable() not in settled


def test_parts_are_divided_among_those_who_ask() -> None:
    work = plan(4)
    assert [work.take(s, 0) for s in ("anna", "bert", "anna")] == [part(0), part(1), part(2)]
    assert work.has_waiting


def test_an_idle_source_takes_over_what_another_has_not_begun() -> None:
    work = plan(2)
    work.close()
    slow = [work.take("anna", 0), work.take("anna", 1)]
    assert slow == [part(0), part(1)]
    assert work.begin(part(0), "anna")
    assert work.take("bert", 1) is None, "it has something to do"
    assert work.take("bert", 0) == part(1)
    assert work.begin(part(1), "bert")
    assert not work.begin(part(1), "anna")
    assert work.take("cleo", 0) is None, "both have begun"
    work.lost("anna")
    assert work.take("cleo", 0) == part(0)
    work.settled(part(0))
    work.settled(part(1))
    assert work.finished


def test_a_part_that_all_have_refused_is_out_of_reach() -> None:
    work = plan(1, ("anna", "bert"))
    for source in ("anna", "bert"):
        assert work.unobtainable() is None
        assert work.take(source, 0) == part(0)
        work.bar(part(0))
    assert work.unobtainable() == part(0)
    assert work.take("anna", 0) is None


def test_a_plan_that_may_grow_is_not_finished() -> None:
    work = plan(0)
    assert not work.finished
    work.close()
    assert work.finished
