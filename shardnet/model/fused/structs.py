"""What the library's halves of layers are given: the structs of csrc/halves.c, here again.

Knows their fields and what must hold of norms, rows and products before addresses go into them.
Must not know when a half is called.
"""

from __future__ import annotations

import ctypes
import math
from typing import Final, Protocol

import torch
from torch import Tensor

from shardnet.model.config.model_config import Activation
from shardnet.model.kernels.library import (
    NativeKernels,
    NativeSource,
    Team,
    check_memory,
    check_rows,
    is_bf16,
)
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.norms import HeadNorm, Norm

BEFORE: Final = 1
STORE: Final = 2
ATTEND: Final = 4
AFTER: Final = 8
"""The parts of an attention half that one call may do: norm, projections and rotation; keeping keys
and values; decode rows' attention; output projection and residual."""
MAX_HEAD: Final = 256
"""The longest head that the library attends with."""
ACTIVATIONS: Final = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU_NEW: 1,
    Activation.RELU: 2,
}
"""Those that the library has, and their numbers there."""
_ALIGNMENT: Final = 64


class NativeLinearProduct(Linear, NativeSource, Protocol):
    """A product of the library, for a layer."""


class NormStruct(ctypes.Structure):
    """`struct norm` of csrc/halves.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )

    @classmethod
    def of(cls, norm: Norm | HeadNorm | None, *shape: int) -> NormStruct:
        """Point to a norm with weights of `shape` that outlives this. Raises ValueError."""
        if norm is None:
            return cls(weight=None, eps=0.0, is_bf16=0)
        weight = norm.weight
        check_memory("a norm", weight, math.prod(shape) * weight.itemsize)
        return cls(weight=weight.data_ptr(), eps=norm.eps, is_bf16=is_bf16(weight))


class ResidualStruct(ctypes.Structure):
    """`struct residual` of csrc/halves.c."""

    _fields_ = (
        ("before", NormStruct),
        ("after", NormStruct),
        ("hidden", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("n_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("multiplier", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        ("team", Team),
    )

    @classmethod
    def of(cls, residual: Residual, width: int, kernels: NativeKernels) -> ResidualStruct:
        """Say what stays from call to call."""
        return cls(
            before=NormStruct.of(residual.before, width),
            after=NormStruct.of(residual.after, width),
            width=width,
            multiplier=residual.multiplier,
            team=kernels.team,
        )

    def enter(self, hidden: Tensor, out: Tensor) -> None:
        """Say what is of this call. Raises ValueError for rows that cannot be read."""
        self.n_rows = check_rows(hidden, self.width)
        self.hidden = hidden.data_ptr()
        self.out = check_memory("what comes out", out, hidden.nbytes, hidden.dtype).data_ptr()
        self.is_bf16 = is_bf16(hidden)
        self.team.n_threads = torch.get_num_threads()


class AttentionStruct(ctypes.Structure):
    """`struct attention_half` of csrc/halves.c."""

    _fields_ = (
        ("residual", ResidualStruct),
        ("heads", NormStruct),
        ("qkv", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("looking", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("n_spans", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("n_heads", ctypes.c_int64),
        ("n_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("n_rotated", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("kept_bytes", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class MlpStruct(ctypes.Structure):
    """`struct mlp_half` of csrc/halves.c."""

    _fields_ = (
        ("residual", ResidualStruct),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("n_inner", ctypes.c_int64),
        ("activation", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """`struct layer` of csrc/halves.c."""

    _fields_ = (
        ("attention", ctypes.c_void_p),
        ("mlp", ctypes.c_void_p),
    )


def check_shape(name: str, product: Linear, n_out: int, n_in: int) -> None:
    """Raise ValueError unless a product has the shape that its layer wants."""
    if product.shape != (n_out, n_in):
        raise ValueError(f"{name} has shape {product.shape}, the layer wants {(n_out, n_in)}")


def aligned(n_bytes: int) -> int:
    """Round up to where the next part of a call's memory may begin."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
