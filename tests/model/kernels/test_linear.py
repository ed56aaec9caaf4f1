from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.needs import needs_library, needs_vectors
from torch import Tensor

from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels import linear as linear_module
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import Isa, find_kernels
from shardnet.model.kernels.linear import (
    MAX_EXACT_ROWS,
    Kernel,
    KernelChoice,
    PlainLinear,
    cpu_arithmetic,
    is_batch_invariant,
    make_linear,
    probe,
)
from shardnet.types import (
    PAIRS_ARITHMETIC,
    PORTABLE_ARITHMETIC,
    TILES_ARITHMETIC,
    Arith,
    DType,
)

CPU = torch.device("cpu")


def numbers(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def choice_of(dtype: DType, kernel: Kernel, min_rows: int = 1) -> KernelChoice:
    return KernelChoice(dtype=dtype, kernel=kernel, exact_rows=1, min_rows=min_rows)


@pytest.mark.parametrize("min_rows", [1, 4])
@pytest.mark.parametrize("n_rows", [1, 3, 4, 33])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
@pytest.mark.parametrize("kernel", list(Kernel), ids=lambda k: k.value)
def test_products_are_right(
    kernel: Kernel, dtype: DType, with_bias: bool, n_rows: int, min_rows: int
) -> None:
    """Joined weights, odd sizes, few rows padded, against float64."""
    choice = choice_of(dtype, kernel, min_rows)
    if probe(CPU, dtype, None).dtype is not dtype and kernel is Kernel.PACKED:
        pytest.skip(f"this CPU does not pack {dtype.value}")
    torch_type = torch_dtype(dtype)
    weights = [numbers(n, 37, seed=n).to(torch_type) for n in (5, 19, 1)]
    biases = [numbers(1, n, seed=n)[0].to(torch_type) for n in (5, 19, 1)] if with_bias else []
    rows = numbers(n_rows, 37).to(torch_type)
    expected = rows.double() @ torch.cat(weights).double().T
    if with_bias:
        expected += torch.cat(biases).double()
    linear = make_linear(choice, weights, biases, CPU)
    assert linear.shape == (25, 37)
    tolerance = 1e-5 if dtype is DType.FLOAT32 else 1e-2
    torch.testing.assert_close(linear(rows).double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("kernel", list(Kernel), ids=lambda k: k.value)
def test_nothing_of_the_source_is_kept(kernel: Kernel) -> None:
    """The source is a view of a mapped file: changing it later must not show."""
    weight, bias = numbers(6, 8), numbers(1, 6)[0]
    linear = make_linear(choice_of(DType.FLOAT32, kernel), [weight], [bias], CPU)
    before = linear(numbers(2, 8))
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(numbers(2, 8)), before)


BY_LIBRARY = (DType.BFLOAT16, Kernel.NATIVE)
WIDE_BY_LIBRARY = (DType.FLOAT32, Kernel.NATIVE)
HALF_BY_ONEDNN = (DType.BFLOAT16, Kernel.PACKED)
WIDE_BY_ONEDNN = (DType.FLOAT32, Kernel.PACKED)


class TestProbe:
    def test_float32_is_computed_in_float32(self) -> None:
        assert probe(CPU, DType.FLOAT32, DType.BFLOAT16).dtype is DType.FLOAT32
        assert probe(CPU, "auto", DType.FLOAT32).dtype is DType.FLOAT32
        assert probe(CPU, "auto", None).dtype is DType.FLOAT32

    def test_a_cpu_never_computes_in_float16(self) -> None:
        assert probe(CPU, DType.FLOAT16, DType.FLOAT16).dtype is DType.FLOAT32
        assert probe(CPU, DType.BFLOAT16, None).dtype is not DType.FLOAT16
        assert probe(CPU, "auto", DType.FLOAT16).dtype is not DType.FLOAT16

    def test_bfloat16_is_packed_or_computed_in_float32(self) -> None:
        choice = probe(CPU, DType.BFLOAT16, None)
        assert choice.kernel is not Kernel.PLAIN or choice.dtype is DType.FLOAT32

    @pytest.mark.parametrize(
        ("isa", "pairs", "packs", "fast", "arithmetic"),
        [
            (Isa.AVX512, True, True, BY_LIBRARY, PAIRS_ARITHMETIC),
            (Isa.AVX512, False, True, WIDE_BY_LIBRARY, PORTABLE_ARITHMETIC),
            (Isa.AVX2, False, False, WIDE_BY_LIBRARY, PORTABLE_ARITHMETIC),
            (Isa.NEON, False, True, WIDE_BY_LIBRARY, PORTABLE_ARITHMETIC),
            (Isa.PORTABLE, False, True, HALF_BY_ONEDNN, "oneDNN of torch"),
            (Isa.PORTABLE, False, False, WIDE_BY_ONEDNN, "torch"),
        ],
    )
    @pytest.mark.parametrize("has_tiles", [False, True])
    def test_the_library_computes_wherever_it_has_vectors(
        self,
        isa: Isa,
        pairs: bool,
        packs: bool,
        fast: tuple[DType, Kernel],
        arithmetic: str,
        has_tiles: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """On CPUs of each class, also on those with tiles; elsewhere by oneDNN."""
        found, half = find_kernels({}), DType.BFLOAT16
        if found is None:
            pytest.skip("no compiled products were built here")
        native = replace(found, isa=isa, has_pairs=pairs, has_tiles=has_tiles)
        monkeypatch.setattr(linear_module, "native_kernels", lambda: native)
        monkeypatch.setattr(linear_module, "_packs", lambda dtype: packs or dtype is not half)
        monkeypatch.setattr(linear_module, "_is_exact", lambda *_: True)  # not of this CPU
        portable, chosen = probe(CPU, half, half, arith=Arith.PORTABLE), probe(CPU, half, half)
        assert (portable.dtype, portable.kernel) == (DType.FLOAT32, Kernel.NATIVE)
        assert (portable.hidden_dtype, portable.stored_dtype) == (half, half)
        assert (chosen.dtype, chosen.kernel) == fast
        packed = probe(CPU, half, half, is_packed=True)
        if fast == (half, Kernel.NATIVE):
            chosen = replace(chosen, dtype=DType.FLOAT32, hidden_dtype=half, held_dtype=half)
        assert packed == chosen
        assert packed.kv_dtype is (packed.held_dtype or packed.dtype)
        assert chosen.min_rows == (4 if fast == HALF_BY_ONEDNN else 1)
        by_tiles = has_tiles and arithmetic == PAIRS_ARITHMETIC
        assert cpu_arithmetic().startswith(TILES_ARITHMETIC if by_tiles else arithmetic)

    def test_it_is_repeatable(self) -> None:
        assert len({probe(CPU, DType.BFLOAT16, None) for _ in range(3)}) == 1

    def test_without_the_packed_operators_it_falls_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a torch that has moved its private operators, or a CPU they refuse."""

        def refuse(*args: object) -> Tensor:
            raise RuntimeError("mkldnn_reorder_linear_weight: not on this CPU")

        monkeypatch.setattr(torch.ops.mkldnn._reorder_linear_weight, "default", refuse)
        monkeypatch.setattr(linear_module, "native_kernels", lambda: None)
        choice = probe(CPU, DType.BFLOAT16, None)
        assert (choice.dtype, choice.kernel) == (DType.FLOAT32, Kernel.PLAIN)
        assert probe(CPU, DType.BFLOAT16, DType.BFLOAT16) == choice

    def test_wrong_numbers_are_not_taken_for_a_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            torch.ops.mkldnn._linear_pointwise,
            "default",
            lambda rows, weight, *rest: torch.zeros(rows.shape[0], weight.shape[0]),
        )
        monkeypatch.setattr(linear_module, "native_kernels", lambda: None)
        assert probe(CPU, DType.FLOAT32, None).kernel is Kernel.PLAIN

    @needs_vectors
    def test_float32_is_the_librarys_whatever_is_stored(self) -> None:
        for stored in (None, DType.FLOAT32, DType.FLOAT16):
            choice = probe(CPU, DType.FLOAT32, stored)
            assert choice.kernel is Kernel.NATIVE
            assert choice.stored_dtype is (stored or DType.FLOAT32)

    def test_what_it_promises_holds_for_other_shapes(self) -> None:
        for dtype in (DType.FLOAT32, DType.BFLOAT16):
            choice = probe(CPU, dtype, None)
            if choice.exact_rows == 1:
                continue
            for n_out, n_in in ((1000, 2048), (257, 1600), (64, 5632)):
                weight = numbers(n_out, n_in).to(torch_dtype(choice.dtype))
                assert is_batch_invariant(make_linear(choice, [weight], [], CPU), choice, CPU)


def test_a_kernel_that_is_not_batch_invariant_is_found_out() -> None:
    class Careless(PlainLinear):
        def __call__(self, rows: Tensor) -> Tensor:
            product = super().__call__(rows)
            return product if rows.shape[0] < 17 else product * (1 + 1e-6)

    careless = Careless(numbers(16, 8), None, MAX_EXACT_ROWS)
    choice = choice_of(DType.FLOAT32, Kernel.PLAIN)
    assert not is_batch_invariant(careless, choice, CPU)
    assert is_batch_invariant(PlainLinear(numbers(16, 8), None, MAX_EXACT_ROWS), choice, CPU)


@needs_library
def test_the_compiled_library_is_named_where_it_computes() -> None:
    choice = KernelChoice(
        dtype=DType.BFLOAT16,
        kernel=Kernel.PLAIN,
        exact_rows=1,
        min_rows=1,
        quant=Quantization.INT4,
    )
    assert choice.name != "bfloat16 with int4 weights, torch"
    assert replace(choice, device="cuda").name == "bfloat16 with int4 weights, unpacked"
