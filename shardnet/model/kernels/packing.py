"""Packs weights with the compiled library.

Knows csrc/pack.c. Must not know when weights are packed, nor how they are quantised:
kernels/quantized_linear.py does the same with torch, to the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.panel_form import BFLOAT16, FLOAT16, PanelForm
from shardnet.model.kernels.library import NativeKernels, Team, check_memory

HALF_FORMS: Final = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""The forms of weights of 16 bits, by their dtype."""
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
    form: PanelForm,
    n_threads: int | None = None,
) -> None:
    """Pack weights [N, K] into `packed`, [panels, ...].

    To int8 or int4 they are quantised; to floats of 16 bits they must be of that dtype.
    `n_threads` None takes as many threads as torch. Raises ValueError for weights or memory that
    the library cannot read or write.
    """
    if (
        not can_pack(weight)
        or weight.ndim != 2
        or (form.bits == 16 and HALF_FORMS.get(weight.dtype) is not form)
    ):
        raise ValueError(f"weights {list(weight.shape)}, {weight.dtype} on {weight.device}")
    check_memory("packed weights", packed, form.packed_bytes(weight.shape[0], weight.shape[1]))
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
        bits=form.bits,
    )
    kernels.function("shardnet_pack", ctypes.POINTER(_Packing))(packing)
