"""A matmul for each head, by the compiled library or by torch.

Knows the struct of csrc/floats.c and the layout of its weights. Must not know layers.

Axes in shape comments: T rows, H heads, A inputs and B outputs of a head.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.panel_form import PANEL
from shardnet.model.kernels.library import Team, check_memory, native_kernels


class HeadStruct(ctypes.Structure):
    """`struct head_matmuls` of csrc/floats.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("team", Team),
        ("n_rows", ctypes.c_int64),
        ("n_heads", ctypes.c_int64),
        ("n_in", ctypes.c_int64),
        ("n_out", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMatmuls:
    """Multiplies each head of rows by weights of its own, each output in one order of additions."""

    weights: Tensor  # [H, A, B]; packed: [H, panels, A, 16]
    n_out: int
    is_native: bool

    @classmethod
    def of(cls, weights: Tensor) -> HeadMatmuls:
        """Take weights [H, A, B], float32 or bfloat16: the library packs a copy of those on a CPU.

        Where torch computes, the result shares memory with them.
        """
        n_heads, n_in, n_out = weights.shape
        is_known = weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.bfloat16)
        if not is_known or native_kernels() is None:
            return cls(weights=weights, n_out=n_out, is_native=False)
        padded = F.pad(weights, (0, -n_out % PANEL))
        packed = padded.view(n_heads, n_in, -1, PANEL).transpose(1, 2).contiguous()
        return cls(weights=packed, n_out=n_out, is_native=True)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows [T, H, A]: [T, H, B] in their dtype."""
        if not self.is_native:
            return torch.bmm(rows.transpose(0, 1), self.weights).transpose(0, 1)
        kernels = native_kernels()
        n_heads, n_panels, n_in, _ = self.weights.shape
        if kernels is None or rows.shape[1:] != (n_heads, n_in) or rows.device.type != "cpu":
            raise ValueError(f"rows {list(rows.shape)} for {n_heads} heads of {n_in} columns")
        check_memory(
            "weights of heads",
            self.weights,
            n_heads * n_panels * n_in * PANEL * self.weights.itemsize,
        )
        wide = rows.float()
        if wide.stride(2) != 1:
            wide = wide.contiguous()
        out = torch.empty(len(rows), n_heads, self.n_out)
        struct = HeadStruct(
            weights=self.weights.data_ptr(),
            rows=wide.data_ptr(),
            out=out.data_ptr(),
            team=kernels.team,
            n_rows=len(rows),
            n_heads=n_heads,
            n_in=n_in,
            n_out=self.n_out,
            row_stride=wide.stride(0),
            head_stride=wide.stride(1),
            is_bf16=self.weights.dtype is torch.bfloat16,
        )
        struct.team.n_threads = torch.get_num_threads()
        kernels.function("shardnet_head_matmuls", ctypes.POINTER(HeadStruct))(struct)
        return out.to(rows.dtype)
