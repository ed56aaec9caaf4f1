from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.rings.stage_chain import Rows, batch_of
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.layers import attention as torch_attention
from shardnet.model.layers.attention import attention, plan_step
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.types import KvDType, MicroBatch, SlotId

CPU = torch.device("cpu")
KINDS = {
    "plain": AttentionKind(),
    "scaled": AttentionKind(scale=0.3),
    "window of 1": AttentionKind(window=1),
    "window of 7": AttentionKind(window=7),
    "window of 40": AttentionKind(window=40),
    "chunks of 33": AttentionKind(window=33, are_chunks=True),
    "chunks of 130": AttentionKind(window=130, are_chunks=True),
    "capped": AttentionKind(soft_cap=0.8),
    "causal": AttentionKind(is_causal=True),
    "capped window": AttentionKind(window=33, soft_cap=1.5, scale=0.9),
}
STORED: dict[str, dict[str, Any]] = {
    "as computed": {},
    "int8": {"kv_dtype": KvDType.INT8},
    "bfloat16": {"held": torch.bfloat16},
}
"""How keys and values of float32 are kept."""


def naive_attention(query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
    """One row [H, D] over all of [P, KV heads, D], in float64, from the definition."""
    spread = query.shape[0] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(spread, dim=1) for t in (keys, values))
    scores = torch.einsum("hd,phd->hp", query.double(), keys)
    scores = scores * (kind.scale or 1 / math.sqrt(query.shape[1]))
    if kind.soft_cap:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    return torch.einsum("hp,phd->hd", scores.softmax(-1), values)


def batch(*sizes: tuple[int, int]) -> MicroBatch:
    """A group per (position, rows), each in a slot of its own."""
    return batch_of(
        [
            Rows(slot=slot, position=position, ids=[0] * n_rows, n_sampled=0)
            for slot, (position, n_rows) in enumerate(sizes)
        ]
    )


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=4),
    n_kv_heads=st.sampled_from([1, 2, 6]),
    kind=st.sampled_from(list(KINDS.values())),
    stored=st.sampled_from(list(STORED)),
    picture=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    is_native=st.booleans(),
)
@example(
    sizes=[(0, 40), (39, 33), (40, 1)],
    n_kv_heads=2,
    kind=KINDS["window of 40"],
    stored="int8",
    picture=(2, 38),
    is_native=False,
)
@example(
    sizes=[(120, 140)],
    n_kv_heads=2,
    kind=KINDS["window of 7"],
    stored="as computed",
    picture=(3, 135),
    is_native=True,
)
def test_each_row_sees_its_own_slot_up_to_itself(
    sizes: list[tuple[int, int]],
    n_kv_heads: int,
    kind: AttentionKind,
    stored: str,
    picture: tuple[int, int],
    is_native: bool,
) -> None:
    """Groups of one row, few and many, each after some positions that were there before.

    Rows of a picture, [start, end) of the first group, see all of it.
    """
    n_heads, head_size = 6, 4
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_size, generator=generator)

    shape = (1, n_kv_heads, head_size)
    kv = KvCache(*shape, torch.float32, CPU, room_blocks=16, **STORED[stored])
    past = [(draw(position, n_kv_heads), draw(position, n_kv_heads)) for position, _ in sizes]
    n_rows = sum(rows for _, rows in sizes)
    queries, keys, values = (
        draw(n_rows, n_heads),
        draw(n_rows, n_kv_heads),
        draw(n_rows, n_kv_heads),
    )
    low, high = picture[0], min(picture[1], sizes[0][1])
    blocks = ((low, high),) if low < high else ()
    pictures = PictureRows(index=torch.arange(0), blocks=blocks)
    step = plan_step(batch(*sizes), kv, 400, torch.float32, pictures=pictures)
    step = step if is_native else replace(step, native_spans=None)
    for slot, (past_keys, past_values) in enumerate(past):
        cached_keys, cached_values = kv.layer(SlotId(slot), 0)
        cached_keys[:, : len(past_keys)] = kv.quantize(past_keys).transpose(0, 1)
        cached_values[:, : len(past_values)] = kv.quantize(past_values).transpose(0, 1)
    attended = attention(queries, keys, values, 0, step, kind).view(n_rows, n_heads, head_size)

    def seen_rows(past: Tensor, new: Tensor) -> Tensor:
        return kv.dequantize(kv.quantize(torch.cat((past, new))), head_size)

    start = 0
    for (_, rows), (past_keys, past_values) in zip(sizes, past, strict=True):
        all_keys = seen_rows(past_keys, keys[start : start + rows])
        all_values = seen_rows(past_values, values[start : start + rows])
        for row in range(start, start + rows):
            own = len(past_keys) + row - start
            sees_all = low <= row < high and not kind.is_causal
            end = len(past_keys) + high if sees_all else own + 1
            window = kind.window or own + 1
            first = own // window * window if kind.are_chunks else max(0, own + 1 - window)
            seen = slice(first, end)
            expected = naive_attention(queries[row], all_keys[seen], all_values[seen], kind)
            torch.testing.assert_close(attended[row].double(), expected, rtol=0, atol=1e-5)
        start += rows


