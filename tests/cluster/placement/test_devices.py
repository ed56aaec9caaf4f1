"""Devices of one node, simulated: layers cut over them or shared by them, and the reasons told."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from support.rings.clusters import MIB, candidate, equal_links, shape, speed, splits
from support.soak import cases

from shardnet.cluster.placement.devices import HANDOVER_S, as_one, cut_over, place_over_devices
from shardnet.cluster.placement.figures import (
    Gathers,
    HeldModel,
    LinkSpeed,
    NodeDevice,
    NodeDevices,
    Objective,
    StageSpeed,
)
from shardnet.cluster.placement.placement import place
from shardnet.types import LayerRange

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT
SHAPE = replace(
    shape(n_layers=24),
    gathers=Gathers(
        layers=((2048, 2048, 8192, 2048),) * 24, embedding_bytes=2048, head_bytes=60_000
    ),
)
FAST = LinkSpeed(round_trip_s=5e-6, bytes_per_s=5e9)
SLOW = LinkSpeed(round_trip_s=2e-3, bytes_per_s=5e9)
WHOLE_MIB = SHAPE.memory_bytes(SHAPE.whole) // MIB + 1


def device(name: str, memory_mib: int, measured: StageSpeed | None) -> NodeDevice:
    held = HeldModel(shape=SHAPE, memory_bytes=memory_mib * MIB)
    return NodeDevice(name=name, kind=name.partition(":")[0], held=held, speed=measured)


def groups(n: int, *, gather: LinkSpeed | None = FAST, memory_mib: int = 1000) -> NodeDevices:
    """Equal groups of cores."""
    cores = speed(2.0, head_ms=4.0, embed_ms=0.1)
    return NodeDevices(
        each=tuple(device(f"cpu:{i}", memory_mib, cores) for i in range(n)), gather=gather
    )


def planned(devices: NodeDevices, objective: Objective = LATENCY) -> tuple[str, list[str], float]:
    """Plan a node of these devices alone: the reason, each part, tokens per second."""
    node = replace(candidate("attic", 0), devices=devices)
    node = as_one(node, devices, None, 24, objective)
    placement = place_over_devices(
        lambda nodes: place(SHAPE, nodes, objective=objective), [node], 24, objective
    )
    [stage] = placement.stages
    parts = [f"{'+'.join(part.names)} {part.layers}" for part in stage.parts]
    return stage.parts_why, parts, placement.predicted_tok_s or 0.0


@pytest.mark.parametrize("n", [2, 4])
def test_equal_groups_share_layers_where_gathers_are_cheap(n: int) -> None:
    """One sequence is faster so, many are not: parts that follow each other need no gathers."""
    names = "+".join(f"cpu:{i}" for i in range(n))
    why, parts, tok_s = planned(groups(n))
    assert parts == [f"{names} 0-24"]
    assert why.startswith(f"each layer shared by {names}: about ")
    assert "its 98 gathers take about" in why
    cut = "cpu:0 (13) and cpu:1 (11)" if n == 2 else "cpu:0 (6) and cpu:1 (7) and cpu:2 (6)"
    assert f"; layers cut over {cut}" in why
    assert "; all layers on cpu:0: 52 ms" in why
    assert 0.9 * n < tok_s / (1 / 0.0521) < n
    why, parts, _ = planned(groups(n), THROUGHPUT)
    assert len(parts) == 2  # of four, two and two: the LM head is shared as well
    assert f"each layer shared by {names}" in why
    _, parts, _ = planned(groups(n, gather=SLOW))
    assert len(parts) == n  # ... and where gathers are slow
    if n == 4:  # an order is an order: two of four share each layer
        _, parts, _ = planned(replace(groups(4), tensor_parallel=2))
        assert parts == ["cpu:0+cpu:1 0-13", "cpu:2+cpu:3 13-24"]
    _, parts, _ = planned(replace(groups(n), tensor_parallel=1))
    assert len(parts) == n


def test_heads_that_do_not_divide_count() -> None:
    """Each shard then computes all of the attention."""
    three = replace(groups(3), whole_heads=frozenset({3}), attention_share=0.3)
    why, parts, tok_s = planned(three)
    assert parts == ["cpu:0+cpu:1+cpu:2 0-24"]
    assert "3 shards do not divide the heads: each computes all attention" in why
    assert tok_s < planned(groups(3))[2]


def test_a_small_gpu_and_a_cpu() -> None:
    """Layers go to the GPU as far as it has room; a CPU that is not needed is left out."""
    gpu, cpu = speed(0.5, head_ms=1.0), speed(8.0, head_ms=20.0)
    unlike = "cuda:0 and cpu are unlike"
    both = NodeDevices(
        each=(device("cuda:0", 200, gpu), device("cpu", 1000, cpu)), why_not_shared=unlike
    )
    why, parts, tok_s = planned(both)
    n_gpu = int(parts[-1].split()[1].split("-")[1]) - int(parts[-1].split()[1].split("-")[0])
    assert [part.split()[0] for part in parts] == ["cpu", "cuda:0"]  # which has the LM head
    assert 0.5 < n_gpu / 24 < 0.8
    assert f"layers cut over cpu ({24 - n_gpu}) and cuda:0 ({n_gpu})" in why
    assert f"no layer is shared, since {unlike}" in why
    assert "all layers on cpu: 212 ms" in why
    expected_s = (24 - n_gpu) * 8e-3 + n_gpu * 0.5e-3 + 1e-3 + HANDOVER_S
    assert 1 / tok_s == pytest.approx(expected_s)
    roomy = replace(both, each=(device("cuda:0", 1000, gpu), both.each[1]))
    why, parts, _ = planned(roomy)
    assert parts == ["cuda:0 0-24"]
    assert "cpu would only slow it down" in why


def test_unequal_gpus_are_both_used_for_many_sequences() -> None:
    large, small = speed(0.5, head_ms=1.0), speed(1.0, head_ms=2.0)
    pair = NodeDevices(each=(device("cuda:0", 1000, large), device("cuda:1", 150, small)))
    _, parts, _ = planned(pair, THROUGHPUT)
    assert len(parts) == 2
    sizes = {part.split()[0]: part.split()[1] for part in parts}
    assert set(sizes) == {"cuda:0", "cuda:1"}
    _, parts, _ = planned(pair)  # one sequence gains nothing: as little as costs nothing
    assert parts == ["cuda:1 0-1", "cuda:0 1-24"]


def test_nothing_is_measured_yet() -> None:
    """The fewest devices that hold the layers; what was asked for holds all the same."""

    def unmeasured(devices: NodeDevices) -> NodeDevices:
        return replace(devices, each=tuple(replace(d, speed=None) for d in devices.each))

    why, parts, tok_s = planned(unmeasured(groups(2)))
    assert (parts, tok_s) == (["cpu:0 0-24"], 0.0)
    asked = replace(unmeasured(groups(2)), tensor_parallel=1)
    assert len(planned(asked)[1]) == 2
    assert "not measured yet" in why
    assert len(planned(unmeasured(groups(2, memory_mib=180)))[1]) == 2
    shared = replace(unmeasured(groups(2)), tensor_parallel=2)
    assert planned(shared)[1] == ["cpu:0+cpu:1 0-24"]


@pytest.mark.parametrize("seed", cases(range(12), range(12, 300)))
def test_the_best_of_all_cuts_is_found_and_fits(seed: int) -> None:
    """As slow as the best of all orders and splits, but for WITHIN; never more than fits."""
    chance = random.Random(seed)
    n_layers, n = chance.randint(2, 7), chance.randint(1, 3)
    model = replace(SHAPE, n_layers=n_layers)
    each = []
    for i in range(n):
        held = HeldModel(shape=model, memory_bytes=chance.randint(15, 100) * MIB)
        measured = speed(chance.choice([0.5, 1.0, 8.0]), head_ms=chance.choice([0.0, 3.0]))
        each.append(NodeDevice(name=f"cuda:{i}", kind="cuda", held=held, speed=measured))
    devices = NodeDevices(each=tuple(each))
    start = chance.randint(0, n_layers - 1)
    layers = chance.choice([LayerRange(0, n_layers), LayerRange(start, n_layers)])
    costs = [
        sum(
            len(own) * each[i].speed.layer_s  # type: ignore[union-attr]
            + (own.end == n_layers) * each[i].speed.head_s  # type: ignore[union-attr]
            for i, own in zip(order, split, strict=True)
        )
        + HANDOVER_S * (k - 1)
        for k in range(1, min(n, len(layers)) + 1)
        for order in permutations(range(n), k)
        for split in (
            [LayerRange(layers.start + p.start, layers.start + p.end) for p in one]
            for one in splits(replace(model, n_layers=len(layers)), k)
        )
        if all(
            model.memory_bytes(own) <= each[i].held.memory_bytes
            for i, own in zip(order, split, strict=True)
        )
    ]
    found = cut_over(layers, n_layers, devices, LATENCY)
    assert (found is None) == (not costs)
    if found is not None:
        assert min(costs) - 1e-9 <= found.cost_s <= min(costs) * 1.05 + 1e-9
        assert [found.parts[0].layers.start, found.parts[-1].layers.end] == [
            layers.start,
            layers.end,
        ]
    # A node promises no more layers than its devices have room for, in any place of a ring.
    node = as_one(candidate("attic", 0), devices, None, n_layers, LATENCY)
    for begin in range(n_layers):
        for end in range(begin + 1, n_layers + 1):
            part = LayerRange(begin, end)
            if model.memory_bytes(part) <= node.memory_bytes:
                assert cut_over(part, n_layers, devices, LATENCY) is not None


def test_a_node_of_two_devices_in_a_ring_of_two() -> None:
    two = replace(groups(2, memory_mib=100), tensor_parallel=1)
    node = as_one(replace(candidate("attic", 0), devices=two), two, None, 24, LATENCY)
    other = candidate("barn", 160, speed(1.0, head_ms=1.0))
    links = equal_links([node, other])
    placement = place_over_devices(
        lambda nodes: place(SHAPE, nodes, links), [node, other], 24, LATENCY
    )
    by_node = {stage.node: stage for stage in placement.stages}
    own, theirs = by_node[node.node], by_node[other.node]
    assert len(own.parts) == 2
    assert own.parts[0].layers.start == own.layers.start
    assert own.parts[-1].layers.end == own.layers.end
    assert theirs.parts == ()
    assert "; attic: layers cut over cpu:0" in placement.why
