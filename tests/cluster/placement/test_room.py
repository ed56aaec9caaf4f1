"""Room: how many layers nodes hold, the shortest ring, and ways out that really lead out."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rings.clusters import MIB, candidate, fits, shape, splits

from shardnet.cluster.placement.figures import HeldModel, ModelShape
from shardnet.cluster.placement.room import (
    Fits,
    StageRole,
    context_that_fits,
    fits_in_order,
    fits_somehow,
    memory_that_helps,
    most_room,
    node_that_helps,
    ring_room,
    role_of,
    room_of,
    rooms_of,
    shortest_ring,
)
from shardnet.types import LayerRange

shapes = st.builds(
    shape,
    n_layers=st.integers(1, 6),
    head_mib=st.integers(0, 30),
    embedding_mib=st.integers(0, 30),
    kv_mib=st.integers(0, 3),
    n_blocks=st.integers(1, 6),
)
memories = st.lists(st.integers(0, 120).map(lambda mib: mib * MIB), min_size=1, max_size=4)


def held(model: ModelShape, memory: list[int]) -> list[HeldModel]:
    return [HeldModel(shape=model, memory_bytes=size) for size in memory]


def naive_fits_in_order(model: ModelShape, memory: list[int]) -> bool:
    ring = [replace(candidate(f"n{i}", 0), memory_bytes=size) for i, size in enumerate(memory)]
    return any(fits(model, ring, split) for split in splits(model, len(ring)))


def naive_rings(model: ModelShape, memory: list[int]) -> list[tuple[int, ...]]:
    return [
        ring
        for n_stages in range(1, len(memory) + 1)
        for ring in permutations(range(len(memory)), n_stages)
        if naive_fits_in_order(model, [memory[node] for node in ring])
    ]


@given(
    model=shapes,
    spared_mib=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    memory_mib=st.lists(st.integers(0, 60), min_size=1, max_size=3),
)
def test_layers_that_weigh_less_make_room_that_is_there(
    model: ModelShape, spared_mib: list[int], memory_mib: list[int]
) -> None:
    """Whatever is said to fit does, and nothing that fits without them is lost."""
    spared = tuple(mib * MIB for mib in spared_mib[: model.n_layers])
    mixed = replace(model, spared_bytes=spared)
    memory = [mib * MIB for mib in memory_mib]
    if fits_in_order(held(mixed, memory)):
        assert naive_fits_in_order(mixed, memory)
    elif len(memory) < 3:
        assert not naive_fits_in_order(mixed, memory), "exact without a stage in the middle"
    if fits_in_order(held(model, memory)):
        assert fits_in_order(held(mixed, memory))


@given(model=shapes, memory_mib=st.integers(0, 150))
def test_room_is_what_fits_and_one_layer_more_does_not(model: ModelShape, memory_mib: int) -> None:
    room, n = room_of(model, memory_mib * MIB), model.n_layers
    ranges = {
        StageRole.MIDDLE: [LayerRange(1, 1 + k) for k in range(1, n - 1)],
        StageRole.FIRST: [LayerRange(0, k) for k in range(1, n)],
        StageRole.LAST: [LayerRange(n - k, n) for k in range(1, n)],
        StageRole.ALONE: [LayerRange(0, n)],
    }
    for role, candidates in ranges.items():
        fitting = [len(r) for r in candidates if model.memory_bytes(r) <= memory_mib * MIB]
        assert room[role] == max(fitting, default=0)


def test_roles() -> None:
    assert [role_of(rank, 3) for rank in range(3)] == [
        StageRole.FIRST,
        StageRole.MIDDLE,
        StageRole.LAST,
    ]
    assert role_of(0, 1) is StageRole.ALONE


@given(model=shapes, memory=memories)
def test_the_shortest_ring_is_found_whenever_there_is_one(
    model: ModelShape, memory: list[int]
) -> None:
    rings = naive_rings(model, memory)
    found = shortest_ring(rooms_of(held(model, memory)), model.n_layers)
    assert (found in rings) if rings else (found is None)
    if found:
        assert len(found) == len(rings[0])
        first_heads = [ring[0] for ring in rings if len(ring) == len(found)]
        assert found[0] == min(first_heads)
    assert fits_somehow(held(model, memory)) == bool(rings)
    assert fits_in_order(held(model, memory)) == naive_fits_in_order(model, memory)


@given(model=shapes, memory=memories)
def test_most_room_is_that_of_the_roomiest_ring(model: ModelShape, memory: list[int]) -> None:
    rooms = rooms_of(held(model, memory))
    rings = [
        ring
        for n_stages in range(1, min(len(memory), model.n_layers) + 1)
        for ring in permutations(range(len(memory)), n_stages)
    ]
    most = max(ring_room(rooms, ring) for ring in rings)
    assert min(most_room(rooms, model.n_layers), model.n_layers) == min(most, model.n_layers)


@pytest.mark.parametrize("fits_these", [fits_somehow, fits_in_order])
@given(model=shapes, memory=memories)
def test_ways_out_lead_out_and_nothing_less_does(
    fits_these: Fits, model: ModelShape, memory: list[int]
) -> None:
    if fits_these(held(model, memory)):
        return
    context = context_that_fits(held(model, memory), fits_these)
    blocks = range(1, model.n_blocks)
    fitting = [n * 256 for n in blocks if fits_these(held(model.with_blocks(n), memory))]
    assert context == max(fitting, default=None)
    extra = node_that_helps(model, held(model, memory), fits_these)
    if extra is None:
        assert not fits_these(held(model, [*memory, 10**12]))
    else:
        assert fits_these(held(model, [*memory, extra]))
        assert not fits_these(held(model, [*memory, extra - MIB]))
    raised = memory_that_helps(held(model, memory), 0, fits_these)
    if raised is None:
        assert not fits_these(held(model, [10**12, *memory[1:]]))
    else:
        assert fits_these(held(model, [raised, *memory[1:]]))
        assert not fits_these(held(model, [raised - MIB, *memory[1:]]))


def test_a_smaller_context_saves_kv_and_activations() -> None:
    model = replace(shape(kv_mib=2, n_blocks=4), context=1000, activation_position_bytes=1000)
    smaller = model.with_blocks(2)
    assert (smaller.context, smaller.kv_layer_bytes) == (512, 4 * MIB)
    assert smaller.activation_bytes == model.activation_bytes - 488 * 1000
