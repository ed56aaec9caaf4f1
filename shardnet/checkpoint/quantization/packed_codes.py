"""Reads packed integers as codes, and computes the values that codes, scales and minimums mean.

Works on some rows at a time, so that loading takes little memory beside the result. Must not know
files, names or configs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.panel_form import PANEL, Minimum, PanelForm
from shardnet.model.kernels.code_values import code_values, scale_values
from shardnet.model.kernels.codes import Codes

PIECE_ELEMENTS: Final = 1 << 22
"""Values that are computed at a time."""


def split_bits(packed: Tensor, bits: int) -> Tensor:
    """Split the last axis into numbers of `bits` bits, 1 to 8, the lowest bits first.

    Integers of any type count as their bytes, from the lowest on; [..., n] of them give uint8
    [..., their bits / `bits`].
    """
    raw = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return raw
    mask = (1 << bits) - 1
    if 8 % bits == 0:  # a byte becomes an integer of as many bytes as it has numbers
        whole = raw.to(torch.int16 if bits == 4 else torch.int32)
        spread = whole
        for place in range(1, 8 // bits):
            spread = spread | whole << (8 - bits) * place
        return spread.bitwise_and_(mask * (0x0101 if bits == 4 else 0x01010101)).view(torch.uint8)
    # As many bytes as a number has bits hold eight.
    eights = raw.view(*raw.shape[:-1], -1, bits)
    whole = eights[..., 0].long()
    for place in range(1, bits):
        whole |= eights[..., place].long() << 8 * place
    made = whole & mask
    for place in range(1, whole.element_size()):
        made |= (whole >> bits * place & mask) << 8 * place
    return made.view(torch.uint8)


def bit_columns(packed: Tensor, bits: int, begin: int, end: int) -> Tensor:
    """Split only the numbers [begin, end) of each row; begin is a multiple of 16."""
    raw = packed.contiguous().view(torch.uint8)
    some = raw[..., begin * bits // 8 : -(-end * bits // 8)]
    if 8 % bits:  # in whole eights
        some = raw[..., begin * bits // 8 : -(-end // 8) * bits]
    return split_bits(some, bits)[..., : end - begin]


def biased(signed: Tensor) -> Tensor:
    """Add 128 to int8: uint8."""
    return signed.contiguous().view(torch.uint8) ^ 0x80


def repeat_rows(scales: Tensor, each: int, begin: int, end: int) -> Tensor:
    """Return the scales of rows [begin, end), where `each` rows share a row of `scales` [_, G]."""
    if each == 1:
        return scales[begin:end].contiguous()
    return scales[torch.arange(begin, end) // each]


def all_values(
    rows: Callable[[int, int], Codes],
    shape: tuple[int, int],
    form: PanelForm,
    order: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute all of a weight [N, K] in `dtype`; `order` are the inputs of its codes' columns."""
    n_rows, n_columns = shape
    made = torch.empty(n_rows, n_columns, dtype=dtype)
    step = max(1, PIECE_ELEMENTS // n_columns // PANEL) * PANEL
    for begin in range(0, n_rows, step):
        end = min(begin + step, n_rows)
        some = values(rows(begin, end), form)
        if order is None:
            made[begin:end] = some
        else:
            made[begin:end, order.long()] = some.to(dtype)
    return made


def values(rows: Codes, form: PanelForm) -> Tensor:
    """Compute what codes mean: float32 [N, K]. Knows the forms without two levels of scales."""
    scales = _spread(_numbers(rows.scales, form) * form.factor, rows, form)
    codes = code_values(rows.codes, form)
    if form.minimum is Minimum.NONE:
        return codes * scales
    assert rows.minimums is not None
    if form.minimum is Minimum.ZERO_POINT:
        return (codes - _spread(rows.minimums.float(), rows, form)) * scales
    return codes * scales + _spread(_numbers(rows.minimums, form), rows, form)


def _spread(entries: Tensor, rows: Codes, form: PanelForm) -> Tensor:
    return entries.repeat_interleave(form.group, 1)[:, : rows.codes.shape[1]]


def _numbers(stored: Tensor, form: PanelForm) -> Tensor:
    # Flat, since a matrix of one column counts as contiguous whatever its strides are.
    return scale_values(stored.flatten().view(torch.uint8), form.scale).view(stored.shape)
