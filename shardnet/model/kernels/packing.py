"""Packs weights with the compiled library.

Knows csrc/pack.c. Must not know when weights are packed, nor how they are quantised:
kernels/quantized_linear.py does the same with torch, to the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from shardnet.model.kernels.library import NativeKernels, Team, check_memory, packed_bytes

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Packing(ctypes.Structure):
    """`struct packing` of csrc/pack.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("team", Team),
        ("n_out", ctypes.c_int64),
        ("n_in", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )


def can_pack(weight: Tensor) -> bool:
    """Say whether the library can pack `weight`: it must be on the CPU, of a known float dtype."""
    return weight.device.type == "cpu" and weight.dtype in _TYPES


def pack_natively(
    kernels: NativeKernels,
    weight: Tensor,
    packed: Tensor,
    bits: int,
    n_threads: int | None = None,
) -> None:
    """Pack weights [N, K] into `packed`, [panels, ...].

    With 8 or 4 `bits` they are quantised; with 16 they must be bfloat16 and keep their values.
    `n_threads` None takes as many threads as torch. Raises ValueError for weights or memory that
    the library cannot read or write.
    """
    if (
        not can_pack(weight)
        or weight.ndim != 2
        or (bits == 16 and weight.dtype is not torch.bfloat16)
    ):
        raise ValueError(f"weights {list(weight.shape)}, {weight.dtype} on {weight.device}")
    check_memory("packed weights", packed, packed_bytes((weight.shape[0], weight.shape[1]), bits))
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    team = kernels.team
    team.n_threads = n_threads or torch.get_num_threads()
    packing = _Packing(
        weights=rows.data_ptr(),
        packed=packed.data_ptr(),
        team=team,
        n_out=rows.shape[0],
        n_in=rows.shape[1],
        stride=rows.stride(0),
        type=_TYPES[rows.dtype],
        bits=bits,
    )
    kernels.function("shardnet_pack", ctypes.POINTER(_Packing))(packing)
