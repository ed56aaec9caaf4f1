"""How nodes divide into rings behind one head."""

from __future__ import annotations

from support.rings.clusters import candidate, equal_links, shape, speed

from shardnet.cluster.placement.figures import CandidateNode
from shardnet.cluster.placement.spans import MOST_EXACT, Division, divide


def divided(nodes: list[CandidateNode]) -> list[set[str]] | None:
    """The names in each ring, the best ring first."""
    division = divide(shape(), nodes, equal_links(nodes))
    return None if division is None else names(division)


def names(division: Division) -> list[set[str]]:
    return [{node.name for node in ring} for ring in division.rings]


def test_nodes_that_hold_the_model_alone_are_rings_and_it_is_said_why() -> None:
    nodes = [candidate(name, 500, speed(ms)) for name, ms in (("a", 3), ("b", 2))]
    assert divided(nodes) == [{"b"}, {"a"}]
    division = divide(shape(), nodes, equal_links(nodes))
    assert division is not None
    assert division.why.startswith("2 rings behind one head: b (62 tok/s), a (42 tok/s), about 104")
    assert "as one ring " in division.why


def test_small_nodes_join_to_rings_or_help_a_larger_one() -> None:
    pairs = [candidate(name, 60, speed(2)) for name in "abcd"]
    found = divided(pairs)
    assert found is not None
    assert sorted(map(len, found)) == [2, 2]
    helped = [*(candidate(name, 500, speed(2)) for name in "ab"), candidate("c", 60, speed(2))]
    found = divided(helped)
    assert found is not None
    assert sorted(map(len, found)) == [1, 2]
    assert {"a", "b", "c"} == set.union(*found)


def test_there_is_one_ring_where_several_would_not_pay_or_nothing_is_measured() -> None:
    assert divided([candidate(name, 60, speed(2)) for name in "abc"]) is None
    assert divided([candidate(name, 500, speed(2)) for name in "a"]) is None
    assert divided([candidate(name, 500) for name in "ab"]) is None
    # Both compute the LM head alike, and one is slow with layers: each does what it does well.
    unlike = [candidate(name, 500, speed(ms, head_ms=6)) for name, ms in (("a", 3), ("b", 1))]
    assert divided(unlike) is None


def test_many_nodes_are_divided_by_what_they_hold() -> None:
    alone = [candidate(f"n{i}", 500, speed(2)) for i in range(MOST_EXACT)]
    found = divided([*alone, *(candidate(f"s{i}", 60, speed(2)) for i in range(5))])
    assert found is not None
    assert sorted(map(len, found)) == [1] * MOST_EXACT + [2, 2]
