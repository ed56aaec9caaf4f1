"""Functions of rows by the compiled library: norms, activations, rotations, a matmul per head.

Axes in shape comments: T rows, N columns, H heads, D columns of a head, R of them rotated.

Axes in shape comments: T rows, H heads, A inputs and B outputs of a head.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.model_config import Activation
from shardnet.model.config.panel_form import PANEL
from shardnet.model.kernels.library import Team, check_memory, fields, is_bf16, native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear, float_linear


class NormStruct(ctypes.Structure):
    """`struct norm` of csrc/sublayers.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


class RowStruct(ctypes.Structure):
    """`struct row_call` of csrc/sublayers.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows", "other", "another", "out"),
        ("norm", NormStruct),
        ("team", Team),
        *fields(ctypes.c_int64, "n_rows", "width", "stride", "n_others", "n_rotated"),
        *fields(ctypes.c_int32, "function", "activation", "is_bf16"),
    )


class RowFunction(enum.IntEnum):
    """`enum function` of csrc/sublayers.c."""

    ACTIVATED = 0
    SIGMOID = 1
    CAPPED = 2
    SOFTMAX = 3
    RMS_NORM = 4
    LAYER_NORM = 5
    ROTATED = 6
    SOFTPLUS = 7


ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU_NEW: 1,
    Activation.RELU: 2,
}
"""The activations that the library computes, and their numbers there."""


def activated_rows(kind: Activation, rows: Tensor, factor: Tensor | None = None) -> Tensor | None:
    """Apply an activation to rows [T, N], times `factor` [T, N] with the same strides, if given.

    This and the functions below return a new tensor of the rows' dtype, or None if the library is
    not there or does not compute this: other devices and dtypes, GELU by the error function.
    """
    if kind not in ACTIVATIONS or not _is_computed(rows):
        return None
    if factor is not None and (factor.stride() != rows.stride() or factor.dtype != rows.dtype):
        return None
    return _call(rows, RowFunction.ACTIVATED, other=factor, activation=ACTIVATIONS[kind])


def sigmoid_rows(rows: Tensor) -> Tensor | None:
    """Apply the sigmoid to rows [T, N]."""
    return _call(rows, RowFunction.SIGMOID) if _is_computed(rows) else None


def softplus_rows(rows: Tensor) -> Tensor | None:
    """Apply the softplus to rows [T, N]."""
    return _call(rows, RowFunction.SOFTPLUS) if _is_computed(rows) else None


def capped_rows(rows: Tensor, cap: float) -> Tensor | None:
    """Cap rows [T, N]: cap * tanh(x / cap)."""
    return _call(rows, RowFunction.CAPPED, eps=cap) if _is_computed(rows) else None


def softmax_rows(rows: Tensor) -> Tensor | None:
    """Take the softmax of each row [T, N]."""
    return _call(rows, RowFunction.SOFTMAX) if _is_computed(rows) else None


def normed_rows(
    rows: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None = None
) -> Tensor | None:
    """Normalize rows [T, N]: RMSNorm, or with a `bias` [N] LayerNorm.

    `weight` is [N], or [H, N] for H rows in turns; None multiplies by 1.
    """
    if not _is_computed(rows) or (weight is not None and not _is_known(weight)):
        return None
    if bias is not None and (weight is None or bias.dtype != weight.dtype):
        return None
    n_weights = 1 if weight is None else weight.numel() // rows.shape[1]
    if weight is not None:
        check_memory("a norm", weight, n_weights * rows.shape[1] * weight.itemsize)
    if bias is not None:
        check_memory("a norm's bias", bias, rows.shape[1] * bias.itemsize)
    function = RowFunction.RMS_NORM if bias is None else RowFunction.LAYER_NORM
    return _call(rows, function, other=bias, weight=weight, eps=eps, n_others=n_weights)


def rotated_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Rotate the first R columns of heads [T, H, D] by tables [T, 1, R]; `sin` has the sign."""
    n_rows, n_heads, size = heads.shape
    rows = heads.reshape(-1, size)
    if not _is_computed(rows) or not cos.dtype is sin.dtype is heads.dtype:
        return None
    n_rotated = cos.shape[-1]
    if n_rotated > size or n_rotated % 2:
        return None
    for table in (cos, sin):
        check_memory("a rotary table", table, n_rows * n_rotated * table.itemsize)
    turned = _call(
        rows,
        RowFunction.ROTATED,
        other=cos,
        another=sin,
        n_others=n_heads,
        n_rotated=n_rotated,
    )
    return turned.view(heads.shape)


def _is_known(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)


def _is_computed(rows: Tensor) -> bool:
    return _is_known(rows) and rows.ndim == 2 and native_kernels() is not None


def _call(
    rows: Tensor,
    function: RowFunction,
    *,
    other: Tensor | None = None,
    another: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    n_others: int = 1,
    n_rotated: int = 0,
) -> Tensor:
    kernels = native_kernels()
    assert kernels is not None, "_is_computed says so"
    if rows.stride(1) != 1:
        rows = rows.contiguous()
        if function is RowFunction.ACTIVATED and other is not None:
            other = other.contiguous()
    n_rows, width = rows.shape
    out = rows.new_empty(n_rows, width)
    norm = NormStruct(weight=None, eps=eps, is_bf16=0)
    if weight is not None:
        norm.weight, norm.is_bf16 = weight.data_ptr(), is_bf16(weight)
    struct = RowStruct(
        rows=rows.data_ptr(),
        other=None if other is None else other.data_ptr(),
        another=None if another is None else another.data_ptr(),
        out=out.data_ptr(),
        norm=norm,
        team=kernels.team,
        n_rows=n_rows,
        width=width,
        stride=rows.stride(0) if n_rows > 1 else width,
        n_others=n_others,
        n_rotated=n_rotated,
        function=function,
        activation=activation,
        is_bf16=is_bf16(rows),
    )
    struct.team.n_threads = torch.get_num_threads()
    kernels.function("shardnet_rows", ctypes.POINTER(RowStruct))(struct)
    return out


class HeadStruct(ctypes.Structure):
    """`struct head_matmuls` of csrc/floats.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weights", "rows", "out"),
        ("team", Team),
        *fields(ctypes.c_int64, "n_rows", "n_heads", "n_in", "n_out", "row_stride"),
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

    def linears(self) -> list[PanelLinear]:
        """Return the matmul of each head as a linear layer; only where the library multiplies."""
        native = native_kernels()
        assert native is not None, "is_native says so"
        wide = self.weights.transpose(1, 2).flatten(2)[..., : self.n_out]  # [H, A, B]
        return [float_linear([head.T.contiguous()], None, native) for head in wide]

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
