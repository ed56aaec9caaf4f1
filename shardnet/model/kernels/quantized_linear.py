"""Weights quantised to int8 or int4 in groups, their packing, and the linear layer.

Knows the packed layout, which csrc/linear.c reads and csrc/pack.c writes too, to the same bits.
Must not know models.

A group of inputs of one output shares a scale; its weights are integers times that. Packed weights
are uint8 [panels, groups, bytes]: a panel is 16 outputs, and of each group first the 16 float16
scales, then the weights, four inputs of each output at a time: [quads, 16, 4] of int8 + 128, or
of two such quads int4 + 8, the first in the low nibble. The last panel and the last group are
padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.quantization import PANEL, SCALE_BYTES, UNPACKED_PANELS, Quantization
from shardnet.model.kernels.library import NativeKernels, NativeMatmul, native_kernels
from shardnet.model.kernels.packing import can_pack, pack_natively

_QUAD: Final = 4
_TORCH_CHUNK_WEIGHTS: Final = 1 << 17
"""Weights that torch quantises at a time: small enough for the caches."""
_NATIVE_CHUNK_WEIGHTS: Final = 1 << 23
"""Weights that the library quantises at a time: enough for its threads to share."""
_SHRINKS: Final = (1.0, 0.92, 0.85, 0.78)
"""Scales to try for a group of int4, as factors of the one that clips nothing."""


def pack(weight: Tensor, quantization: Quantization) -> Tensor:
    """Quantise and pack weights [N, K] of any float dtype: uint8 on the same device."""
    return pack_all([weight], quantization)


def pack_all(
    weights: Sequence[Tensor], quantization: Quantization, alive: Callable[[], None] = lambda: None
) -> Tensor:
    """Quantise and pack the concatenation of weights [N_i, K]: uint8 [panels, groups, bytes].

    `alive` is called after every chunk; an exception it raises propagates.
    """
    if any(weight.shape[0] % PANEL for weight in weights[:-1]):
        weights = [torch.cat(list(weights))]  # else a panel would be partly empty
    n_out, n_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    packed = weights[0].new_empty(quantization.packed_shape(n_out, n_in), dtype=torch.uint8)
    done = 0
    for weight in weights:
        native = native_kernels() if can_pack(weight) else None
        chunk = _TORCH_CHUNK_WEIGHTS if native is None else _NATIVE_CHUNK_WEIGHTS
        for some in torch.split(weight, PANEL * max(1, chunk // (PANEL * n_in))):
            n_panels = -(-some.shape[0] // PANEL)
            _pack_into(packed[done : done + n_panels], some, quantization, native)
            done += n_panels
            alive()
    return packed


def _pack_into(
    packed: Tensor, weight: Tensor, quantization: Quantization, native: NativeKernels | None
) -> None:
    if native is None:
        packed.copy_(_pack_panels(weight.float(), quantization))
    else:
        pack_natively(native, weight, packed, quantization.bits)


def _pack_panels(weight: Tensor, quantization: Quantization) -> Tensor:
    """Pack float32 [N, K]; returns [panels, groups, bytes]."""
    panels, groups, _ = quantization.packed_shape(*weight.shape)
    group = quantization.group
    filled = F.pad(
        weight, (0, groups * group - weight.shape[1], 0, panels * PANEL - weight.shape[0])
    )
    grouped = filled.view(panels, PANEL, groups, group)
    scale, quantized = _quantize(grouped, quantization)
    offset = 128 if quantization is Quantization.INT8 else 8
    quads = (
        (quantized + offset)
        .nan_to_num_(0)
        .to(torch.uint8)
        .view(panels, PANEL, groups, group // _QUAD, _QUAD)
    )
    quads = quads.permute(0, 2, 3, 1, 4)  # [panels, groups, quads, PANEL, 4]
    if quantization is Quantization.INT4:
        quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
    scales = scale.squeeze(-1).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat((scales, quads.reshape(panels, groups, -1)), dim=-1)


def _quantize(grouped: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Quantise [..., group]: float16 scales [..., 1] and integers in float32 [..., group].

    Every operation is one of csrc/pack.c too, so that both produce the same bits.
    """
    if quantization is Quantization.INT8:
        scale = (grouped.abs().amax(-1, keepdim=True) / 127).half()
        return scale, _whole(grouped, scale, -127, 127)
    # int4 reaches -8 on one side: the scale maps the weight of largest magnitude there.
    place = grouped.abs().argmax(-1, keepdim=True)
    whole_scale = grouped.gather(-1, place) / -8
    best_scale = whole_scale.half()
    best = _whole(grouped, best_scale, -8, 7)
    best_error = _squared(best * best_scale - grouped)
    for shrink in _SHRINKS[1:]:
        scale = (whole_scale * shrink).half()
        quantized = _whole(grouped, scale, -8, 7)
        error = _squared(quantized * scale - grouped)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best = torch.where(is_better, quantized, best)
    return best_scale, best


