"""Dequantise weights to the compute dtype.

Knows the arithmetic of FP8 with scales, of GPTQ's and AWQ's 4-bit integers, and of MXFP4. Works on
some rows at a time, so that loading takes little memory beside the result. Must not know files,
names or configs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

BLOCK_ELEMENTS: Final = 1 << 22
"""Values that are computed at a time."""

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an integer of AWQ's the 4 bits of each of 8 columns stand (AutoAWQ's packing)."""

FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 (OCP Microscaling Formats, 5.3.3), without the sign bit."""
FP4_BIAS: Final = 127
"""Of the exponents that scale a block."""


def from_fp8(stored: Sequence[Tensor], block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Multiply an FP8 weight [N, K] by its scales, to [N, K] in `dtype`.

    `stored` are the weight and its scales: one for all, one per row, or [N / rows, K / columns]
    for blocks of `block` (rows, columns).
    """
    weight, scales = stored
    n_rows, n_columns = weight.shape
    made = torch.empty(n_rows, n_columns, dtype=dtype)
    scales = scales.float()
    if scales.numel() > 1 and scales.numel() == n_rows:
        scales, block = scales.view(-1, 1), (1, n_columns)
    elif scales.numel() == 1:
        scales, block = scales.view(1, 1), (n_rows, n_columns)
    for rows in _pieces(n_rows, n_columns):
        of_rows = scales[torch.arange(rows.start, rows.stop) // block[0]]
        wide = of_rows.repeat_interleave(block[1], 1)[:, :n_columns]
        made[rows] = weight[rows].float() * wide
    return made


def from_gptq(
    stored: Sequence[Tensor], group_size: int, zero_offset: int, dtype: torch.dtype
) -> Tensor:
    """Dequantise GPTQ's 4-bit weight to [N, K] in `dtype`.

    `stored` are qweight [K / 8, N], 8 inputs in each integer, qzeros [G, N / 8], scales [G, N],
    and, where inputs are not grouped in order, g_idx [K]. `zero_offset` is added to the zeros: 1 in
    the first version of the format.
    """
    qweight, qzeros, scales, *order = stored
    n_inputs, n_outputs = qweight.shape[0] * 8, qweight.shape[1]
    groups = order[0].long() if order else torch.arange(n_inputs) // group_size
    zeros = (_nibbles(qzeros).flatten(1) + zero_offset) & 15  # [G, N]
    factors = scales.float()
    made = torch.empty(n_outputs, n_inputs, dtype=dtype)
    for eights in _pieces(qweight.shape[0], 8 * n_outputs):
        inputs = slice(8 * eights.start, 8 * eights.stop)
        values = _nibbles(qweight[eights]).transpose(1, 2).flatten(0, 1)  # [inputs, N]
        group = groups[inputs]
        made[:, inputs] = ((values - zeros[group]) * factors[group]).T.to(dtype)
    return made


def from_awq(stored: Sequence[Tensor], group_size: int, dtype: torch.dtype) -> Tensor:
    """Dequantise AWQ's 4-bit weight to [N, K] in `dtype`.

    `stored` are qweight [K, N / 8], 8 outputs in each integer, qzeros [G, N / 8], scales [G, N].
    """
    qweight, qzeros, scales = stored
    n_inputs, n_outputs = qweight.shape[0], qweight.shape[1] * 8
    zeros = _awq_columns(qzeros)  # [G, N]
    factors = scales.float()
    made = torch.empty(n_outputs, n_inputs, dtype=dtype)
    for inputs in _pieces(n_inputs, n_outputs):
        group = torch.arange(inputs.start, inputs.stop) // group_size
        values = _awq_columns(qweight[inputs])  # [inputs, N]
        made[:, inputs] = ((values - zeros[group]) * factors[group]).T.to(dtype)
    return made


def from_mxfp4(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Dequantise MXFP4 weights of experts to [experts, K, N] in `dtype`.

    `stored` are blocks [experts, N, K / 32, 16], two values in each byte, the first in the low
    half, and the exponents of their scales [experts, N, K / 32].
    """
    blocks, exponents = stored
    n_experts, n_outputs, n_blocks, _ = blocks.shape
    signed = (*FP4_VALUES, *(-value for value in FP4_VALUES))
    table = torch.tensor(signed)  # by 4 bits
    made = torch.empty(n_experts, n_blocks * 32, n_outputs, dtype=dtype)
    for expert in range(n_experts):
        for rows in _pieces(n_outputs, n_blocks * 32):
            packed = blocks[expert, rows]  # [rows, blocks, 16]
            halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
            powers = exponents[expert, rows].int() - FP4_BIAS
            values = torch.ldexp(table[halves.int()], powers[..., None])
            made[expert, :, rows] = values.flatten(1).T.to(dtype)
    return made


def _pieces(n_rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, row_elements))
    for at in range(0, n_rows, step):
        yield slice(at, min(at + step, n_rows))


def _nibbles(packed: Tensor) -> Tensor:
    """Split integers into 4-bit values: int32 [R, C] to [R, C, 8], the lowest bits first."""
    return packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15


def _awq_columns(packed: Tensor) -> Tensor:
    """Split AWQ's integers into 4-bit values: int32 [R, N / 8] to [R, N]."""
    return _nibbles(packed)[..., list(AWQ_ORDER)].flatten(1)
