"""What a plan says of itself: the figures a person needs, and numbers that can be followed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from msgspec import structs
from support.rings.clusters import MIB, candidate, equal_links, shape, speed

from shardnet.cluster.placement.figures import CandidateNode, Links, Objective
from shardnet.cluster.placement.placement import place, place_exactly
from shardnet.cluster.placement.words import size
from shardnet.errors import PlanError


def lan(*nodes: CandidateNode) -> Links:
    """Each hop takes 4 ms, and a little for its bytes."""
    return equal_links(nodes, round_trip_ms=8)


def test_a_split_says_what_it_costs_and_why_it_must_be() -> None:
    a, b = candidate("A", 60, speed(6, head_ms=5)), candidate("B", 60, speed(5, head_ms=4))
    assert place(shape(), [a, b], lan(a, b)).why == (
        "alone on B: 23 tok/s; split A+B: about 18 (A 18 ms + wire 8 ms + B 29 ms). "
        "Split only because it does not fit on B."
    )


def test_a_whole_model_says_what_the_best_split_would_make() -> None:
    a, b, c = (candidate(name, 500, speed(ms)) for name, ms in (("A", 6), ("B", 5), ("C", 30)))
    placement = place(shape(), [a, b, c], lan(a, b, c))
    assert placement.why == (
        "alone on B: 25 tok/s; split A+B: about 20 (A 6 ms + wire 8 ms + B 35 ms)"
    )
    assert {out.node: out.why for out in placement.left_out} == {
        a.node: "with it 21 tok/s, without 25",
        c.node: "with it 14 tok/s, without 25",
    }


def test_a_node_alone_says_just_its_rate() -> None:
    assert place(shape(), [candidate("A", 500, speed(50))]).why == "alone on A: 2.5 tok/s"


@pytest.mark.parametrize(
    ("memory_mib", "alone"), [(500, "B: 14 tok/s"), (30, "B, where it does not fit: 14 tok/s")]
)
def test_a_split_that_is_faster_says_so(memory_mib: int, alone: str) -> None:
    a = candidate("A", 500, speed(6, head_ms=40))
    b = candidate("B", memory_mib, speed(9, head_ms=1))
    assert place(shape(), [a, b], lan(a, b)).why == (
        f"split A+B: about 17 (A 42 ms + wire 8 ms + B 10 ms); alone on {alone}"
    )


def test_for_throughput_the_slowest_stage_is_named() -> None:
    a, b = candidate("A", 500, speed(6)), candidate("B", 500, speed(5))
    assert place(shape(), [a, b], lan(a, b), Objective.THROUGHPUT).why == (
        "split B+A: about 42 (A is the slowest stage: 24 ms a step); alone on B: 25 tok/s"
    )


def test_a_node_that_changes_nothing_is_said_to() -> None:
    a, b = candidate("A", 500, speed(5)), candidate("B", 500, speed(5))
    placement = place(shape(), [a, b], lan(a, b))
    assert [out.why for out in placement.left_out] == ["no faster with it: 25 tok/s either way"]


def test_a_node_too_small_for_a_layer_is_told_what_one_needs() -> None:
    a, b = candidate("A", 500, speed(5)), candidate("B", 10, speed(1))
    placement = place(shape(), [a, b], lan(a, b))
    assert [out.why for out in placement.left_out] == [
        "its 10 MiB hold no layer: one needs 13 MiB here"
    ]


def test_a_node_too_small_for_either_end_of_the_model_is_told_what_these_take() -> None:
    model = replace(shape(), embedding_bytes=200 * MIB, head_bytes=300 * MIB)
    a, b = candidate("A", 800, speed(5)), candidate("B", 60, speed(1))
    assert [out.why for out in place(model, [a, b], lan(a, b)).left_out] == [
        "its 60 MiB hold no layer beside the embedding (200 MiB) or the LM head (300 MiB)"
    ]


def test_a_node_that_fits_the_model_and_lacks_it_is_not_said_to_be_too_small() -> None:
    a = replace(candidate("A", 500, speed(5)), lacking=(2**40,) * 8, fetch_bytes_per_s=1e6)
    b, c = candidate("B", 60, speed(9)), candidate("C", 60, speed(9))
    why = place(shape(), [b, a, c], lan(a, b, c)).why
    assert why.startswith("split C+B: about 12 (C 36 ms + wire 8 ms + B 36 ms); alone on A: 25 tok")
    assert "faster, 25 tok/s, would be A, but 8192.00 GiB would have to be fetched first" in why


def test_what_was_not_measured_is_named() -> None:
    a, b = candidate("A", 60, speed(6)), candidate("B", 60)
    assert place(shape(), [a, b]).why == (
        "alone on A: 21 tok/s; split A+B: about 20 (A 24 ms + wire 1.3 ms + B 24 ms). "
        "Split only because it does not fit on A. (not measured: B) "
        "(wire not measured: A to B, B to A)"
    )
    assert place_exactly(shape(), [a, b], links=lan(a, b)).why == (
        "the nodes that were named, layers divided by bytes read per step (not measured: B)"
    )
    assert place(shape(), [candidate("A", 500)]).why.endswith("(nothing is measured yet)")


def test_named_nodes_say_when_one_of_them_would_be_faster_alone() -> None:
    a, b = candidate("A", 60, speed(5)), candidate("B", 500, speed(5))
    assert place_exactly(shape(), [a, b], links=lan(a, b)).why == (
        "the nodes that were named, layers divided by measured time: about 21 tok/s "
        "(A 20 ms + wire 8 ms + B 20 ms); alone on B: 25 tok/s"
    )


def test_what_does_not_fit_says_what_lacks_where_and_the_ways_out() -> None:
    model = shape(n_blocks=8)
    nodes = [candidate("A", 45), candidate("B", 60)]
    with pytest.raises(PlanError) as refused:
        place(model, nodes)
    assert str(refused.value) == (
        "the model needs 155 MiB with a context of 2048 and does not fit: A has 45 MiB, room for 2 "
        "layers; B has 60 MiB, room for 3 layers; together 5 of 8 layers with embedding and LM "
        "head. Ways out: use --context 256 or add a node of 57 MiB or give B --memory 114MiB"
    )
    assert place(shape(n_blocks=1), nodes)
    with pytest.raises(PlanError):
        place(shape(n_blocks=2), nodes)
    assert place(model, [*nodes, candidate("C", 57)])
    assert place(model, [nodes[0], candidate("B", 114)])


def test_a_ring_that_does_not_fit_says_so_of_its_own_order() -> None:
    nodes = [candidate("A", 20), candidate("B", 30)]
    with pytest.raises(
        PlanError, match=r"A has 20 MiB, room for 1 layer; B .* 2 layers; together 3"
    ):
        place_exactly(shape(), nodes)


@pytest.mark.parametrize(
    ("embedding_mib", "head_mib", "lack"),
    [(200, 0, "beside the embedding (200 MiB)"), (0, 200, "beside the LM head (200 MiB)")],
)
def test_a_part_that_fits_nowhere_is_named(embedding_mib: int, head_mib: int, lack: str) -> None:
    model = shape(embedding_mib=embedding_mib, head_mib=head_mib)
    with pytest.raises(PlanError, match=re.escape(f"none has room for a layer {lack}")):
        place(model, [candidate(f"n{i}", 100, speed(1)) for i in range(3)])


def test_many_nodes_do_not_make_a_sentence_of_many_pages() -> None:
    nodes = [candidate(f"node-{i}", 10) for i in range(32)]
    with pytest.raises(PlanError, match="and 24 more nodes") as refused:
        place(shape(n_layers=64), nodes)
    assert len(str(refused.value)) < 1000
    nodes = [candidate(f"node-{i}", 30, speed(2)) for i in range(24)]
    placement = place(shape(n_layers=44), nodes, lan(*nodes))
    assert len(placement.stages) == 22
    assert re.search(r"\+node-\d+\+14 more: about \d.* \+ 14 more \d+ ms\)", placement.why)


def test_sizes_are_rounded_up() -> None:
    assert size(10 * MIB) == "10 MiB"
    assert size(10 * MIB + 1) == "11 MiB"
    assert size(2**30) == "1.00 GiB"
    assert size(2**30 + 1) == "1.01 GiB"


def test_what_was_measured_while_busy_is_named() -> None:
    busy = structs.replace(speed(6), is_steady=False)
    a, b = candidate("A", 60, busy), candidate("B", 60, speed(6))
    links = {way: structs.replace(link, is_steady=False) for way, link in lan(a, b).items()}
    words = " (measured while busy, so a guess: A, A to B, B to A)"
    assert place(shape(), [a, b], links).why.endswith(words)
    slow, fast = candidate("A", 500, busy), candidate("B", 500, speed(5))
    placement = place(shape(), [slow, fast], lan(slow, fast))
    assert "busy" not in placement.why
    assert [out.why for out in placement.left_out] == [
        "with it 21 tok/s, without 25 (it was measured while busy)"
    ]


def test_what_a_token_costs_its_head_counts_in_every_ring() -> None:
    a, b = candidate("A", 60, structs.replace(speed(6), step_s=0.01)), candidate("B", 60, speed(6))
    assert place_exactly(shape(), [a, b], links=lan(a, b)).predicted_tok_s == pytest.approx(
        1 / (1 / (place_exactly(shape(), [b, a], links=lan(a, b)).predicted_tok_s or 0) + 0.01)
    )
