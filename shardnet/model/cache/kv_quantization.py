"""Quantises keys and values to int8 for the KV cache, and dequantises them.

Knows one row at a time: a row's bytes depend neither on other rows nor on its position, so that any
split, batch or replay stores the same bytes. Must not know slots or attention.

A row has a scale for every group of 16 or 32 columns (`kv_groups`). Its bytes are all columns,
zeros up to whole groups, then all scales in bfloat16, which has the range of every compute dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.types import kv_groups

_INT8_MAX = 127
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal


def quantize_rows(rows: Tensor) -> Tensor:
    """Quantise rows [..., D] of any float dtype to int8 [..., W], W bytes of columns and scales.

    The error of a column is at most half a step, which is 1/127 of the largest magnitude in its
    group, plus the rounding of the scale (1/256 more). A group too small for a normal scale becomes
    zeros, one with NaN or an infinity becomes NaN.
    """
    width = rows.shape[-1]
    if width == 0:
        return rows.to(torch.int8)
    n_groups, group = kv_groups(width)
    wide = rows.float()
    if n_groups * group > width:
        wide = F.pad(wide, (0, n_groups * group - width))
    groups = wide.view(*wide.shape[:-1], n_groups, group)
    # By a tensor: CUDA divides by a Python number by multiplying, which rounds otherwise.
    scales = groups.abs().amax(-1, keepdim=True).div_(groups.new_full((), _INT8_MAX))
    scales = scales.masked_fill_(scales < _SMALLEST_SCALE, 0.0).bfloat16()  # [..., groups, 1]
    columns = (groups / scales.float()).round_().nan_to_num_(0.0, 0.0, 0.0)  # of 0 / 0 and NaN: 0
    narrow = columns.to(torch.int8).flatten(-2)
    return torch.cat((narrow, scales.squeeze(-1).view(torch.int8)), -1)


def dequantize_rows(stored: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Dequantise rows [..., W] to [..., D] of D = `width` columns, in `dtype`.

    Column times scale is rounded once. Allocates no more than the result.
    """
    n_groups, group = kv_groups(width)
    n_columns = n_groups * group
    narrow, scales = stored[..., :n_columns], stored[..., n_columns:].view(torch.bfloat16)
    rows = torch.empty(narrow.shape, dtype=dtype, device=stored.device).copy_(narrow)
    factors = scales.unsqueeze(-1)  # [..., groups, 1]
    if dtype != torch.bfloat16:
        factors = factors.float()
    rows.view(*rows.shape[:-1], n_groups, group).mul_(factors)
    return rows[..., :width] if n_columns > width else rows
