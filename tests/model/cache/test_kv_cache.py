from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.types import BLOCK_POSITIONS, KvDType, SlotId

N_LAYERS, N_KV_HEADS, HEAD_SIZE = 2, 2, 4
CPU = torch.device("cpu")


def make_cache(
    room_blocks: int = 8,
    dtype: torch.dtype = torch.float32,
    kv_dtype: KvDType = KvDType.AUTO,
) -> KvCache:
    sizes = (N_LAYERS, N_KV_HEADS, HEAD_SIZE)
    return KvCache(*sizes, dtype, CPU, room_blocks, kv_dtype=kv_dtype)


def held_bytes(cache: KvCache, slot: SlotId) -> int:
    return sum(t.nbytes for layer in range(N_LAYERS) for t in cache.layer(slot, layer))


SLOT = SlotId(3)


@pytest.mark.parametrize("kv_dtype", list(KvDType))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_what_they_cost(dtype: torch.dtype, kv_dtype: KvDType) -> None:
    cache = make_cache(dtype=dtype, kv_dtype=kv_dtype)
    cache.ensure(SLOT, 2 * BLOCK_POSITIONS + 1)
    assert cache.blocks_used == 3
    assert cache.blocks_free == 5
    assert held_bytes(cache, SLOT) == 3 * cache.block_bytes


def test_growing_and_trimming_keep_what_is_held() -> None:
    cache = make_cache()
    cache.ensure(SLOT, BLOCK_POSITIONS)
    written = torch.randn(N_LAYERS, 2, N_KV_HEADS, BLOCK_POSITIONS, HEAD_SIZE)
    for layer in range(N_LAYERS):
        for tensor, values in zip(cache.layer(SLOT, layer), written[layer], strict=True):
            tensor.copy_(values)

    def check(n_positions: int) -> None:
        for layer in range(N_LAYERS):
            for tensor, values in zip(cache.layer(SLOT, layer), written[layer], strict=True):
                assert torch.equal(tensor[:, :n_positions], values[:, :n_positions])

    cache.ensure(SLOT, 3 * BLOCK_POSITIONS)
    check(BLOCK_POSITIONS)
    cache.trim(SLOT, 10)
    assert cache.blocks_used == 1
    assert held_bytes(cache, SLOT) == cache.block_bytes
    check(10)


@pytest.mark.parametrize("kv_dtype", list(KvDType))
def test_keys_without_values_grow_and_are_copied(kv_dtype: KvDType) -> None:
    cache = KvCache(N_LAYERS, 1, 5, torch.float32, CPU, 8, value_size=0, kv_dtype=kv_dtype)
    cache.ensure(SLOT, 3)
    written = cache.quantize(torch.randn(N_LAYERS, 1, 3, 5))
    for layer in range(N_LAYERS):
        cache.layer(SLOT, layer)[0][:, :3] = written[layer]
    cache.ensure(SLOT, BLOCK_POSITIONS + 1)
    other = SlotId(4)
    cache.copy(SLOT, other, 3)
    for slot in (SLOT, other):
        for layer in range(N_LAYERS):
            keys, values = cache.layer(slot, layer)
            assert torch.equal(keys[:, :3], written[layer])
            assert values.shape == (*keys.shape[:2], 0)
    assert held_bytes(cache, SLOT) == 2 * cache.block_bytes == 2 * held_bytes(cache, other)


