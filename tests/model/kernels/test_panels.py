"""Packed weights are what their forms say, in torch and in the compiled library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from shardnet.model.config.panel_form import GGUF_FORMS
from shardnet.model.kernels.panels import GgufRows, Panels, look_up, pack_into, unpack


def random_blocks(kind: str, n_rows: int, n_in: int) -> torch.Tensor:
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


def packed_rows(kind: str, n_rows: int, n_in: int) -> tuple[Panels, torch.Tensor]:
    """Pack random blocks; return them with their values by the `gguf` package, float32 [N, K]."""
    blocks = random_blocks(kind, n_rows, n_in)
    form = GGUF_FORMS[kind]
    packed = torch.empty(form.packed_shape(n_rows, n_in), dtype=torch.uint8)
    pack_into(packed, GgufRows(type=kind, rows=blocks), form)
    values = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    panels = Panels(packed=packed, form=form, shape=(n_rows, n_in))
    return panels, torch.from_numpy(np.ascontiguousarray(values))


@pytest.mark.parametrize("kind", GGUF_FORMS)
@pytest.mark.parametrize("n_rows", [1, 16, 37])
def test_panels_are_what_the_type_means(kind: str, n_rows: int) -> None:
    """Every type's values are those of the `gguf` package, which computes in float32 too."""
    panels, values = packed_rows(kind, n_rows, 512)
    torch.testing.assert_close(unpack(panels, torch.float32), values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_rows_are_looked_up(kind: str) -> None:
    """Rows are those of the whole, in any order."""
    panels, _ = packed_rows(kind, 40, 256)
    ids = torch.tensor([39, 0, 17, 17])
    assert torch.equal(look_up(panels, ids, torch.float32), unpack(panels, torch.float32)[ids])
