"""Residual streams by the library, around sub-layers that it does not join with them.

Knows when it mixes them. Must not know what a sub-layer does.

Axes in shape comments: T rows of the micro-batch, N streams, E hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shardnet.model.fused.structs import ResidualStruct, mixer_linears
from shardnet.model.kernels.library import SCRATCH, NativeKernels, check_memory, native_kernels
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    ExpertsSublayer,
    MlpSublayer,
    StreamResidual,
    Sublayer,
)
from shardnet.model.layers.streams import Mixer


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
        own, n_rows, item = self._arguments, len(streams), streams.itemsize
        streams = streams.contiguous()
        joined, out = streams.new_empty(n_rows, own.width), torch.empty_like(streams)
        own.bind_rows(streams, out)
        scratch = SCRATCH.at_least(own.inner_bytes(n_rows, item))
        own.assign_inner(scratch.data_ptr(), n_rows, item)
        count = own.streams.count
        mixes = torch.empty(n_rows, count * (count + 2))  # the sub-layer has the scratch memory
        own.inner, own.streams.mixes = joined.data_ptr(), mixes.data_ptr()
        self._join(own)
        inner = sublayer(joined).contiguous()
        check_memory("what a sub-layer gives", inner, joined.nbytes, streams.dtype)
        own.inner = inner.data_ptr()
        self._share(own)
        return out


def native_streams(sublayer: Sublayer) -> Sublayer:
    """Return a sub-layer whose streams the library mixes; itself where it has or can have none."""
    kernels = native_kernels()
    if kernels is None or not isinstance(
        sublayer, AttentionSublayer | MlpSublayer | ExpertsSublayer
    ):
        return sublayer
    residual = sublayer.residual
    if not isinstance(residual, StreamResidual):
        return sublayer
    linears = mixer_linears(residual.mixer)
    if linears is None:
        return sublayer
    width = linears[0].shape[1] // residual.mixer.count
    mixer = NativeMixer(residual.mixer, width, kernels)
    return replace(sublayer, residual=replace(residual, mixer=mixer))
