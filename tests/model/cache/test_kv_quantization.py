"""Keys and values in int8: what they are after rounding, how far off, and what cannot matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.oracles.plain_kv import plain_groups, plain_restored, plain_rounded, plain_scale

from shardnet.model.cache.kv_quantization import dequantize_rows, quantize_rows
from shardnet.types import DType, KvDType, kv_groups

MOST = 2.0**120
widths = st.sampled_from([1, 2, 7, 10, 20, 24, 31, 32, 33, 35, 64, 80, 97, 112, 128])
numbers = st.one_of(
    st.floats(-MOST, MOST, width=32),
    st.floats(-3, 3, width=32),
    st.floats(-(2.0**-122), 2.0**-122, width=32),
)


@st.composite
def rows(draw: st.DrawFn) -> list[float]:
    width = draw(widths)
    return draw(st.lists(numbers, min_size=width, max_size=width))


@given(row=rows())
@example(row=[0.0] * 40)
@example(row=[1e-39] * 32 + [127.0, -127.0])
@example(row=[1.0, 0.5 / 127, 1.5 / 127, 2.5 / 127])
@example(row=[1.0039] * 33)
def test_a_row_is_what_the_words_say_and_near_what_it_was(row: list[float]) -> None:
    kept = quantize_rows(torch.tensor(row))
    restored = dequantize_rows(kept, len(row), torch.float32)
    assert restored.tolist() == plain_rounded(row)
    assert torch.equal(plain_restored(kept, len(row)), restored)
    start = 0
    for part in plain_groups(row):
        most = max(abs(x) for x in part)
        for x, y in zip(part, restored[start : start + len(part)].tolist(), strict=True):
            assert abs(x - y) <= most / 254 * (1 + 2.0**-8) + 127 * 1.2e-38
        start += len(part)


@given(some=st.lists(rows(), min_size=2, max_size=4), width=widths)
def test_a_row_has_the_same_bytes_in_any_batch(some: list[list[float]], width: int) -> None:
    together = torch.tensor([(row * width)[:width] for row in some])
    kept = quantize_rows(together)
    for row, bytes_of_it in zip(together, kept, strict=True):
        assert torch.equal(quantize_rows(row), bytes_of_it)
    spread = quantize_rows(together[:, None].expand(-1, 3, -1).transpose(0, 1))
    assert torch.equal(spread[1], kept)
    assert torch.equal(dequantize_rows(spread[2], width, torch.float32), _restored(kept, width))


def _restored(kept: torch.Tensor, width: int) -> torch.Tensor:
    return torch.stack([dequantize_rows(row, width, torch.float32) for row in kept])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_once_more(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    given_rows = torch.randn(50, 2, 80, generator=generator).to(dtype)
    kept = quantize_rows(given_rows)
    assert torch.equal(kept, quantize_rows(given_rows.float()))
    wide = dequantize_rows(kept, 80, torch.float32)
    assert torch.equal(dequantize_rows(kept, 80, dtype), wide.to(dtype))


def test_scales_have_the_range_of_every_dtype() -> None:
    row = torch.tensor([3e38, -1e38, 1e36, 0.0])
    restored = dequantize_rows(quantize_rows(row), 4, torch.float32)
    assert (restored - row).abs().max() <= plain_scale(row.tolist()) / 2
    small = torch.tensor([6e-8, 0.0], dtype=torch.float16)
    assert dequantize_rows(quantize_rows(small), 2, torch.float16).tolist() == small.tolist()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_shows_in_its_group_alone(wrong: float) -> None:
    row = torch.linspace(-1, 1, 64)
    row[3] = wrong
    restored = dequantize_rows(quantize_rows(row), 64, torch.bfloat16)
    assert restored[:32].isnan().all()
    assert restored[32:].isfinite().all()


@pytest.mark.parametrize("width", [0, 1, 2, 31, 33, 64, 80, 97, 128, 576])
def test_rows_take_what_is_planned_for_them(width: int) -> None:
    kept = quantize_rows(torch.zeros(3, width))
    assert kept.dtype == torch.int8
    assert {kept.shape[-1]} == {KvDType.INT8.row_bytes(width, dtype) for dtype in DType}
    assert KvDType.AUTO.row_bytes(width, DType.BFLOAT16) == 2 * width


def test_of_usual_heads_a_row_takes_17_bytes_for_32_of_bfloat16() -> None:
    for width in (64, 128, 256, 576):
        assert KvDType.INT8.row_bytes(width, DType.BFLOAT16) * 32 == 17 * 2 * width


@pytest.mark.parametrize(
    ("width", "groups"),
    [
        *((0, (0, 0)), (8, (1, 16)), (20, (1, 32)), (24, (1, 32)), (40, (3, 16)), (48, (3, 16))),
        *((64, (2, 32)), (72, (5, 16)), (80, (5, 16)), (112, (7, 16)), (128, (4, 32))),
        (576, (18, 32)),
    ],
)
def test_groups_are_whole_vectors_and_take_the_fewest_bytes(
    width: int, groups: tuple[int, int]
) -> None:
    assert kv_groups(width) == groups
    n_bytes = KvDType.INT8.row_bytes(width, DType.FLOAT32)
    assert quantize_rows(torch.ones(3, width)).shape == (3, n_bytes)
