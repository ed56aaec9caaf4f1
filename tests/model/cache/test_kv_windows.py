"""Layers with a window keep what rows can still see, and no more."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.oracles.plain_kv import plain_rounded
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.slot_blocks import first_block
from shardnet.types import BLOCK_POSITIONS, REWIND_ROWS, KvDType, SlotId, StateId

CPU = torch.device("cpu")
WINDOWS = (None, 5, 300)
SLOT, OTHER = SlotId(0), SlotId(1)


def make_cache(kv_dtype: KvDType = KvDType.AUTO) -> KvCache:
    sizes = (len(WINDOWS), 1, 1, torch.float32, CPU)
    return KvCache(*sizes, room_blocks=64, windows=WINDOWS, kv_dtype=kv_dtype)


def write(cache: KvCache, slot: SlotId, position: int, values: Tensor) -> None:
    """Store one number per position in all layers, as attention does."""
    end = position + len(values)
    cache.ensure(slot, end, len(values))
    for layer in range(len(WINDOWS)):
        tensors, first = cache.own(slot, layer)
        for tensor in tensors:
            tensor[0, position - first : end - first] = cache.quantize(values[:, None])


def seen(cache: KvCache, slot: SlotId, layer: int, end: int) -> list[float]:
    """What the row before `end` sees in a layer."""
    window = WINDOWS[layer] or end
    first = cache.first(slot, layer)
    rows = slice(max(0, end - window) - first, end - first)
    assert rows.start >= 0
    kept = cache.layer(slot, layer)[1][0, rows]
    values: list[float] = cache.dequantize(kept, 1)[:, 0].tolist()
    return values


def test_memory_of_a_window_ends_to_grow() -> None:
    cache = make_cache()
    held = []
    for end in range(256, 20 * 256 + 1, 256):
        write(cache, SLOT, end - 256, torch.zeros(256))
        held.append([cache.layer(SLOT, layer)[0].shape[1] for layer in range(3)])
    assert [row[0] for row in held] == [n * 256 for n in range(1, 21)]
    for layer, window in enumerate(WINDOWS):
        if window is not None:
            assert max(row[layer] for row in held) <= window + REWIND_ROWS + 2 * BLOCK_POSITIONS
    assert held[-1][1:] == [512, 768]


@cache
def rounded(value: float) -> float:
    return plain_rounded([value])[0]


@pytest.mark.parametrize("kv_dtype", list(KvDType))
@given(data=st.data())
def test_every_row_finds_its_window_whatever_happened_before(
    kv_dtype: KvDType, data: st.DataObject
) -> None:
    """Writing, rewinding as far as allowed, trimming and copying, against a list."""
    cache = make_cache(kv_dtype)
    said: dict[SlotId, list[float]] = {SLOT: [], OTHER: []}
    written = {SLOT: 0, OTHER: 0}
    counter = 0
    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.sampled_from([SLOT, OTHER]))
        held = said[slot]
        floor = max(0, written[slot] - REWIND_ROWS)
        action = data.draw(st.sampled_from(["write", "write", "write", "trim", "copy"]))
        if action == "write":
            position = data.draw(st.integers(min(floor, len(held)), len(held)))
            n_rows = data.draw(st.sampled_from([1, 2, 31, 200, 256]))
            counter += n_rows
            values = torch.arange(counter, counter + n_rows, dtype=torch.float32)
            write(cache, slot, position, values)
            said[slot] = held = held[:position] + values.tolist()
            written[slot] = max(written[slot], len(held))
        elif len(held) > floor:
            kept = data.draw(st.integers(floor + 1, len(held)))
            target = slot if action == "trim" else SlotId(1 - slot)
            if action == "copy":
                cache.copy(slot, target, kept)
                written[target] = written[slot]
            cache.trim(target, kept)
            said[target] = held = held[:kept]
        for one, values in said.items():
            for layer, window in enumerate(WINDOWS):
                if values:
                    expected = values[-window:] if window else values
                    if kv_dtype is KvDType.INT8:
                        expected = [rounded(value) for value in expected]
                    assert seen(cache, one, layer, len(values)) == expected


def test_a_rewind_below_what_is_kept_is_refused() -> None:
    cache = make_cache()
    for position in range(0, 1024, 256):
        write(cache, SLOT, position, torch.zeros(256))
    write(cache, SLOT, 1024 - REWIND_ROWS, torch.zeros(1))
    with pytest.raises(
        CapacityError, match=r"slot 0 holds positions from \d+ on .* rewound to 300"
    ):
        cache.ensure(SLOT, 301)
    with pytest.raises(CapacityError, match="was rewound to 300"):
        cache.copy(SLOT, OTHER, 300)
    cache.free(SLOT)
    write(cache, SLOT, 0, torch.zeros(256))


def test_what_is_written_to_a_copy_leaves_its_source_alone() -> None:
    """Three blocks are shared, and the fourth is copied."""
    cache = make_cache()
    for position in range(0, 1024, 256):
        write(cache, SLOT, position, torch.full((256,), 1.0))
    cache.copy(SLOT, OTHER, 1000)
    write(cache, OTHER, 1000, torch.full((24,), 2.0))
    assert [set(seen(cache, SLOT, layer, 1024)) for layer in range(3)] == [{1.0}] * 3
    assert cache.blocks_used == (5 if cache.shares else 8)
    write(cache, OTHER, 900, torch.full((10,), 3.0))
    assert set(seen(cache, SLOT, 0, 1024)) == {1.0}


def test_the_rows_of_a_whole_frame_can_be_written_again() -> None:
    """Also when the slot grew, and forgot, with the last of them."""
    cache = make_cache()
    values = torch.arange(769.0)
    for position in range(0, 768, 256):
        write(cache, SLOT, position, values[position : position + 256])
    write(cache, SLOT, 768, values[768:])
    position = 769 - REWIND_ROWS
    write(cache, SLOT, position, torch.tensor([-1.0]))
    for layer, window in enumerate(WINDOWS):
        expected = [*values[:position].tolist(), -1.0]
        assert seen(cache, SLOT, layer, position + 1) == expected[-(window or 0) :]


def test_a_frame_whose_window_begins_with_a_block_can_be_written_again() -> None:
    cache = make_cache()
    begin = BLOCK_POSITIONS + 300 - 1
    values = torch.arange(begin + 256.0)
    write(cache, SLOT, 0, values[:begin])
    write(cache, SLOT, begin, values[begin:])
    assert cache.first(SLOT, 2) == BLOCK_POSITIONS
    write(cache, SLOT, begin, torch.tensor([-1.0]))
    assert seen(cache, SLOT, 2, begin + 1) == [*values[begin - 299 : begin].tolist(), -1.0]


@pytest.mark.parametrize(
    ("window", "block"),
    [(None, 0), (1, 3), (2, 2), (257, 2), (258, 1), (769, 0), (2000, 0)],
)
def test_the_first_block_that_the_row_behind_three_sees(window: int | None, block: int) -> None:
    assert first_block(3, window) == block


def test_rows_that_are_not_here_are_kept_with_no_state() -> None:
    """The head asks for it before it knows that a step has failed."""
    cache = make_cache()
    for n_written in (0, 100):
        if n_written:
            write(cache, SLOT, 0, torch.ones(n_written))
        with pytest.raises(CapacityError, match="does not hold the 512 positions"):
            cache.keep_state(SLOT, 512, StateId(1))
    with pytest.raises(CapacityError, match="not here any more"):
        cache.copy(SLOT, OTHER, 100, StateId(1))
