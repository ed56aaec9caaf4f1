"""Linears with weights that stay floats, by the compiled library, against torch in float64."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.checkpoints import make_llama
from support.needs import needs_vectors
from support.rings.stage_chain import CPU, StageChain, random_prompt
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import BFLOAT16, FLOAT32, GGUF_FORMS, PanelForm, Quantization
from shardnet.model.kernels import linear as linear_module
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import Isa, NativeKernels, find_kernels, native_kernels
from shardnet.model.kernels.linear import Kernel, KernelChoice, make_linear, probe
from shardnet.model.kernels.packing import pack_natively
from shardnet.model.kernels.panel_linear import float_linear
from shardnet.model.kernels.panels import Panels, unpack
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.types import DType, LayerRange

NATIVE = native_kernels()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="no compiled products were built here")
SHAPES = [(1, 1), (16, 64), (17, 65), (33, 31), (160, 96)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kernels_named(name: str) -> NativeKernels:
    found = find_kernels({"SHARDNET_ISA": name})
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512_bf16", ""])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_torch(
    name: str, shape: tuple[int, int], stored: torch.dtype, dtype: torch.dtype
) -> None:
    weight, bias = numbers(*shape).to(stored), numbers(shape[0], seed=1)
    linear = float_linear([weight], bias, kernels_named(name))
    for n_rows in (1, 2, 3, 7, 8, 9, 32, 64):
        rows = numbers(n_rows, shape[1], seed=2).to(dtype)
        product = linear(rows)
        assert product.dtype is dtype
        want = rows.double() @ weight.double().T + bias
        spread = float(want.abs().max())
        tolerance = 2e-6 if dtype is torch.float32 else 5e-3
        torch.testing.assert_close(product.double(), want, rtol=0, atol=tolerance * spread)


@settings(max_examples=40, deadline=None)
@given(
    n_out=st.integers(1, 70),
    n_in=st.integers(1, 200),
    n_rows=st.integers(1, 40),
    is_wide=st.booleans(),
    stored=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_row_has_the_same_bits_in_any_batch(
    n_out: int, n_in: int, n_rows: int, is_wide: bool, stored: torch.dtype
) -> None:
    rows = numbers(n_rows, n_in).to(torch.float32 if is_wide else torch.bfloat16)
    for name in ("portable", "avx2", "avx512_bf16", ""):
        linear = float_linear([numbers(n_out, n_in).to(stored)], None, kernels_named(name))
        whole = linear(rows)
        assert torch.equal(torch.cat([linear(row[None]) for row in rows]), whole)
        assert torch.equal(linear(rows[n_rows // 2 :]), whole[n_rows // 2 :])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_rows_have_the_same_bits_by_any_instruction_set_and_threads(
    stored: torch.dtype,
) -> None:
    """Of float32 weights several blocks of inputs, of rows and of panels."""
    weight, rows = numbers(150, 530).to(stored), numbers(110, 530)
    want = float_linear([weight], None, kernels_named("portable"))(rows)
    before = torch.get_num_threads()
    try:
        for place, name in enumerate(("avx2", "")):
            torch.set_num_threads(1 + 2 * place)
            assert torch.equal(float_linear([weight], None, kernels_named(name))(rows), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n_outs", [(16, 32, 5), (17, 3), (40,)], ids=str)
@pytest.mark.parametrize("n_in", [1, 31, 32, 33, 130])
def test_weights_packed_together_are_joined_and_keep_their_bits(
    n_outs: tuple[int, ...], n_in: int
) -> None:
    """Rows of the unit matrix give back every weight; views and turned weights are packed, too."""
    assert NATIVE is not None
    for dtype in (torch.bfloat16, torch.float32):
        stored = [numbers(n_in, n_out + 1).to(dtype)[:, 1:].T for n_out in n_outs]
        for weights in (stored, [weight.contiguous() for weight in stored]):
            linear = float_linear(weights, None, NATIVE)
            came = linear(torch.eye(n_in))
            assert torch.equal(came.T, torch.cat(stored).float())
            assert torch.equal(unpack(linear.parts[0], dtype), torch.cat(stored))


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(2, 29),
        torch.zeros(30),
        torch.zeros(2, 30, dtype=torch.float16),
        torch.zeros(2, 30, device="meta"),
    ],
    ids=["width", "axes", "dtype", "device"],
)
def test_rows_that_the_library_would_misread_are_refused(rows: Tensor) -> None:
    """It is told addresses, and would read beyond what is there."""
    linear = float_linear([numbers(20, 30).bfloat16()], None, kernels_named(""))
    with pytest.raises(ValueError, match="compiled library"):
        linear(rows)


@pytest.mark.parametrize(
    "form", [*GGUF_FORMS.values(), BFLOAT16, FLOAT32], ids=lambda form: form.name
)
def test_weights_that_the_library_would_misread_are_refused(form: PanelForm) -> None:
    kernels, shape = kernels_named(""), (20, 70)
    n_bytes = form.packed_bytes(*shape)
    whole = torch.zeros(n_bytes, dtype=torch.uint8)
    bias = torch.zeros(20)

    def part(weights: Tensor) -> Panels:
        return Panels(packed=weights, form=form, shape=shape)

    kernels.matmul([part(whole)], bias)
    wrong = (whole[:-1], torch.zeros(2 * n_bytes, dtype=torch.uint8)[::2], whole.to("meta"))
    for weights in wrong:
        with pytest.raises(ValueError, match=f"needs {n_bytes} contiguous bytes"):
            kernels.matmul([part(weights)], bias)
    for other in (bias[:-1], bias.bfloat16(), bias.to(torch.int32)):
        with pytest.raises(ValueError, match="a bias"):
            kernels.matmul([part(whole)], other)


def test_what_cannot_be_packed_is_refused() -> None:
    kernels, weight = kernels_named(""), numbers(20, 30)
    int8 = Quantization.INT8.form
    room = torch.zeros(int8.packed_bytes(20, 30), dtype=torch.uint8)
    pack_natively(kernels, weight, room, int8)
    for other, into, form in (
        (weight.double(), room, int8),
        (weight[0], room, int8),
        (weight, room[:-1], int8),
        (weight, torch.zeros(BFLOAT16.packed_bytes(20, 30), dtype=torch.uint8), BFLOAT16),
    ):
        with pytest.raises(ValueError, match="weights"):
            pack_natively(kernels, other, into, form)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux says what there is")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of another kind of machine")
def test_the_library_finds_what_the_system_says_of_the_machine() -> None:
    assert NATIVE is not None
    [flags, *_] = re.findall(
        r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M
    )
    found = set(flags.split())
    want = Isa.PORTABLE
    if {"avx2", "fma", "f16c"} <= found:
        want = Isa.AVX2
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= found:
            want = Isa.AVX512
    kernels = kernels_named("")
    assert kernels.isa is want
    assert kernels.has_pairs == (want is Isa.AVX512 and "avx512_bf16" in found)
    assert kernels.has_tiles == (want is Isa.AVX512 and {"amx_int8", "amx_bf16"} <= found)
    assert not kernels_named("avx512_bf16").has_tiles


def test_weights_of_several_dtypes_are_joined_in_float32() -> None:
    choice = KernelChoice(dtype=DType.FLOAT32, kernel=Kernel.NATIVE, exact_rows=32, min_rows=1)
    weights, rows = [numbers(20, 30), numbers(9, 30).bfloat16()], numbers(3, 30)
    linear = make_linear(choice, weights, [], CPU)
    assert linear.is_native
    want = rows @ torch.cat([weight.float() for weight in weights]).T
    torch.testing.assert_close(linear(rows), want)
    with pytest.raises(ValueError, match=r"bfloat16, torch.float32, not all of one float dtype"):
        float_linear(weights, None, kernels_named(""))


@needs_vectors
@pytest.mark.parametrize("stored", [DType.BFLOAT16, DType.FLOAT16])
def test_a_checkpoint_of_16_bits_in_float32_keeps_its_weights_narrow(
    stored: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loses nothing by it: the logits are those with weights in float32."""
    folder = make_llama(tmp_path, dtype=torch_dtype(stored))
    choice = probe(CPU, DType.FLOAT32, stored)
    assert choice.kernel is Kernel.NATIVE
    assert weight_form(Checkpoint.open(folder), choice).linear_dtype is stored
    plain = replace(choice, kernel=Kernel.PLAIN)
    prompt, whole = random_prompt(40, 300), [LayerRange(0, 4)]
    logits = StageChain.load(folder, whole, choice).prefill(0, prompt)
    want = StageChain.load(folder, whole, plain).prefill(0, prompt)
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)
    monkeypatch.setattr(linear_module, "native_kernels", lambda: None)
    assert probe(CPU, DType.FLOAT32, stored).kernel is not Kernel.NATIVE


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512_bf16", ""])
def test_sums_that_are_infinite_stay_so(name: str) -> None:
    weight = torch.tensor([[1e30, 1.0, 1.0]])
    rows = torch.tensor([[-1e30, 5.0, 1.0], [1e30, 5.0, 1.0], [1e30, -torch.inf, 1.0]])
    out = float_linear([weight], None, kernels_named(name))(rows)
    assert out[:, 0].nan_to_num(7, 1, -1).tolist() == [-1, 1, 7]