@pytest.mark.parametrize("n_rows", [1, 5, 32])
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("stored", list(STORED))
def test_rows_of_a_small_group_have_the_bits_of_decode_steps(
    name: str, n_rows: int, stored: str
) -> None:
    kind, position = KINDS[name], 50
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(n_rows, 4, 8, generator=generator)
    keys, values = torch.randn(2, position + n_rows, 2, 8, generator=generator)
    rows = slice(position, position + n_rows)

    def run(sizes: list[tuple[int, int]]) -> Tensor:
        kv = KvCache(1, 2, 8, torch.float32, CPU, room_blocks=1, **STORED[stored])
        kv.ensure(SlotId(0), position)
        for cached, past in zip(kv.layer(SlotId(0), 0), (keys, values), strict=True):
            cached[:, :position] = kv.quantize(past[:position]).transpose(0, 1)
        out = []
        for start, count in sizes:
            step = plan_step(batch((start, count)), kv, 400, torch.float32)
            own = slice(start, start + count)
            some = queries[start - position : start - position + count]
            out.append(attention(some, keys[own], values[own], 0, step, kind))
        return torch.cat(out)

    one_by_one = run([(p, 1) for p in range(rows.start, rows.stop)])
    assert torch.equal(run([(position, n_rows)]), one_by_one)


def test_a_window_counts_the_row_itself() -> None:
    """Values are one-hot by position and all scores equal: the output names what was seen."""
    n_rows, window = 40, 3
    kv = KvCache(1, 1, 40, torch.float32, CPU, room_blocks=1)
    step = plan_step(batch((0, n_rows)), kv, 40, torch.float32)
    zeros = torch.zeros(n_rows, 1, 40)
    positions = torch.eye(40)[:, None]
    attended = attention(zeros, zeros, positions, 0, step, AttentionKind(window=window))
    assert attended[0].nonzero().flatten().tolist() == [0]
    assert attended[10].nonzero().flatten().tolist() == [8, 9, 10]
    torch.testing.assert_close(attended[10, 8:11], torch.full((3,), 1 / 3))


def test_a_soft_cap_by_hand() -> None:
    """Two keys, scores 2 and 0, cap 1: weights are the softmax of tanh(2) and 0."""
    kv = KvCache(1, 1, 2, torch.float32, CPU, room_blocks=1)
    step = plan_step(batch((0, 2)), kv, 2, torch.float32)
    queries = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]])
    keys = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    kind = AttentionKind(scale=1.0, soft_cap=1.0)
    attended = attention(queries, keys, keys, 0, step, kind)
    first = math.exp(math.tanh(2)) / (math.exp(math.tanh(2)) + 1)
    torch.testing.assert_close(attended[1], torch.tensor([first, 1 - first]))


def test_rounded_keys_and_values_are_brought_back_one_slot_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What planning counts: keys and values of one slot, and nothing of the one before."""
    kv = KvCache(1, 2, 8, torch.float32, CPU, room_blocks=4, kv_dtype=KvDType.INT8)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    dequantize = kv.dequantize

    def watched(kept: Tensor, width: int) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(rows := dequantize(kept, width)))
        return rows

    monkeypatch.setattr(torch_attention, "native_attend", lambda *arguments: None)
    monkeypatch.setattr(kv, "dequantize", watched)
    sizes = [(0, 40), (0, 3), (0, 1), (0, 50)]
    step = plan_step(batch(*sizes), kv, 400, torch.float32)
    queries = torch.randn(94, 4, 8)
    keys, values = torch.randn(2, 94, 2, 8)
    attention(queries, keys, values, 0, step)
    assert alive == [0, 1] * 4
    assert not any(ref() is not None for ref in made)
