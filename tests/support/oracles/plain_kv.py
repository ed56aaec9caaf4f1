"""An int8 KV cache by hand: one key or value at a time, from the words of docs/adr/0024."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def plain_rounded(row: Sequence[float]) -> list[float]:
    """Say what a finite key or value is after rounding."""
    said: list[float] = []
    for part in plain_groups(row):
        scale = plain_scale(part)
        if scale == 0.0:
            said += [0.0] * len(part)
        else:
            said += [float(np.rint(np.float32(x) / np.float32(scale))) * scale for x in part]
    return said


def plain_groups(row: Sequence[float]) -> list[Sequence[float]]:
    """Cut a row into groups of 32, or of 16 where those take fewer bytes; the last may be short."""
    size = _group(len(row))
    return [row[start : start + size] for start in range(0, len(row), size)]


def _group(width: int) -> int:
    return 16 if math.ceil(width / 16) * 18 < math.ceil(width / 32) * 34 else 32


def plain_scale(part: Sequence[float]) -> float:
    """1/127 of the largest magnitude, in bfloat16: the upper half of a float32, rounded to even."""
    scale = np.float32(max(abs(np.float32(x)) for x in part)) / np.float32(127)
    if scale < np.finfo(np.float32).smallest_normal:
        return 0.0
    bits = int(np.float32(scale).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def plain_restored(kept: Tensor, width: int) -> Tensor:
    """Read [..., W] bytes as a cache holds them: float32 [..., width]."""
    n_groups = math.ceil(width / _group(width))
    n_columns = kept.shape[-1] - 2 * n_groups
    bits = kept[..., n_columns:].contiguous().numpy().view(np.uint16).astype(np.uint32) << 16
    scales = torch.from_numpy(bits.view(np.float32)).repeat_interleave(n_columns // n_groups, -1)
    return (kept[..., :n_columns].float() * scales)[..., :width]
