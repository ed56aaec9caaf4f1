"""Quantises weights to int8 or int4 in groups, and packs them.

Knows how weights are rounded, which csrc/pack.c does too, to the same bits. Must not know models,
nor how packed weights are multiplied.

A group of inputs of one output shares a scale; its weights are integers times that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.panel_form import PANEL, Quantization
from shardnet.model.kernels.codes import Codes
from shardnet.model.kernels.library import NativeKernels, native_kernels
from shardnet.model.kernels.packing import can_pack, pack_natively
from shardnet.model.kernels.panels import Panels, pack_codes

_TORCH_CHUNK_WEIGHTS: Final = 1 << 17
"""Weights that torch quantises at a time: small enough for the caches."""
_NATIVE_CHUNK_WEIGHTS: Final = 1 << 23
"""Weights that the library quantises at a time: enough for its threads to share."""
_SHRINKS: Final = (1.0, 0.92, 0.85, 0.78)
"""Scales to try for a group of int4, as factors of the one that clips nothing."""


def quantized(weight: Tensor, quant: Quantization) -> Panels:
    """Quantise and pack weights [N, K] of any float dtype, on the same device."""
    shape = (weight.shape[0], weight.shape[1])
    return Panels(packed=pack_all([weight], quant), form=quant.form, shape=shape)


def pack_all(
    weights: Sequence[Tensor], quant: Quantization, alive: Callable[[], None] = lambda: None
) -> Tensor:
    """Quantise and pack the concatenation of weights [N_i, K]: uint8 [panels, blocks, bytes].

    `alive` is called after every chunk; an exception it raises propagates.
    """
    if any(weight.shape[0] % PANEL for weight in weights[:-1]):
        weights = [torch.cat(list(weights))]  # else a panel would be partly empty
    n_out, n_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    packed = weights[0].new_empty(quant.form.packed_shape(n_out, n_in), dtype=torch.uint8)
    done = 0
    for weight in weights:
        native = native_kernels() if can_pack(weight) else None
        chunk = _TORCH_CHUNK_WEIGHTS if native is None else _NATIVE_CHUNK_WEIGHTS
        for some in torch.split(weight, PANEL * max(1, chunk // (PANEL * n_in))):
            n_panels = -(-some.shape[0] // PANEL)
            _pack_into(packed[done : done + n_panels], some, quant, native)
            done += n_panels
            alive()
    return packed


def _pack_into(
    packed: Tensor, weight: Tensor, quant: Quantization, native: NativeKernels | None
) -> None:
    if native is None:
        packed.copy_(_pack_panels(weight.float(), quant))
    else:
        pack_natively(native, weight, packed, quant.form)


def _pack_panels(weight: Tensor, quant: Quantization) -> Tensor:
    """Quantise and pack float32 [N, K]; returns [panels, blocks, bytes]."""
    form = quant.form
    filled = F.pad(weight, (0, -weight.shape[1] % form.group, 0, -weight.shape[0] % PANEL))
    scale, quantized = _quantize(filled.view(len(filled), -1, form.group), quant)
    codes = (quantized + form.offset).nan_to_num_(0).to(torch.uint8)
    return pack_codes(Codes(codes=codes.flatten(1), scales=scale.squeeze(-1)), form)


def _quantize(grouped: Tensor, quant: Quantization) -> tuple[Tensor, Tensor]:
    """Quantise [..., group]: float16 scales [..., 1] and integers in float32 [..., group].

    Every operation is one of csrc/pack.c too, so that both produce the same bits.
    """
    if quant is Quantization.INT8:
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
