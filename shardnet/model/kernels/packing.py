"""Packs weights with the compiled library, and looks rows up in packed tables.

Knows csrc/pack.c, which quantises, and csrc/panels.c, which packs what is quantised. Must not know
when weights are packed, nor how: kernels/quantized_linear.py and kernels/panels.py do the same with
torch, to the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.panel_form import BFLOAT16, FLOAT16, FLOAT32, GGUF_BLOCK_BYTES, PanelForm
from shardnet.model.kernels.codes import Codes
from shardnet.model.kernels.library import FormStruct, NativeKernels, Team, check_memory, fields

FLOAT_FORMS: Final = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
"""The forms of weights that stay floats, by their dtype."""
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Packing(ctypes.Structure):
    """`struct packing` of csrc/pack.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weights", "packed"),
        ("team", Team),
        *fields(ctypes.c_int64, "n_out", "n_in", "stride"),
        *fields(ctypes.c_int32, "type", "bits"),
    )


class _BlockPacking(ctypes.Structure):
    """`struct block_packing` of csrc/panels.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows", "packed"),
        ("team", Team),
        *fields(ctypes.c_int64, "n_out", "n_in", "stride"),
        *fields(ctypes.c_int32, "type", "block_bytes"),
        ("form", FormStruct),
    )


class _CodePacking(ctypes.Structure):
    """`struct code_packing` of csrc/panels.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "codes", "scales", "minimums", "outer", "packed"),
        ("team", Team),
        *fields(ctypes.c_int64, "n_out", "n_in"),
        ("form", FormStruct),
    )


class _LookUp(ctypes.Structure):
    """`struct look_up` of csrc/linear.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weights", "ids", "out"),
        *fields(ctypes.c_int64, "n_ids", "n_in"),
        ("form", FormStruct),
        ("team", Team),
    )


_GGUF_NUMBERS: Final = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
"""The number of each GGUF type that the library packs."""


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

    To int8 or int4 they are quantised; for a form of FLOAT_FORMS they must be of its dtype.
    `n_threads` None takes as many threads as torch. Raises ValueError for weights or memory that
    the library cannot read or write.
    """
    if (
        not can_pack(weight)
        or weight.ndim != 2
        or (form.is_plain and FLOAT_FORMS.get(weight.dtype) is not form)
    ):
        raise ValueError(f"weights {list(weight.shape)}, {weight.dtype} on {weight.device}")
    check_memory("packed weights", packed, form.packed_bytes(weight.shape[0], weight.shape[1]))
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    halves = 2 if form.bits == 32 else 1  # a float32 is laid out as a pair of 16 bits is
    packing = _Packing(
        weights=rows.data_ptr(),
        packed=packed.data_ptr(),
        team=_team(kernels, n_threads),
        n_out=rows.shape[0],
        n_in=halves * rows.shape[1],
        stride=halves * rows.stride(0),
        type=_TYPES[rows.dtype],
        bits=form.bits // halves,
    )
    kernels.function("shardnet_pack", ctypes.POINTER(_Packing))(packing)


def pack_blocks_natively(
    kernels: NativeKernels,
    kind: str,
    rows: Tensor,
    packed: Tensor,
    form: PanelForm,
    n_threads: int | None = None,
) -> None:
    """Pack rows in the blocks of the GGUF type `kind`, uint8 [N, bytes of a row], into panels.

    `n_threads` None takes as many threads as torch. Raises ValueError for memory that the library
    cannot read or write.
    """
    number, block_bytes = _GGUF_NUMBERS[kind], GGUF_BLOCK_BYTES[kind]
    n_out, row_bytes = rows.shape
    n_in = row_bytes // block_bytes * form.block_inputs
    if rows.dtype is not torch.uint8 or rows.device.type != "cpu" or row_bytes % block_bytes:
        raise ValueError(f"rows {list(rows.shape)}, {rows.dtype} on {rows.device} are not {kind}")
    check_memory("packed weights", packed, form.packed_bytes(n_out, n_in))
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    packing = _BlockPacking(
        rows=rows.data_ptr(),
        packed=packed.data_ptr(),
        team=_team(kernels, n_threads),
        n_out=n_out,
        n_in=n_in,
        stride=rows.stride(0),
        type=number,
        block_bytes=block_bytes,
        form=FormStruct.of(form),
    )
    kernels.function("shardnet_pack_blocks", ctypes.POINTER(_BlockPacking))(packing)


def pack_codes_natively(
    kernels: NativeKernels,
    rows: Codes,
    packed: Tensor,
    form: PanelForm,
    n_threads: int | None = None,
) -> None:
    """Pack rows of codes into panels; `n_threads` as pack_natively.

    Raises ValueError for memory that is not as Codes says.
    """
    n_out, n_in = rows.codes.shape
    n_groups, n_blocks = -(-n_in // form.group), -(-n_in // form.block_inputs)
    check_memory("codes", rows.codes, n_out * n_in, torch.uint8)
    check_memory("scales", rows.scales, n_out * n_groups * form.scale.bytes)
    if rows.minimums is not None:
        check_memory("minimums", rows.minimums, n_out * n_groups * form.minimum_bytes)
    if (outer := rows.block_scales) is not None:
        check_memory("scales of blocks", outer, 2 * n_out * n_blocks * form.block_scales)
    if (rows.minimums is None) != (form.minimum_bytes == 0):
        raise ValueError(f"{form.name}: minimums are missing, or too many")
    if (rows.block_scales is None) != (form.block_scales == 0):
        raise ValueError(f"{form.name}: scales of blocks are missing, or too many")
    check_memory("packed weights", packed, form.packed_bytes(n_out, n_in))
    packing = _CodePacking(
        codes=rows.codes.data_ptr(),
        scales=rows.scales.data_ptr(),
        minimums=rows.minimums.data_ptr() if rows.minimums is not None else None,
        outer=outer.data_ptr() if outer is not None else None,
        packed=packed.data_ptr(),
        team=_team(kernels, n_threads),
        n_out=n_out,
        n_in=n_in,
        form=FormStruct.of(form),
    )
    kernels.function("shardnet_pack_codes", ctypes.POINTER(_CodePacking))(packing)


def look_up_natively(
    kernels: NativeKernels, packed: Tensor, form: PanelForm, shape: tuple[int, int], ids: Tensor
) -> Tensor:
    """Compute the rows `ids`, int64 [T], of packed weights of `shape` (N, K): float32 [T, K].

    Raises ValueError for an id outside [0, N), and for memory of another size or device.
    """
    check_memory("packed weights", packed, form.packed_bytes(*shape))
    ids = check_memory("ids", ids.contiguous(), 8 * ids.numel(), torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < shape[0]:
        raise ValueError(f"an id is outside a table of {shape[0]} rows")
    out = torch.empty(ids.numel(), shape[1])
    call = _LookUp(
        weights=packed.data_ptr(),
        ids=ids.data_ptr(),
        out=out.data_ptr(),
        n_ids=ids.numel(),
        n_in=shape[1],
        form=FormStruct.of(form),
        team=_team(kernels, None),
    )
    kernels.function("shardnet_look_up", ctypes.POINTER(_LookUp))(call)
    return out


def _team(kernels: NativeKernels, n_threads: int | None) -> Team:
    team = kernels.team
    team.n_threads = n_threads or torch.get_num_threads()
    return team