def _squared(error: Tensor) -> Tensor:
    """Sum the squares of the last axis pairwise, in a fixed order: the order of torch's sum depends
    on the CPU.
    """
    squares = error.square()
    while (half := squares.shape[-1] // 2) > 0:
        squares = squares[..., :half] + squares[..., half:]
    return squares


def _whole(grouped: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    return (grouped * inverse).round_().clamp_(low, high)


def unpack(packed: Tensor, quantization: Quantization, dtype: torch.dtype) -> Tensor:
    """Dequantise packed weights [panels, groups, bytes]: [16 panels, padded inputs] in `dtype`.

    A weight times its scale is rounded once. One operator does it all, since on a GPU the time goes
    into intermediate results.
    """
    panels, groups, _ = packed.shape
    scales = packed[..., :SCALE_BYTES].contiguous().view(torch.float16).float()
    scales = scales[:, :, None, :, None]  # [panels, groups, 1, PANEL, 1]
    n_quads = quantization.group // _QUAD
    body = packed[..., SCALE_BYTES:].view(panels, groups, -1, PANEL, _QUAD)
    weight = packed.new_empty(panels, PANEL, groups, n_quads, _QUAD, dtype=dtype)
    quads = weight.permute(0, 2, 3, 1, 4)  # [panels, groups, quads, PANEL, 4]: as they are packed
    if quantization is Quantization.INT8:
        torch.mul((body ^ 0x80).view(torch.int8), scales, out=quads)
    else:
        for place, half in enumerate((body & 15, body >> 4)):
            torch.mul(half.view(torch.int8).sub_(8), scales, out=quads[:, :, place::2])
    return weight.view(panels * PANEL, groups * quantization.group)


class QuantizedLinear:
    """A linear layer with packed, quantised weights: rows [T, K] to [T, N], in the rows' dtype.

    The compiled library quantises rows to int8 per group and is batch-invariant. torch dequantises
    the weights a few panels at a time, and is not.
    """

    weights_stay = True

    def __init__(
        self,
        packed: Tensor,
        shape: tuple[int, int],
        quantization: Quantization,
        bias: Tensor | None,
    ) -> None:
        self._packed = packed
        self._shape = shape
        self._quantization = quantization
        self._bias = bias.float() if bias is not None else None  # [N]
        native = native_kernels() if packed.device.type == "cpu" else None
        self._native: NativeMatmul | None = None
        if native is not None:
            bits, group = quantization.bits, quantization.group
            self._native = native.matmul(packed, self._bias, shape, bits, group)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._shape

    @property
    def is_native(self) -> bool:
        """Whether the compiled library computes it; else torch does."""
        return self._native is not None

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul."""
        assert self._native is not None, "is_native says so"
        return self._native

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        return self._multiply(rows) if self._native is None else self._native(rows)

    def _multiply(self, rows: Tensor) -> Tensor:
        n_out, n_in = self._shape
        parts = []
        for some in torch.split(self._packed, UNPACKED_PANELS):
            weight = unpack(some, self._quantization, rows.dtype)[:, :n_in]
            parts.append(F.linear(rows, weight))
        result = torch.cat(parts, dim=-1)[:, :n_out]
        return result if self._bias is None else (result + self._bias).to(rows.dtype)
