"""Rounded weights: the layout, the error of rounding, and products by every path."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.soak import cases, examples
from torch import Tensor

from shardnet.errors import UsageError
from shardnet.model.config.panel_form import PANEL, Quantization
from shardnet.model.kernels import panel_linear, quantized_linear
from shardnet.model.kernels.library import Isa, NativeKernels, find_kernels, native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import unpack
from shardnet.model.kernels.quantized_linear import pack_all, quantized

KINDS = list(Quantization)
NATIVE = native_kernels()
with_native = pytest.mark.skipif(NATIVE is None, reason="no compiled products were built here")
SHAPES = [(1, 1), (16, 64), (17, 65), (33, 31), (48, 200), (160, 96)]


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * spread


def plain_round(weight: Tensor, kind: Quantization) -> Tensor:
    """The weights that come back, group by group, without any layout."""
    rows = []
    for row in weight.tolist():
        out = []
        for start in range(0, len(row), kind.group):
            group = torch.tensor(row[start : start + kind.group])
            out.append(_plain_int8(group) if kind is Quantization.INT8 else _plain_int4(group))
        rows.append(torch.cat(out))
    return torch.stack(rows)


def _plain_int8(group: Tensor) -> Tensor:
    scale = (group.abs().max() / 127).half().float()
    return group if scale == 0 else (group / scale).round().clamp(-127, 127) * scale


def _plain_int4(group: Tensor) -> Tensor:
    largest = group[group.abs().argmax()]
    best, best_error = group, float("inf")
    for shrink in (1.0, 0.92, 0.85, 0.78):
        scale = (largest / -8 * shrink).half().float()
        came = (group / scale).round().clamp(-8, 7) * scale if scale else torch.zeros_like(group)
        error = float((came - group).square().sum())
        if error < best_error:
            best, best_error = came, error
    return best


def make(weight: Tensor, kind: Quantization, bias: Tensor | None = None) -> PanelLinear:
    return PanelLinear([quantized(weight, kind)], bias)


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quantized_linear, panel_linear):
        monkeypatch.setattr(module, "native_kernels", lambda: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_comes_back_is_what_plain_rounding_gives(
    shape: tuple[int, int], kind: Quantization
) -> None:
    weight = numbers(*shape)
    panels = quantized(weight, kind)
    assert tuple(panels.packed.shape) == kind.form.packed_shape(*shape)
    assert panels.packed.numel() == kind.form.packed_bytes(*shape)
    whole = unpack(panels, torch.float32)
    came = whole[: shape[0], : shape[1]]
    torch.testing.assert_close(came, plain_round(weight, kind), rtol=1e-6, atol=1e-7)
    filled = replace(panels, shape=(len(panels.packed) * PANEL, -shape[1] % kind.group + shape[1]))
    whole = unpack(filled, torch.float32)
    whole[: shape[0], : shape[1]] = 0
    assert not whole.any()  # what fills up is zero


@pytest.mark.parametrize(("kind", "error"), [(Quantization.INT8, 0.007), (Quantization.INT4, 0.09)])
def test_rounding_errs_as_little_as_its_bits_allow(kind: Quantization, error: float) -> None:
    weight = numbers(512, 512, spread=0.02)
    came = unpack(quantized(weight, kind), torch.float32)
    assert float((came - weight).norm() / weight.norm()) < error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_any_dtype_and_of_zeros_are_packed(
    kind: Quantization, dtype: torch.dtype
) -> None:
    weight = numbers(20, 70).to(dtype)
    weight[3] = 0
    assert torch.equal(quantized(weight, kind).packed, quantized(weight.float(), kind).packed)
    assert not unpack(quantized(weight, kind), torch.float32)[3].any()


def test_packing_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(100, 96)
    whole = quantized(weight, Quantization.INT4).packed
    monkeypatch.setattr(quantized_linear, "_TORCH_CHUNK_WEIGHTS", 1)
    monkeypatch.setattr(quantized_linear, "_NATIVE_CHUNK_WEIGHTS", 1)
    calls = []
    assert torch.equal(pack_all([weight], Quantization.INT4, lambda: calls.append(1)), whole)
    assert len(calls) == 7  # panels


@pytest.mark.parametrize("n_outs", [(16, 32, 5), (17, 3), (4, 4, 4)], ids=str)
def test_weights_packed_together_are_joined(n_outs: tuple[int, ...]) -> None:
    weights = [numbers(n_out, 70, seed=n_out) for n_out in n_outs]
    for kind in KINDS:
        assert torch.equal(pack_all(weights, kind), quantized(torch.cat(weights), kind).packed)


# --- the library rounds as torch does

ODD: list[list[float]] = [
    [0.0, -0.0],
    [-0.0],
    [float("nan")],
    [float("inf"), 1.0],
    [-float("inf"), 2.0, float("nan")],
    [65504.0, -65504.0],
    [3e38, -3e38],  # beyond what a float16 scale holds
    [6e-8, 3e-8, 1e-7],  # scales below the smallest normal float16
    [1e-12, -1e-12],
    [1e-45],
    [2.0, -2.0],
    [-8.0, 7.0, 0.5, 1.5, 2.5, -0.5],  # halfway between two whole numbers
]
"""What stands now and then in a row of weights, or is all of it."""


def packed_by(name: str, weight: Tensor, kind: Quantization) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            quantized_linear, "native_kernels", lambda: find_kernels({"SHARDNET_ISA": name})
        )
        packed = quantized(weight, kind).packed
    scales = packed[..., : 2 * PANEL].view(torch.float16)
    scales[scales.isnan()] = torch.nan  # one of its many bit patterns
    return packed


@with_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_odd_weights_are_rounded_by_the_library_as_by_torch(
    dtype: torch.dtype, kind: Quantization
) -> None:
    weight = numbers(2 * len(ODD) + 3, 200)
    for row, odd in enumerate(ODD):
        weight[row] = torch.tensor(odd * 200)[:200]
        weight[len(ODD) + row, 7 : 7 + len(odd)] = torch.tensor(odd)
    want = packed_by("off", weight.to(dtype), kind)
    for name in ("portable", "avx2", ""):
        assert torch.equal(packed_by(name, weight.to(dtype), kind), want), name


@with_native
@settings(max_examples=examples(20), deadline=None)
@given(
    n_out=st.integers(1, 40),
    n_in=st.integers(1, 140),
    spread=st.sampled_from([1.0, 0.02, 1e-5, 1e-7, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(["portable", "avx2", ""]),
    is_turned=st.booleans(),
)
def test_the_library_rounds_as_torch_does(
    n_out: int,
    n_in: int,
    spread: float,
    dtype: torch.dtype,
    kind: Quantization,
    name: str,
    is_turned: bool,
) -> None:
    """Sizes that fill no panel and no group, too, and weights whose rows do not stand together."""
    weight = numbers(n_in, n_out + 3, spread=spread).to(dtype)[:, 3:]
    weight = weight.T if is_turned else weight.T.contiguous()
    assert torch.equal(packed_by(name, weight, kind), packed_by("off", weight, kind))


# --- products


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("torch_only")
def test_torch_multiplies_with_the_rounded_weights(
    shape: tuple[int, int], kind: Quantization, dtype: torch.dtype
) -> None:
    weight, bias, rows = numbers(*shape), numbers(shape[0], seed=1), numbers(7, shape[1], seed=2)
    linear = make(weight, kind, bias)
    assert linear.shape == shape
    product = linear(rows.to(dtype))
    assert product.dtype is dtype
    want = rows.double() @ plain_round(weight, kind).double().T + bias
    spread = float(want.abs().max())
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(product.double(), want, rtol=0, atol=tolerance * spread)


def plain_product(rows: Tensor, weight: Tensor, kind: Quantization) -> Tensor:
    """Rows rounded to int8 per group, times rounded weights: float64."""
    groups = rows.float().split(kind.group, dim=1)
    scales = [group.abs().amax(1, keepdim=True) / 127 for group in groups]
    rounded = [
        torch.where(scale > 0, (group / scale).round(), 0).double() * scale
        for group, scale in zip(groups, scales, strict=True)
    ]
    return torch.cat(rounded, dim=1) @ plain_round(weight, kind).double().T


@with_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n_rows", cases([1, 3, 8, 9, 23], [2, 5, 15, 16, 64]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_product_is_the_plain_one(
    shape: tuple[int, int], kind: Quantization, n_rows: int, dtype: torch.dtype
) -> None:
    weight, bias = numbers(*shape), numbers(shape[0], seed=1)
    rows = numbers(n_rows, shape[1], seed=n_rows).to(dtype)
    product = make(weight, kind, bias)(rows)
    assert product.dtype is dtype
    want = plain_product(rows, weight, kind) + bias
    spread = float(want.abs().max())
    tolerance = 2e-5 if dtype is torch.float32 else 1e-2  # a rounding may fall the other way
    close = (product.double() - want).abs() <= tolerance * spread
    assert close.float().mean() > 0.98
    torch.testing.assert_close(product.double(), want, rtol=0, atol=0.03 * spread)


@with_native
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15), deadline=None)
@given(
    n_out=st.integers(1, 70),
    n_in=st.integers(1, 300),
    n_rows=st.integers(1, 40),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([1e-6, 0.02, 1.0, 3e4]),
)
def test_every_instruction_set_and_batch_give_the_same_bits(
    kind: Quantization, n_out: int, n_in: int, n_rows: int, seed: int, spread: float
) -> None:
    """Alone or beside others, by any instruction set, on one thread or several."""
    weight, rows = numbers(n_out, n_in, seed=seed), numbers(n_rows, n_in, seed=seed, spread=spread)
    panels = quantized(weight, kind)

    def multiply(native: NativeKernels, some: Tensor) -> Tensor:
        return native.matmul([panels], None)(some)

    assert NATIVE is not None
    whole = multiply(NATIVE, rows)
    assert torch.equal(torch.cat([multiply(NATIVE, row[None]) for row in rows]), whole)
    assert torch.equal(multiply(NATIVE, rows[n_rows // 2 :]), whole[n_rows // 2 :])
    for name in ("portable", "avx2", "avx512"):
        other = find_kernels({"SHARDNET_ISA": name})
        assert other is not None
        assert torch.equal(multiply(other, rows), whole)


@with_native
@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_give_the_same_bits(kind: Quantization) -> None:
    linear, rows = make(numbers(700, 256), kind), numbers(40, 256)
    whole = linear(rows)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(rows), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("path", ["torch", pytest.param("native", marks=with_native)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_none(
    path: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler finds it and names it."""
    if path == "torch":
        for module in (quantized_linear, panel_linear):
            monkeypatch.setattr(module, "native_kernels", lambda: None)
    rows = numbers(3, 96)
    rows[1, 70] = value
    product = make(numbers(20, 96), Quantization.INT8)(rows)
    assert not product[1].isfinite().all()
    assert product[[0, 2]].isfinite().all()


@with_native
def test_rows_that_are_a_view_are_taken_as_they_are() -> None:
    linear, wide = make(numbers(20, 64), Quantization.INT4), numbers(6, 128)
    assert torch.equal(linear(wide[:, 64:]), linear(wide[:, 64:].contiguous()))
    assert torch.equal(linear(wide[::2, :64]), linear(wide[::2, :64].contiguous()))


@with_native
def test_what_is_found_can_be_less_than_the_machine_has() -> None:
    def isa(name: str) -> Isa | None:
        kernels = find_kernels({"SHARDNET_ISA": name})
        return kernels.isa if kernels else None

    assert isa("off") is None
    assert isa("portable") is Isa.PORTABLE
    found, used = isa(""), find_kernels(os.environ)
    assert found is not None
    assert used is None or used.isa <= found


@pytest.mark.parametrize("name", ["", "none"])
def test_names_of_no_rounding(name: str) -> None:
    assert Quantization.named(name) is None


def test_an_unknown_name_is_refused() -> None:
    assert Quantization.named("int4") is Quantization.INT4
    with pytest.raises(UsageError, match="--quant int3: choose none, int8 or int4"):
        Quantization.named("int3")
