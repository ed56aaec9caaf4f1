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
from shardnet.model.config.model_config import StreamKind
from shardnet.model.kernels.library import (
    NativeKernels,
    Team,
    check_memory,
    check_rows,
    fields,
    is_bf16,
)
from shardnet.model.kernels.linear import Linear, NativeLinear, is_native
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.decoder_layer import Residual, StreamResidual
from shardnet.model.layers.native_attention import AttendStruct
from shardnet.model.layers.norms import BareNorm, HeadNorm, Norm
from shardnet.model.layers.streams import GatedMixer, Mixer, StreamMixer
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


_KINDS: Final = {StreamKind.BALANCED: 0, StreamKind.APART: 1, StreamKind.GATED: 2}
"""`enum stream_kind` of csrc/sublayers.h."""


class StreamsStruct(ctypes.Structure):
    """`struct streams` of csrc/sublayers.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "project", "up", "inject", "base", "scale"),
        ("norm", NormStruct),
        *fields(ctypes.c_void_p, "scratch", "normed", "inner", "gates", "shares", "mixes", "given"),
        *fields(ctypes.c_int64, "count", "n_inner", "row_bytes"),
        *fields(ctypes.c_float, "eps", "magnitude"),
        *fields(ctypes.c_int32, "kind", "n_rounds"),
    )

    @classmethod
    def of(cls, mixer: Mixer, width: int) -> StreamsStruct:
        """Point to a mixer of streams of `width` columns, of which `mixer_linears` says that the
        library computes it. It must outlive this. Raises ValueError for linears of other shapes.
        """
        linears = mixer_linears(mixer)
        assert linears is not None
        for linear, shape in zip(linears, _mixer_shapes(mixer, width), strict=True):
            check_shape("a mixer's linear", linear, *shape)
        matmuls = [linear.native_matmul() for linear in linears]
        own = cls(
            project=matmuls[0].address,
            n_inner=matmuls[0].shape[0],
            row_bytes=aligned(max(matmul.row_bytes for matmul in matmuls)),
            count=mixer.count,
        )
        if isinstance(mixer, GatedMixer):
            own.kind = _KINDS[StreamKind.GATED]
            own.up, own.inject = (matmul.address for matmul in matmuls[1:])
            own.norm = norm_struct(mixer.norm, mixer.count, width)
            return own
        assert isinstance(mixer, StreamMixer)
        config, kinds = mixer.config, len(mixer.scale)
        own.kind = _KINDS[config.kind]
        base = check_memory("a mixer's base", mixer.base, 4 * own.n_inner, torch.float32)
        scale = check_memory("a mixer's scale", mixer.scale, 4 * kinds, torch.float32)
        own.base, own.scale = base.data_ptr(), scale.data_ptr()
        own.norm.eps, own.eps = mixer.norm.eps, config.eps
        own.magnitude, own.n_rounds = config.magnitude, config.n_rounds
        return own

    def buffers(self, n_rows: int, width: int, item: int) -> dict[str, int]:
        """Return the sizes in bytes of the buffers, by their fields."""
        if not self.count:
            return {}
        n_all, is_gated = n_rows * self.count * width, self.kind == _KINDS[StreamKind.GATED]
        of_inner = item if is_gated else 4
        return {
            "normed": n_all * of_inner,
            "inner": n_rows * self.n_inner * of_inner,
            "gates": n_all * item * is_gated,
            "shares": n_rows * self.count * item,
            "mixes": 4 * n_rows * self.count * (self.count + 2),
            "scratch": n_rows * self.row_bytes,
        }


def mixer_linears(mixer: Mixer) -> list[NativeLinear] | None:
    """Return the linears of a mixer, None unless the library computes it."""
    if isinstance(mixer, StreamMixer):
        project = mixer.project
        return [project] if isinstance(project, PanelLinear) and is_native(project) else None
    if not isinstance(mixer, GatedMixer) or mixer.inject is None:
        return None
    linears = (mixer.down, mixer.up, mixer.inject)
    found = [linear for linear in linears if is_native(linear) and linear.weights_stay]
    return found if len(found) == len(linears) else None


def _mixer_shapes(mixer: Mixer, width: int) -> list[tuple[int, int]]:
    """Return what shapes the linears of a mixer of streams of `width` columns have."""
    count, wide = mixer.count, mixer.count * width
    if isinstance(mixer, StreamMixer):
        is_balanced = mixer.config.kind is StreamKind.BALANCED
        return [(count * (2 + count * is_balanced), wide)]
    assert isinstance(mixer, GatedMixer)
    rank = mixer.down.shape[0]
    return [(rank, wide), (wide, rank), (count, wide)]


def is_joined(residual: Residual) -> bool:
    """Whether the library computes norms and streams around a sub-layer."""
    is_mixed = not isinstance(residual, StreamResidual) or mixer_linears(residual.mixer) is not None
    return residual.is_rms and is_mixed


class ResidualStruct(ctypes.Structure):
    """`struct residual` of csrc/sublayers.h."""

    _fields_ = (
        *fields(NormStruct, "before", "after"),
        ("streams", StreamsStruct),
        *fields(ctypes.c_void_p, "hidden", "out", "inner"),
        *fields(ctypes.c_int64, "n_rows", "width"),
        ("multiplier", ctypes.c_float),
        *fields(ctypes.c_int32, "is_bf16", "rounds"),
        ("team", Team),
    )

    @classmethod
    def of(cls, residual: Residual, width: int, kernels: NativeKernels) -> ResidualStruct:
        """Set the fields that are the same in every call, of norms with weights."""
        before, after = residual.before, residual.after
        assert not isinstance(before, BareNorm)
        assert not isinstance(after, BareNorm)
        streams = StreamsStruct()
        if isinstance(residual, StreamResidual):
            streams = StreamsStruct.of(residual.mixer, width)
        return cls(
            before=norm_struct(before, width),
            after=norm_struct(after, width),
            streams=streams,
            width=width,
            multiplier=residual.multiplier,
            team=kernels.team,
        )

    @property
    def row_width(self) -> int:
        """The columns of its input and output: those of all streams."""
        width: int = self.width * max(1, self.streams.count)
        return width

    def inner_bytes(self, n_rows: int, item: int) -> int:
        """Return the bytes that `assign_inner` takes: rows between, and what mixes streams."""
        of_streams = self.streams.buffers(n_rows, self.width, item)
        return aligned(n_rows * self.width * item) + sum(map(aligned, of_streams.values()))

    def assign_inner(self, begin: int, n_rows: int, item: int) -> None:
        """Point to buffers from the address `begin` on."""
        self.inner = begin
        begin += aligned(n_rows * self.width * item)
        for name, size in self.streams.buffers(n_rows, self.width, item).items():
            if name == "mixes" and self.streams.given:
                continue  # who gives factors has memory for those of the next sub-layer
            setattr(self.streams, name, begin)
            begin += aligned(size)

    def bind_rows(self, hidden: Tensor, out: Tensor) -> None:
        """Set input and output of a call, [T, E] each, or [T, N x E] of N streams.

        Raises ValueError for any other shape or dtype.
        """
        self.n_rows = check_rows(hidden, self.row_width)
        self.hidden = hidden.data_ptr()
        self.out = check_memory("the output", out, hidden.nbytes, hidden.dtype).data_ptr()
        self.is_bf16 = is_bf16(hidden)
        self.team.n_threads = torch.get_num_threads()


class AttentionStruct(ctypes.Structure):
    """`struct attention_call` of csrc/sublayers.h."""

    _fields_ = (
        ("residual", ResidualStruct),
        ("head_norm", NormStruct),
        *fields(ctypes.c_void_p, "qkv", "output", "scratch", "cos", "sin", "projected"),
        *fields(ctypes.c_void_p, "with_gates", "gates"),
        *fields(ctypes.c_int64, "n_rotated", "gate_columns", "gates_behind", "gates_soft"),
        ("attend", AttendStruct),
        *fields(JoinedStruct, "qkv_joined", "joined"),
    )


class MlpStruct(ctypes.Structure):
    """`struct mlp_call` of csrc/sublayers.h."""

    _fields_ = (
        ("residual", ResidualStruct),
        *fields(ctypes.c_void_p, "gate_up", "down", "scratch", "projected", "activated"),
        ("n_inner", ctypes.c_int64),
        ("joined", JoinedStruct),
        ("activation", ctypes.c_int32),
        *fields(ctypes.c_float, "limit", "alpha", "added"),
    )


class Routing(enum.IntEnum):
    """`enum routing` of csrc/experts.h."""

    BEST_BY_SOFTMAX = 0
    BEST_OF_SOFTMAX = 1
    BEST_BY_SIGMOID = 2
    GROUPS_BY_SOFTMAX = 3
    GROUPS_BY_TWO_SIGMOIDS = 4
    GROUPS_BY_TWO_SOFTMAX = 5
    BEST_BY_ROOTS = 6


class RouterStruct(ctypes.Structure):
    """`struct router` of csrc/experts.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "gate", "bias", "of_tokens", "token_ids"),
        *fields(ctypes.c_int64, "n_experts", "top_k", "n_groups", "top_groups"),
        ("scale", ctypes.c_float),
        *fields(ctypes.c_int32, "routing", "normalizes", "is_wide"),
    )


