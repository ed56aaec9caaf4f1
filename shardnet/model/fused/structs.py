"""The arguments of the library's sub-layers, mirrors of the structs of csrc/, and who holds them.

Knows their fields and checks norms, rows and linears before passing their addresses. Must not know
when a sub-layer is called.
"""

from __future__ import annotations

import ctypes
import enum
import math
from copy import copy
from typing import Final, Generic, Self, TypeVar

import torch
from torch import Tensor

from shardnet.model.arithmetic.row_functions import NormStruct
from shardnet.model.kernels.library import (
    NativeKernels,
    Team,
    check_memory,
    check_rows,
    is_bf16,
)
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.native_attention import AttendStruct
from shardnet.model.layers.norms import BareNorm, HeadNorm, Norm
from shardnet.model.shards.gathered import JoinedLinear
from shardnet.model.shards.group import JoinedStruct

BEFORE: Final = 1
STORE: Final = 2
ATTEND: Final = 4
AFTER: Final = 8
"""The parts of the attention sub-layer that one call may compute: norm, projections and rotation;
storing keys and values; attention of decode rows; output projection and residual."""
CLAMPED: Final = 3
"""gpt-oss's activation among those of csrc/sublayers.c, next to ACTIVATIONS."""
_ALIGNMENT: Final = 64
ArgumentsT = TypeVar("ArgumentsT", bound=ctypes.Structure)


def norm_struct(norm: Norm | HeadNorm | None, *shape: int) -> NormStruct:
    """Point to a norm, which must outlive this. Raises ValueError for another shape."""
    if norm is None:
        return NormStruct(weight=None, eps=0.0, is_bf16=0)
    weight = norm.weight
    check_memory("a norm", weight, math.prod(shape) * weight.itemsize)
    return NormStruct(weight=weight.data_ptr(), eps=norm.eps, is_bf16=is_bf16(weight))


class ResidualStruct(ctypes.Structure):
    """`struct residual` of csrc/sublayers.h."""

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
        ("rounds", ctypes.c_int32),
        ("team", Team),
    )

    @classmethod
    def of(cls, residual: Residual, width: int, kernels: NativeKernels) -> ResidualStruct:
        """Set the fields that are the same in every call, of norms with weights."""
        before, after = residual.before, residual.after
        assert not isinstance(before, BareNorm)
        assert not isinstance(after, BareNorm)
        return cls(
            before=norm_struct(before, width),
            after=norm_struct(after, width),
            width=width,
            multiplier=residual.multiplier,
            team=kernels.team,
        )

    def bind_rows(self, hidden: Tensor, out: Tensor) -> None:
        """Set input and output of a call, [T, E] each. Raises ValueError for any other shape or
        dtype."""
        self.n_rows = check_rows(hidden, self.width)
        self.hidden = hidden.data_ptr()
        self.out = check_memory("the output", out, hidden.nbytes, hidden.dtype).data_ptr()
        self.is_bf16 = is_bf16(hidden)
        self.team.n_threads = torch.get_num_threads()


class AttentionStruct(ctypes.Structure):
    """`struct attention_call` of csrc/sublayers.h."""

    _fields_ = (
        ("residual", ResidualStruct),
        ("head_norm", NormStruct),
        ("qkv", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("projected", ctypes.c_void_p),
        ("with_gates", ctypes.c_void_p),
        ("gates", ctypes.c_void_p),
        ("n_rotated", ctypes.c_int64),
        ("gate_columns", ctypes.c_int64),
        ("gates_behind", ctypes.c_int64),
        ("gates_soft", ctypes.c_int64),
        ("attend", AttendStruct),
        ("qkv_joined", JoinedStruct),
        ("joined", JoinedStruct),
    )


class MlpStruct(ctypes.Structure):
    """`struct mlp_call` of csrc/sublayers.h."""

    _fields_ = (
        ("residual", ResidualStruct),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("projected", ctypes.c_void_p),
        ("activated", ctypes.c_void_p),
        ("n_inner", ctypes.c_int64),
        ("joined", JoinedStruct),
        ("activation", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("added", ctypes.c_float),
    )


class Routing(enum.IntEnum):
    """`enum routing` of csrc/experts.h."""

    BEST_BY_SOFTMAX = 0
    BEST_OF_SOFTMAX = 1
    BEST_BY_SIGMOID = 2
    GROUPS_BY_SOFTMAX = 3
    GROUPS_BY_TWO_SIGMOIDS = 4
    GROUPS_BY_TWO_SOFTMAX = 5


class RouterStruct(ctypes.Structure):
    """`struct router` of csrc/experts.h."""

    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("n_groups", ctypes.c_int64),
        ("top_groups", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("routing", ctypes.c_int32),
        ("normalizes", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
    )


class ExpertStruct(ctypes.Structure):
    """`struct expert` of csrc/experts.h."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
    )


class ExpertsStruct(ctypes.Structure):
    """`struct experts_call` of csrc/experts.h."""

    _fields_ = (
        ("mlp", MlpStruct),
        ("router", RouterStruct),
        ("experts", ctypes.c_void_p),
        ("shared", ExpertStruct),
        ("shared_gate", ctypes.c_void_p),
        ("products", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("narrow", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("visits", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("gathered", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("shared_gates", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("n_at_once", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("n_shared_inner", ctypes.c_int64),
        ("activated_bytes", ctypes.c_int64),
        ("joined_bytes", ctypes.c_int64),
        ("n_columns", ctypes.c_int64),
        ("shared_in_ends", ctypes.c_void_p),
        ("weighs_inputs", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """`struct layer` of csrc/sublayers.h."""

    _fields_ = (
        ("attention", ctypes.c_void_p),
        ("mlp", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
    )


def check_shape(name: str, linear: Linear | JoinedLinear, n_out: int, n_in: int) -> None:
    """Raise ValueError unless `linear` has the shape (n_out, n_in)."""
    if linear.shape != (n_out, n_in):
        raise ValueError(f"{name} has shape {linear.shape}, the layer needs {(n_out, n_in)}")


def aligned(n_bytes: int) -> int:
    """Round `n_bytes` up to the alignment of the next buffer."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


class NativeSublayer(Generic[ArgumentsT]):
    """What sub-layers by the library share. Not thread-safe: one holds the arguments of its calls.

    It is fused already, so that nothing else fuses it.
    """

    _arguments: ArgumentsT

    @property
    def arguments(self) -> ArgumentsT:
        """The arguments of its calls, valid as long as this object lives."""
        return self._arguments

    @property
    def residual(self) -> ResidualStruct:
        """Input, output and norms among the arguments."""
        residual: ResidualStruct = self._arguments.residual
        return residual

    def with_own_arguments(self) -> Self:
        """Return a copy with separate call arguments, which calls of this one do not change."""
        other = copy(self)
        other._arguments = type(self._arguments).from_buffer_copy(self._arguments)
        return other
