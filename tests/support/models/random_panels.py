"""Packed weights of every form, from random numbers of a usual size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.panel_form import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GGUF_FORMS,
    NVFP4,
    PANEL,
    Code,
    Minimum,
    PanelForm,
    Quantization,
    Scale,
)
from shardnet.model.kernels.panels import Panels

_BOOK = tuple(float(value) for value in torch.linspace(-1, 1, 16))
FORMS: Final = (
    *GGUF_FORMS.values(),
    NVFP4,
    *(kind.form for kind in Quantization),
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    PanelForm(name="FP8", bits=8, group=128, scale=Scale.FLOAT32, code=Code.E4M3),
    PanelForm(name="FP8 E5M2", bits=8, group=128, scale=Scale.FLOAT32, code=Code.E5M2),
    PanelForm(name="GPTQ 4", bits=4, group=128, minimum=Minimum.ZERO_POINT),
    PanelForm(name="GPTQ 8", bits=8, group=128, minimum=Minimum.ZERO_POINT),
    PanelForm(name="MLX", bits=4, group=64, scale=Scale.BFLOAT16, minimum=Minimum.STORED),
    PanelForm(name="NF4", bits=4, group=64, scale=Scale.FLOAT32, code=Code.FLOAT_BOOK, book=_BOOK),
)
"""Every form that files and flags lead to, and some of those of other quantisers."""


def random_panels(form: PanelForm, n_out: int, n_in: int, seed: int = 0) -> Panels:
    """Make weights [n_out, n_in] of `form`."""
    numbers = torch.Generator().manual_seed(seed)
    shape = form.packed_shape(n_out, n_in)
    if form.is_plain:
        dtypes = {16: torch.bfloat16 if form.code is Code.BFLOAT16 else torch.float16}
        size = shape[0] * shape[1] * shape[2] * 8 // form.bits
        values = (torch.randn(size, generator=numbers) * 0.02).to(dtypes.get(form.bits))
        return Panels(packed=values.view(torch.uint8).view(shape), form=form, shape=(n_out, n_in))
    packed = torch.randint(256, shape, generator=numbers, dtype=torch.uint8)
    begin = 0
    for values in _header(form, shape[0] * shape[1], numbers):
        n_bytes = values.numel() // (shape[0] * shape[1])
        packed[..., begin : begin + n_bytes] = values.view(shape[0], shape[1], n_bytes)
        begin += n_bytes
    if form.code in (Code.E4M3, Code.E5M2):  # neither infinite nor NaN
        codes = packed[..., form.header_bytes :]
        codes[(codes & 0x7F) >= 0x78] = 0x30
    return Panels(packed=packed, form=form, shape=(n_out, n_in))


def _header(form: PanelForm, n_blocks: int, numbers: torch.Generator) -> Iterator[Tensor]:
    """Make what stands before the codes of all blocks, bytes part by part."""

    def uniform(low: float, high: float, n: int) -> Tensor:
        return torch.rand(n_blocks * n, generator=numbers) * (high - low) + low

    def whole(low: int, high: int, n: int) -> Tensor:
        return torch.randint(low, high, (n_blocks * n,), generator=numbers, dtype=torch.uint8)

    def halves(values: Tensor) -> Tensor:
        return values.half().view(torch.uint8)

    n = PANEL * form.block_groups
    if form.block_scales:
        yield halves(uniform(1e-4, 1e-3, PANEL * form.block_scales))
    floats = {Scale.FLOAT16: torch.half, Scale.BFLOAT16: torch.bfloat16, Scale.FLOAT32: torch.float}
    ranges = {Scale.EXPONENT: (118, 126), Scale.FLOAT8: (1, 0x50)}
    if form.scale in floats:
        yield uniform(1e-3, 1e-2, n).to(floats[form.scale]).view(torch.uint8)
    else:
        yield whole(*ranges.get(form.scale, (0, 256)), n)
    if form.minimum is Minimum.ZERO_POINT:
        yield whole(0, 2**form.bits, n)
    elif form.minimum is Minimum.STORED and form.scale in floats:
        yield uniform(-1e-2, 1e-2, n).to(floats[form.scale]).view(torch.uint8)
    elif form.minimum is Minimum.STORED:
        yield whole(0, 256, n)