class ExpertStruct(ctypes.Structure):
    """`struct expert` of csrc/experts.h."""

    _fields_ = fields(ctypes.c_void_p, "gate_up", "down")


class ExpertsStruct(ctypes.Structure):
    """`struct experts_call` of csrc/experts.h."""

    _fields_ = (
        ("mlp", MlpStruct),
        ("router", RouterStruct),
        ("experts", ctypes.c_void_p),
        ("shared", ExpertStruct),
        *fields(ctypes.c_void_p, "shared_gate", "products", "wide", "narrow", "scores"),
        *fields(ctypes.c_void_p, "weights", "chosen", "visits", "places", "starts", "gathered"),
        *fields(ctypes.c_void_p, "outputs", "shared_gates", "rows"),
        *fields(ctypes.c_int64, "n_at_once", "row_bytes", "n_shared_inner", "activated_bytes"),
        *fields(ctypes.c_int64, "joined_bytes", "n_columns"),
        ("shared_in_ends", ctypes.c_void_p),
        *fields(ctypes.c_int32, "shared_activation", "weighs_inputs"),
    )


class LayerStruct(ctypes.Structure):
    """`struct layer` of csrc/sublayers.h."""

    _fields_ = fields(ctypes.c_void_p, "attention", "mlp", "experts", "delta")


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
