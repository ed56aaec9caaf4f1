"""Whole blocks of keys and values are looked at: flipped bits are found, and nothing else is."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from shardnet.errors import CapacityError, ChangedMemoryError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.types import BLOCK_POSITIONS, KvDType, SlotId

N_LAYERS, N_KV_HEADS, HEAD_SIZE, N_SLOTS = 2, 2, 4, 3
SLOT = SlotId(1)


def make_cache(value_size: int | None = None, kv_dtype: KvDType = KvDType.AUTO) -> KvCache:
    return KvCache(
        N_LAYERS,
        N_KV_HEADS,
        HEAD_SIZE,
        torch.float32,
        torch.device("cpu"),
        room_blocks=12,
        windows=[None, 300],
        value_size=value_size,
        kv_dtype=kv_dtype,
    )


def write(cache: KvCache, slot: SlotId, begin: int, end: int) -> None:
    cache.ensure(slot, end, end - begin)
    for layer in range(N_LAYERS):
        tensors, first = cache.own(slot, layer)
        for held in tensors:
            held[:, begin - first : end - first] = torch.randn(
                held[:, begin - first : end - first].shape
            ).to(held.dtype)


def a_turn(cache: KvCache) -> int:
    return sum(cache.look() for _ in range(N_SLOTS * N_LAYERS * 12))


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("kv_dtype", list(KvDType))
@pytest.mark.parametrize("value_size", [None, 0])
def test_a_flipped_bit_is_found(value_size: int | None, kv_dtype: KvDType, is_copy: bool) -> None:
    cache = make_cache(value_size, kv_dtype)
    write(cache, SLOT, 0, 2 * BLOCK_POSITIONS + 7)
    assert a_turn(cache) > 0
    slot = SlotId(2) if is_copy else SLOT
    if is_copy:
        cache.copy(SLOT, slot, BLOCK_POSITIONS + 1)
    contents = cache.contents(slot)
    assert bool(contents.shared) == (is_copy and cache.shares)
    held = contents.rows(0, 0, BLOCK_POSITIONS, values=value_size is None)
    held[1, 200].view(torch.uint8)[3] ^= 4
    with pytest.raises(ChangedMemoryError, match=r"positions 0 to 256 .* in layer 0.*memtest86"):
        a_turn(cache)


def test_a_slot_that_was_looked_at_is_freed_at_once() -> None:
    cache = make_cache()
    write(cache, SLOT, 0, 2 * BLOCK_POSITIONS)
    assert cache.look() > 0
    keys = weakref.ref(cache.own(SLOT, 0)[0][0])
    cache.free(SLOT)
    assert keys() is None
    assert cache.look() == 0


def test_what_is_written_again_moved_copied_and_freed_raises_no_alarm() -> None:
    drawn, cache, ends = random.Random(7), make_cache(), dict[SlotId, int]()
    looked_bytes = 0
    for _ in range(600):
        slot = SlotId(drawn.randrange(N_SLOTS))
        end = ends.get(slot, 0)
        try:
            match drawn.choice(["grow", "grow", "rewind", "trim", "copy", "free", "adopt"]):
                case "grow":
                    more = drawn.choice([1, 40, 256])
                    write(cache, slot, end, end + more)
                    ends[slot] = end + more
                case "rewind" if end:
                    begin = drawn.randrange(max(0, end - 60), end)
                    write(cache, slot, begin, begin + 1)
                    ends[slot] = begin + 1
                case "trim" if end:
                    ends[slot] = drawn.randrange(max(0, end - 40), end)
                    cache.trim(slot, ends[slot])
                case "copy" if end:
                    target = SlotId(drawn.randrange(N_SLOTS))
                    cache.copy(slot, target, end)
                    ends[target] = end
                case "free":
                    cache.free(slot)
                    ends.pop(slot, None)
                case "adopt" if end:
                    n_blocks = -(-end // BLOCK_POSITIONS)
                    contents = cache.contents(slot)
                    cache.adopt(slot, contents, n_blocks)
                case _:
                    pass
        except CapacityError:
            cache.free(slot)
            ends.pop(slot, None)
        looked_bytes += sum(cache.look() for _ in range(drawn.randrange(4)))
    assert looked_bytes > 1000 * BLOCK_POSITIONS
