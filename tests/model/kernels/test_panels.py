"""Packed weights are what their forms say, in torch and in the compiled library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from support.needs import needs_library
from support.soak import cases, is_soak
from torch import Tensor

from shardnet.model.config.panel_form import (
    BFLOAT16,
    FLOAT16,
    GGUF_FORMS,
    Code,
    Minimum,
    PanelForm,
    Scale,
)
from shardnet.model.kernels import panel_linear
from shardnet.model.kernels import panels as panels_module
from shardnet.model.kernels.codes import Codes
from shardnet.model.kernels.library import NativeKernels, find_kernels, native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear, pack_floats
from shardnet.model.kernels.panels import (
    GgufRows,
    PanelMemory,
    Panels,
    look_up,
    pack_codes,
    pack_into,
    unpack,
)

NF4 = (-1.0, -0.7, -0.53, -0.4, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1)
FORMS = [
    *GGUF_FORMS.values(),
    PanelForm(name="int8", bits=8, group=64, offset=128),
    PanelForm(name="int8 rows", bits=8, group=544, offset=128, scale=Scale.FLOAT32),
    PanelForm(name="GPTQ 2", bits=2, group=64, minimum=Minimum.ZERO_POINT),
    PanelForm(name="GPTQ 3", bits=3, group=128, minimum=Minimum.ZERO_POINT),
    PanelForm(name="GPTQ 4", bits=4, group=128, minimum=Minimum.ZERO_POINT),
    PanelForm(name="GPTQ 8", bits=8, group=32, minimum=Minimum.ZERO_POINT),
    PanelForm(name="MLX 4", bits=4, group=64, scale=Scale.BFLOAT16, minimum=Minimum.STORED),
    PanelForm(name="MLX 5", bits=5, group=64, scale=Scale.BFLOAT16, minimum=Minimum.STORED),
    PanelForm(name="MLX 6", bits=6, group=32, scale=Scale.FLOAT16, minimum=Minimum.STORED),
    PanelForm(name="MLX 8", bits=8, group=64, scale=Scale.BFLOAT16, minimum=Minimum.STORED),
    PanelForm(
        name="NVFP4",
        bits=4,
        group=16,
        scale=Scale.FLOAT8,
        book=GGUF_FORMS["MXFP4"].book,
        code=Code.BOOK,
        factor=0.5,
    ),
    PanelForm(name="FP8 128", bits=8, group=128, scale=Scale.FLOAT32, code=Code.E4M3),
    PanelForm(name="FP8 96", bits=8, group=96, scale=Scale.FLOAT32, code=Code.E4M3),
    PanelForm(name="FP8 E5M2", bits=8, group=544, scale=Scale.FLOAT32, code=Code.E5M2),
    PanelForm(name="NF4", bits=4, group=64, scale=Scale.FLOAT32, code=Code.FLOAT_BOOK, book=NF4),
]
"""Every way to combine bits, groups and scales that some format needs."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_codes(form: PanelForm, n_out: int, n_in: int) -> Codes:
    """Make rows of random codes with scales of about 0.01."""
    generator = torch.Generator().manual_seed(n_out + n_in)
    codes = torch.randint(0, 1 << form.bits, (n_out, n_in), generator=generator, dtype=torch.uint8)
    if form.code is Code.E4M3:
        codes[codes & 0x7F == 0x7F] = 0  # not a number
    if form.code is Code.E5M2:
        codes[codes & 0x7C == 0x7C] = 0
    n_groups, n_blocks = -(-n_in // form.group), -(-n_in // form.block_inputs)
    whole = torch.randint(-60, 60, (n_out, n_groups), generator=generator)
    small = torch.rand(n_out, n_groups, generator=generator) * 0.01 + 0.001
    scales = {
        Scale.FLOAT16: small.half(),
        Scale.BFLOAT16: small.bfloat16(),
        Scale.FLOAT32: small,
        Scale.EXPONENT: (120 + whole % 4).to(torch.uint8),
        Scale.FLOAT8: small.to(torch.float8_e4m3fn).view(torch.uint8),
        Scale.UINT8: (whole % 64).to(torch.uint8),
        Scale.INT8: whole.to(torch.int8).view(torch.uint8),
        Scale.NIBBLES: (whole % 256).to(torch.uint8),
    }[form.scale]
    minimums = None
    if form.minimum is Minimum.ZERO_POINT:
        minimums = (whole % (1 << form.bits)).to(torch.uint8)
    elif form.minimum is Minimum.STORED:
        minimums = scales.roll(1, 0)
    outer = torch.rand(n_out, n_blocks, form.block_scales, generator=generator) * 1e-3
    block_scales = outer.half() if form.block else None
    return Codes(codes=codes, scales=scales, minimums=minimums, block_scales=block_scales)


def random_panels(form: PanelForm, n_out: int, n_in: int) -> Panels:
    packed = pack_codes(random_codes(form, n_out, n_in), form)
    return Panels(packed=packed, form=form, shape=(n_out, n_in))


def rounded(rows: Tensor, form: PanelForm) -> Tensor:
    """Round rows [T, K] to int8 in groups, as the library does; not for codes that are floats."""
    if form.is_float:
        return rows
    missing = -rows.shape[1] % form.token_group
    groups = torch.nn.functional.pad(rows, (0, missing)).view(len(rows), -1, form.token_group)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    whole = (groups * (127 / groups.abs().amax(-1, keepdim=True))).nan_to_num(0).round()
    return (whole * scale).flatten(1)[:, : rows.shape[1]]


def kernels_named(name: str) -> NativeKernels:
    found = find_kernels({"SHARDNET_ISA": name})
    assert found is not None
    return found


def input_sizes(form: PanelForm) -> list[int]:
    """Numbers of inputs that rows of the form can have."""
    if form.block == 256:
        return [256, 512]
    return [form.group, 544] if form.group > 256 else [form.group * 3, 544, 600]


@needs_library
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("n_rows", cases([1, 21, 300], [2, 3, 4, 5, 6, 7, 8, 11, 40]))
def test_the_library_multiplies_every_form(form: PanelForm, n_rows: int) -> None:
    """As the values and the rounded rows say, with the same bits in every instruction set."""
    for n_in in input_sizes(form)[-1 if n_rows == 300 and not is_soak() else 0 :]:
        panels = random_panels(form, 37, n_in)
        rows, bias = numbers(n_rows, n_in), numbers(37, seed=1)
        came = [
            PanelLinear([panels], bias, kernels_named(name))(rows)
            for name in ("portable", "avx2", "avx512", "")
        ]
        want = rounded(rows, form).double() @ unpack(panels, torch.float64).T + bias
        spread = float(want.abs().max())
        torch.testing.assert_close(came[0].double(), want, rtol=0, atol=3e-6 * spread)
        for other in came[1:]:
            assert torch.equal(came[0], other)


@needs_library
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_row_has_the_same_bits_in_any_batch(form: PanelForm) -> None:
    n_in = input_sizes(form)[-1]
    linear = PanelLinear([random_panels(form, 40, n_in)], None)
    rows = numbers(70, n_in).bfloat16()
    whole = linear(rows)
    for begin, end in ((0, 1), (69, 70), (3, 8), (10, 27), (1, 34)):
        assert torch.equal(linear(rows[begin:end]), whole[begin:end])


@needs_library
@pytest.mark.parametrize("name", ["portable", "avx2", ""])
@pytest.mark.parametrize("n_rows", [1, 9, 40])
def test_parts_of_several_forms_make_one_linear(name: str, n_rows: int) -> None:
    """Each part has the bits that it has alone; rows are shared where they are rounded alike."""
    forms = [GGUF_FORMS[kind] for kind in ("Q4_K", "Q4_K", "Q6_K", "Q5_0", "Q4_1")]
    forms += [FORMS[-4], BFLOAT16, FLOAT16]
    parts = []
    for form, n_out in zip(forms, (48, 20, 33, 16, 5, 17, 30, 31), strict=True):
        if form.bits == 16:
            dtype = torch.bfloat16 if form is BFLOAT16 else torch.float16
            weight = numbers(n_out, 512, seed=n_out).to(dtype)
            parts.append(pack_floats([weight], kernels_named(name)))
        else:
            parts.append(random_panels(form, n_out, 512))
    order = torch.randperm(512, generator=torch.Generator().manual_seed(5)).int()
    parts.append(replace(parts[0], input_order=order))
    rows, bias = numbers(n_rows, 512), numbers(sum(part.shape[0] for part in parts), seed=2)
    whole = PanelLinear(parts, bias, kernels_named(name))(rows)
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        own = rows if part.input_order is None else rows[:, order.long()]
        alone = replace(part, input_order=None)
        one = PanelLinear([alone], bias[begin:end], kernels_named(name))(own)
        assert torch.equal(whole[:, begin:end], one)
        begin = end


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_torch_multiplies_every_form(form: PanelForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the values, where there is no library."""
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)
    n_in = input_sizes(form)[-1]
    panels, rows = random_panels(form, 37, n_in), numbers(5, n_in)
    linear = PanelLinear([panels, panels], numbers(74, seed=1))
    assert not linear.is_native
    weight = unpack(panels, torch.float32)
    want = rows @ torch.cat((weight, weight)).T + numbers(74, seed=1)
    torch.testing.assert_close(linear(rows), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def random_blocks(kind: str, n_rows: int, n_in: int) -> Tensor:
    """Make rows of random blocks whose float16 are small and finite: uint8 [N, bytes]."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = torch.Generator().manual_seed(n_rows * 1009 + n_in)
    shape = (n_rows, n_in // block_size, block_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(
        kind, (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    ):
        small = torch.randn(shape[:2], generator=generator).mul_(0.01).half()
        blocks[..., at : at + 2] = small[..., None].view(torch.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 12
    return blocks.view(n_rows, -1)


def packed_rows(kind: str, n_rows: int, n_in: int) -> tuple[Panels, Tensor]:
    """Pack random blocks; return them with their values by the `gguf` package, float32 [N, K]."""
    blocks = random_blocks(kind, n_rows, n_in)
    form = GGUF_FORMS[kind]
    packed = torch.empty(form.packed_shape(n_rows, n_in), dtype=torch.uint8)
    pack_into(packed, GgufRows(type=kind, rows=blocks), form)
    values = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    panels = Panels(packed=packed, form=form, shape=(n_rows, n_in))
    return panels, torch.from_numpy(np.ascontiguousarray(values))


@pytest.fixture(params=["library", "torch"])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack and look up with the library and without it."""
    if request.param == "torch":
        monkeypatch.setattr(panels_module, "native_kernels", lambda: None)
    elif native_kernels() is None:
        pytest.skip("no compiled kernels here")


@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize("kind", GGUF_FORMS)
@pytest.mark.parametrize("n_rows", [1, 16, 37])
def test_panels_are_what_the_type_means(kind: str, n_rows: int) -> None:
    """Every type's values are those of the `gguf` package, which computes in float32 too."""
    panels, values = packed_rows(kind, n_rows, 512)
    torch.testing.assert_close(unpack(panels, torch.float32), values, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_rows_are_looked_up(form: PanelForm) -> None:
    """Rows are those of the whole, in any order."""
    ids = torch.tensor([39, 0, 17, 17])
    for n_in in input_sizes(form):
        panels = random_panels(form, 40, n_in)
        whole = unpack(panels, torch.float32)
        assert torch.equal(look_up(panels, ids, torch.float32), whole[ids])


@needs_library
@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_halves_are_looked_up(dtype: torch.dtype) -> None:
    weight = numbers(40, 33).to(dtype)
    native = native_kernels()
    assert native is not None
    panels = pack_floats([weight], native)
    assert torch.equal(unpack(panels, dtype), weight)
    assert torch.equal(look_up(panels, torch.tensor([39, 3]), dtype), weight[[39, 3]])


@needs_library
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_library_packs_codes_as_torch_does(
    form: PanelForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n_in in input_sizes(form):
        codes = random_codes(form, 37, n_in)
        packed = pack_codes(codes, form)
        with monkeypatch.context() as patched:
            patched.setattr(panels_module, "native_kernels", lambda: None)
            assert torch.equal(pack_codes(codes, form), packed)


@needs_library
def test_codes_that_the_library_would_misread_are_refused() -> None:
    """It is told addresses, and would read beyond what is there."""
    form = GGUF_FORMS["Q4_K"]
    whole = random_codes(form, 16, 256)
    for wrong in (
        replace(whole, scales=whole.scales[:, :-1]),
        replace(whole, minimums=None),
        replace(whole, minimums=whole.scales[:3]),
        replace(whole, block_scales=None),
        replace(whole, codes=whole.codes.int()),
    ):
        with pytest.raises(ValueError, match=r"Q4_K|the compiled library needs"):
            pack_codes(wrong, form)
    rows = random_blocks("Q4_K", 3, 256)
    packed = torch.empty(form.packed_shape(3, 256), dtype=torch.uint8)
    for other in (rows[:, 1:], rows[:0], rows.int()):
        with pytest.raises(ValueError, match=r"are not Q4_K|the compiled library needs"):
            pack_into(packed, GgufRows(type="Q4_K", rows=other), form)
    panels = Panels(packed=packed, form=form, shape=(3, 256))
    for outside in (-1, 3):
        with pytest.raises(ValueError, match="outside a table of 3 rows"):
            look_up(panels, torch.tensor([0, outside]), torch.float32)


def test_weights_lie_side_by_side_and_large_ones_alone() -> None:
    memory = PanelMemory()
    small = [memory.take((n, 3, 100)) for n in (1, 2, 7)]
    large = memory.take((1, 1, 70 << 20))
    later = memory.take((5, 1, 64))
    pieces = {weights.untyped_storage().data_ptr() for weights in (*small, later)}
    assert len(pieces) == 1
    assert large.untyped_storage().nbytes() == large.numel()
    for number, weights in enumerate((*small, later, large)):
        assert weights.data_ptr() % 64 == 0
        weights.fill_(number)
    for number, weights in enumerate((*small, later, large)):
        assert torch.equal(weights, torch.full_like(weights, number))


def test_weights_that_find_no_room_begin_another_piece() -> None:
    memory = PanelMemory()
    first, second, third, fourth = (memory.take((1, 1, 50 << 20)) for _ in range(4))
    pieces = [weights.untyped_storage().data_ptr() for weights in (first, second, third, fourth)]
    assert pieces[0] == pieces[1] != pieces[2] == pieces[3]
    assert fourth.shape == (1, 1, 50 << 20)


@pytest.mark.parametrize("sizes", [(3_379_200, 1_689_600), (9_126_805, 4_563_402), (50_000, 7_000)])
def test_pieces_have_little_room_that_nobody_takes(sizes: tuple[int, int]) -> None:
    """Of experts whose two weights come by turns, as of several that are published."""
    memory = PanelMemory()
    made = [memory.take((1, 1, sizes[number % 2])) for number in range(2 * (1 << 30) // sum(sizes))]
    pieces = {own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in made}
    [*full, _] = pieces.values()
    taken = sum(own.nbytes for own in made)
    assert 0.99 * sum(full) < taken < sum(pieces.values())
