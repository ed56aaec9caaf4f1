"""All layers of a stage in one call of the compiled library, or a sub-layer in one each.

Residual streams around sub-layers that it does not join with them are mixed by the library too.

A step reads gigabytes of weights through the caches, so that code between two calls of the library
is read from memory again: Python between the sub-layers of a layer took 150 µs and more there, ten
times its cost with warm caches.

In small models and on fast machines, calling torch's operators takes as much of a decode step as
their work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor

from shardnet.model.fused.attention import NativeAttention, NativeMlp
from shardnet.model.fused.delta_net import NativeDeltaNet
from shardnet.model.fused.experts import NativeExperts, activation_fields
from shardnet.model.fused.structs import (
    LayerStruct,
    ResidualStruct,
    aligned,
    is_joined,
    mixer_linears,
)
from shardnet.model.kernels.library import (
    SCRATCH,
    NativeKernels,
    check_memory,
    check_rows,
    native_kernels,
)
from shardnet.model.kernels.linear import Linear, is_native
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    ExpertsSublayer,
    Layer,
    MlpSublayer,
    Residual,
    StreamResidual,
    Sublayer,
)
from shardnet.model.layers.experts import ClampedMlp
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.layers.norms import HeadNorm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.streams import LaggedMixer, Mixer, StreamMixer
from shardnet.model.mixers.compressed_attention import SharingSublayer
from shardnet.model.mixers.gated_delta import GatedDeltaNet
from shardnet.model.mixers.mixed_attention import GatedAttention
from shardnet.model.mixers.short_conv import NgramSublayer
from shardnet.model.shards.gathered import JoinedLinear


class NativeMixer:
    """A mixer by the library. Not thread-safe: it holds the arguments of its calls."""

    def __init__(self, mixer: Mixer, width: int, kernels: NativeKernels) -> None:
        self._mixer = mixer
        self._arguments = ResidualStruct.of(StreamResidual(mixer=mixer), width, kernels)
        self._join, self._share = (
            kernels.function(f"shardnet_{name}_streams", ctypes.POINTER(ResidualStruct))
            for name in ("join", "share")
        )

    @property
    def count(self) -> int:
        """How many streams there are."""
        return self._mixer.count

    def around(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Join rows [T, N x E] for a sub-layer of [T, E], and share out what it gives."""
        if streams.dtype not in (torch.float32, torch.bfloat16):
            return self._mixer.around(streams, sublayer)
        return self.given(streams, None, sublayer)[0]

    def given(
        self, streams: Tensor, before: Tensor | None, sublayer: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Join by the factors `before` a sub-layer, if given; see StreamMixer."""
        if streams.dtype not in (torch.float32, torch.bfloat16):
            assert isinstance(self._mixer, StreamMixer)
            return self._mixer.given(streams, before, sublayer)
        own, n_rows, item = self._arguments, len(streams), streams.itemsize
        streams = streams.contiguous()
        joined, out = streams.new_empty(n_rows, own.width), torch.empty_like(streams)
        own.bind_rows(streams, out)
        scratch = SCRATCH.at_least(own.inner_bytes(n_rows, item))
        own.assign_inner(scratch.data_ptr(), n_rows, item)
        count = own.streams.count
        mixes = torch.empty(n_rows, count * (count + 2))  # the sub-layer has the scratch memory
        own.inner, own.streams.mixes = joined.data_ptr(), mixes.data_ptr()
        own.streams.given = _address_of_given(before, n_rows, count)
        self._join(own)
        inner = sublayer(joined).contiguous()
        check_memory("what a sub-layer gives", inner, joined.nbytes, streams.dtype)
        own.inner = inner.data_ptr()
        self._share(own)
        return out, mixes[:, :count]


def _address_of_given(before: Tensor | None, n_rows: int, count: int) -> int | None:
    if before is None:
        return None
    check_memory("factors of streams", before, 4 * n_rows * count, torch.float32)
    return before.data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLagged:
    """An MLP by the library, whose streams are mixed by the factors of the sub-layer before."""

    mixer: LaggedMixer
    native: NativeMlp | NativeExperts

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run rows [T, N x E and more] through it in layer `index` within the stage: the same."""

        def mix(own: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            count, streams = self.mixer.count, self.native.residual.streams
            mixes = torch.empty(len(own), count * (count + 2))
            streams.given = _address_of_given(before, len(own), count)
            streams.mixes = mixes.data_ptr()
            return self.native(own, index, rotary, step), mixes[:, :count]

        return self.mixer.lagged(hidden, mix)


def native_streams(sublayer: Sublayer) -> Sublayer:
    """Return a sub-layer whose streams the library mixes; itself where it has or can have none."""
    kernels = native_kernels()
    if isinstance(sublayer, NgramSublayer):
        return replace(sublayer, attention=native_streams(sublayer.attention))
    if kernels is None or not isinstance(
        sublayer, AttentionSublayer | SharingSublayer | MlpSublayer | ExpertsSublayer
    ):
        return sublayer
    residual = sublayer.residual
    if not isinstance(residual, StreamResidual):
        return sublayer
    lagged = residual.mixer if isinstance(residual.mixer, LaggedMixer) else None
    inner = residual.mixer if lagged is None else cast(StreamMixer, lagged.mixer)
    linears = mixer_linears(inner)
    if linears is None:
        return sublayer
    if lagged is not None and isinstance(sublayer, MlpSublayer | ExpertsSublayer):
        usual = replace(sublayer, residual=replace(residual, mixer=inner))
        native = _native_mlp(usual, kernels)
        if native is not None:
            return NativeLagged(mixer=lagged, native=native)
    mixer = NativeMixer(inner, linears[0].shape[1] // inner.count, kernels)
    own = mixer if lagged is None else replace(lagged, mixer=mixer)
    return replace(sublayer, residual=replace(residual, mixer=own))


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSublayers:
    """The sub-layers of one layer that the library computes, None where torch does."""

    attention: NativeAttention | NativeDeltaNet | None
    mlp: NativeMlp | NativeExperts | None

    @classmethod
    def of(cls, layer: Layer, kernels: NativeKernels | None) -> NativeSublayers:
        """Make those sub-layers that the library can compute; without a library there are none.

        Raises ValueError for norms and linears whose shapes do not fit together.
        """
        if kernels is None:
            return cls(attention=None, mlp=None)
        return cls(
            attention=_native_attention(layer.attention, kernels),
            mlp=_native_mlp(layer.mlp, kernels),
        )

    def replace_in(self, layer: Layer) -> Layer:
        """Return `layer` with these sub-layers in place of torch's, and mixers of the others."""
        attention = self.attention or native_streams(layer.attention)
        mlp = self.mlp or native_streams(layer.mlp)
        if attention is layer.attention and mlp is layer.mlp:
            return layer
        return replace(layer, attention=attention, mlp=mlp)


def _native_attention(
    sublayer: Sublayer, kernels: NativeKernels
) -> NativeAttention | NativeDeltaNet | None:
    if not isinstance(sublayer, AttentionSublayer) or not is_joined(sublayer.residual):
        return None
    own = sublayer.self_attn
    if isinstance(own, GatedAttention) and own.indexer is None:
        return _joined_attention(sublayer.residual, own, own.qk_norm, own.qkvg_proj, kernels)
    if isinstance(own, GatedDeltaNet):
        return NativeDeltaNet.of(sublayer, kernels)
    if not isinstance(own, SelfAttention) or not own.is_fusible:
        return None
    qk_norm = None if own.qk_norm is None else own.qk_norm.per_head
    if own.qk_norm is not None and qk_norm is None:
        return None
    return _joined_attention(sublayer.residual, own, qk_norm, own.qkv_proj, kernels)


def _joined_attention(
    residual: Residual,
    own: SelfAttention | GatedAttention,
    qk_norm: HeadNorm | None,
    projection: Linear,
    kernels: NativeKernels,
) -> NativeAttention | None:
    qkv, output = JoinedLinear.of(projection), JoinedLinear.of(own.o_proj)
    if own.head_size > MAX_HEAD or own.head_size % 2 or qkv is None or output is None:
        return None
    return NativeAttention(residual, own, qk_norm, qkv, output, kernels)


def _native_mlp(sublayer: Sublayer, kernels: NativeKernels) -> NativeMlp | NativeExperts | None:
    if isinstance(sublayer, ExpertsSublayer):
        residual = sublayer.residual
        return NativeExperts.of(residual, sublayer.mlp, kernels) if is_joined(residual) else None
    if not isinstance(sublayer, MlpSublayer) or not is_joined(sublayer.residual):
        return None
    mlp = sublayer.mlp
    activation = activation_fields(mlp)
    if not isinstance(mlp, GatedMlp | ClampedMlp) or not activation:
        return None
    gate_up, down = mlp.gate_up_proj, JoinedLinear.of(mlp.down_proj)
    if down is None or not is_native(gate_up):
        return None
    return NativeMlp(sublayer.residual, activation, gate_up, down, kernels)


First = NativeAttention | NativeDeltaNet
"""The first sub-layer of a layer."""
_MAX_ROWS: Final = 64
"""With more rows the time between calls is negligible, and the workspace would hold much memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspace:
    """The memory that all structs point to, for one shape and dtype of rows and number of threads.

    `rows` is input and output of the layers, a view of that memory.
    """

    rows: Tensor  # [T, E]
    n_threads: int

    def suits(self, hidden: Tensor) -> bool:
        """Say whether rows like `hidden` fit here, with torch's current number of threads."""
        rows = self.rows
        is_same = rows.shape == hidden.shape and rows.dtype is hidden.dtype
        return is_same and self.n_threads == torch.get_num_threads()


class NativeLayers:
    """All layers of a stage by the library. Not thread-safe: it holds the arguments of its call."""

    def __init__(
        self,
        layers: Sequence[tuple[First, NativeMlp | NativeExperts]],
        width: int,
        kernels: NativeKernels,
    ) -> None:
        """Take both sub-layers of each layer, whose rows have `width` columns.

        They remain usable by themselves: their arguments are copied.
        """
        self._layers = [
            (attention.with_own_arguments(), mlp.with_own_arguments()) for attention, mlp in layers
        ]
        self._width = width
        self._call = kernels.function(
            "shardnet_layers", ctypes.POINTER(LayerStruct), ctypes.c_int64
        )
        self._structs = (LayerStruct * len(layers))(
            *(
                LayerStruct(**{part.FIELD: ctypes.addressof(part.arguments) for part in layer})
                for layer in self._layers
            )
        )
        self._workspace: _Workspace | None = None

    @classmethod
    def of(
        cls, layers: Sequence[NativeSublayers], kernels: NativeKernels | None
    ) -> NativeLayers | None:
        """Join layers; None unless the library computes both sub-layers of each, with weights at
        fixed addresses (not streamed)."""
        joined = []
        for layer in layers:
            attention, mlp = layer.attention, layer.mlp
            if attention is None or mlp is None:
                return None
            if not all(linear.weights_stay for linear in (*attention.linears, *mlp.linears)):
                return None
            joined.append((attention, mlp))
        if kernels is None or not joined:
            return None
        return cls(joined, joined[0][0].residual.row_width, kernels)

    def __call__(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: ForwardStep
    ) -> list[Tensor] | None:
        """Run all layers, each with its own rotary tables: [T, E] to [T, E], on the CPU.

        Returns for each layer what it gives, or one behind it that the step does not keep; None if
        the library cannot compute all of it, and with many rows.
        Raises ValueError if rows, rotary tables and step do not match.
        """
        if step.native_spans is None or len(hidden) > _MAX_ROWS:
            return None
        if step.hidden_dtype not in (None, torch.bfloat16):
            return None
        workspace = self._workspace_for(hidden)
        workspace.rows.copy_(hidden)
        for index, ((attention, mlp), rotary) in enumerate(
            zip(self._layers, rotaries, strict=True)
        ):
            if not attention.bind_step(workspace.rows, index, rotary, step):
                return None
            mlp.residual.rounds = step.hidden_dtype is not None
            if isinstance(mlp, NativeExperts):
                mlp.bind_tokens(step)
        outputs: list[Tensor] = []
        for end in (*sorted(step.kept_layers), len(self._layers)):
            begin = len(outputs)
            if begin < end <= len(self._layers):
                self._call(ctypes.byref(self._structs[begin]), end - begin)
                outputs += [workspace.rows.clone()] * (end - begin)
        for attention, _ in self._layers:
            attention.after_call()
        if step.experts is not None:
            self._record_experts(step)
        return outputs

    def _record_experts(self, step: ForwardStep) -> None:
        for index, (_, mlp) in enumerate(self._layers):
            if isinstance(mlp, NativeExperts):
                step.record_experts(index, mlp.chosen.clone())

    def _workspace_for(self, hidden: Tensor) -> _Workspace:
        """Return the workspace for rows like `hidden`; all structs point there."""
        workspace = self._workspace
        if workspace is None or not workspace.suits(hidden):
            self._workspace = None  # frees its memory before the next is allocated
            self._workspace = workspace = self._new_workspace(hidden)
        return workspace

    def _new_workspace(self, hidden: Tensor) -> _Workspace:
        check_rows(hidden, self._width)
        sublayers = [sublayer for layer in self._layers for sublayer in layer]
        row_bytes = aligned(hidden.nbytes)
        scratch_bytes = max(sublayer.scratch_bytes(hidden) for sublayer in sublayers)
        memory = torch.empty(2 * row_bytes + scratch_bytes, dtype=torch.uint8)
        between, after = (
            memory[begin : begin + hidden.nbytes].view(hidden.dtype).view(hidden.shape)
            for begin in (0, row_bytes)
        )
        scratch = memory[2 * row_bytes :]
        for attention, mlp in self._layers:
            attention.residual.bind_rows(between, after)
            attention.assign_buffers(scratch, between)
            mlp.residual.bind_rows(after, between)
            mlp.assign_buffers(scratch, after)
        return _Workspace(rows=between, n_threads=torch.get_num_threads())