def test_sixteen_copies_hold_the_blocks_of_a_prefix_once() -> None:
    """2,000 positions are 7 whole blocks and 208 positions that each slot has for itself."""
    cache, others = make_cache(room_blocks=64), [SlotId(number) for number in range(10, 25)]
    if not cache.shares:
        pytest.skip("blocks are shared where the compiled library computes")
    n_tail = 208
    cache.ensure(SLOT, 2010)
    keys = torch.randn(N_KV_HEADS, 2010, HEAD_SIZE)
    cache.own(SLOT, 1)[0][0][:, :2010] = keys
    for other in others:
        cache.copy(SLOT, other, 2000)
    assert cache.blocks_used == 7 + 16
    moved = []
    for slot in (SLOT, *others):
        contents = cache.contents(slot)
        moved.append(torch.empty(2000 * contents.row_bytes([1]), dtype=torch.uint8))
        contents.read_rows([1], 0, 2000, moved[-1])
        assert torch.equal(moved[-1], moved[0])
        assert torch.equal(cache.layer(slot, 1)[0][:, :2000], keys[:, :2000])
        (own, _), first = cache.own(slot, 1)
        assert (first, own.shape[1]) == (7 * BLOCK_POSITIONS, BLOCK_POSITIONS)
        own[:, :n_tail] = 0
    cache.trim(others[0], 600)  # two blocks are shared still, and part of the third is its own
    assert cache.blocks_used == 7 + 16
    cache.own(others[0], 1)[0][0].fill_(7)
    for slot in (SLOT, *others[1:]):
        assert torch.equal(cache.layer(slot, 1)[0][:, :1792], keys[:, :1792])
    for slot in (SLOT, *others[1:]):
        cache.free(slot)
    assert cache.blocks_used == 3
    assert torch.equal(cache.layer(others[0], 1)[0][:, :512], keys[:, :512])
    cache.free(others[0])
    assert cache.blocks_used == 0


def test_ensure_never_shrinks_and_trim_never_grows() -> None:
    cache = make_cache()
    cache.ensure(SLOT, 600)
    cache.ensure(SLOT, 1)
    assert cache.blocks_used == 3
    cache.trim(SLOT, 2000)
    assert cache.blocks_used == 3


def test_running_out_names_the_slot_and_changes_nothing() -> None:
    cache = make_cache(room_blocks=4)
    cache.ensure(SlotId(1), 3 * BLOCK_POSITIONS)
    with pytest.raises(CapacityError, match=r"slot 2 needs 2 more KV blocks .* 1 of 4 are free"):
        cache.ensure(SlotId(2), 2 * BLOCK_POSITIONS)
    assert (cache.blocks_used, cache.blocks_free) == (3, 1)
    cache.ensure(SlotId(2), BLOCK_POSITIONS)


def test_a_machine_without_memory_is_a_capacity_error() -> None:
    cache = make_cache(room_blocks=1 << 40)
    with pytest.raises(CapacityError, match="slot 3: cpu has no memory for"):
        cache.ensure(SLOT, 1 << 40)
    assert cache.blocks_used == 0


Action = st.tuples(
    st.sampled_from(["ensure", "trim", "free"]),
    st.integers(0, 3).map(SlotId),
    st.integers(0, 5 * BLOCK_POSITIONS),
)


@given(actions=st.lists(Action, max_size=30))
def test_free_plus_used_is_the_room_after_every_action(
    actions: list[tuple[str, SlotId, int]],
) -> None:
    cache = make_cache()
    expected: dict[SlotId, int] = {}
    for action, slot, n_positions in actions:
        blocks = -(-n_positions // BLOCK_POSITIONS)
        held = expected.get(slot, 0)
        if action == "free":
            cache.free(slot)
            expected.pop(slot, None)
        elif action == "trim":
            cache.trim(slot, n_positions)
            expected[slot] = min(held, blocks)
        elif blocks - held > 8 - sum(expected.values()):
            with pytest.raises(CapacityError):
                cache.ensure(slot, n_positions)
        else:
            cache.ensure(slot, n_positions)
            expected[slot] = max(held, blocks)
        assert cache.blocks_used == sum(expected.values())
        assert cache.blocks_free + cache.blocks_used == cache.room_blocks == 8
        for one, n_blocks in expected.items():
            if n_blocks:
                assert held_bytes(cache, one) == n_blocks * cache.block_bytes


def test_a_slot_that_is_copied_to_itself_keeps_what_it_had() -> None:
    cache = make_cache()
    cache.ensure(SLOT, 2 * BLOCK_POSITIONS)
    cache.layer(SLOT, 0)[0].fill_(7)
    cache.copy(SLOT, SLOT, 3)
    assert cache.blocks_used == 1
    assert (cache.layer(SLOT, 0)[0][:, :3] == 7).all()
