"""FP8 weights with a scale for a block, a row or all of them, as several makers store them.

Knows the keys of transformers' `fp8` and `fbgemm_fp8` and the names of their tensors; and those of
NVIDIA's Model Optimizer, which writes 4-bit floats (NVFP4) too. Must not know files. Activations,
which these checkpoints are meant to have quantised too, are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.quantization.mxfp4 import nvfp4_tensor, two_in_a_byte
from shardnet.checkpoint.quantization.weight_parts import (
    FLOATS,
    RowOrder,
    WeightFormat,
    WeightParts,
    coded_tensor,
    group_of,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.errors import shown
from shardnet.model.config.fields import MAX_SIZE, Fields
from shardnet.model.config.panel_form import Code, PanelForm, Scale
from shardnet.model.families.tensor_shapes import Shape
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

FP8_CODES: Final = {"F8_E4M3": Code.E4M3, "F8_E5M2": Code.E5M2}
"""By safetensors' name of a dtype."""
_SKIPPED: Final = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".input_scale_ub")
_SCALES: Final = (".weight_scale_inv", ".weight_scale", ".scale")
"""What scales are called; the last is DeepSeek-V4's."""
_EXPONENT: Final = "F8_E8M0"
"""A power of two, by safetensors' name of the dtype."""
_IGNORED: Final = (
    "activation_scheme activation_scale_ub fmt scale_fmt modules_to_convert modules_to_not_convert "
    "ignored_layers kv_cache_scheme dequantize"
)


_OF_ALL: Final = ".weight_scale_2"
"""What multiplies all scales of a weight in NVFP4."""
_IGNORED_BY_NVIDIA: Final = (
    "config_groups exclude_modules group_size ignore input_activations kv_cache_quant_algo "
    "kv_cache_scheme producer quantized_layers weights"
)
_ALGORITHMS: Final = (
    *("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES"),
    *("MXFP8", "MIXED_PRECISION"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLayout:
    """Which weights share a scale: `rows` rows, and `columns` columns of them, 0 for all."""

    rows: int
    columns: int

    def of_rows(self, scales: Tensor, begin: int, end: int) -> Tensor:
        """Return the scales of rows [begin, end): [rows, G]."""
        from shardnet.checkpoint.quantization.packed_codes import repeat_rows

        table = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        return repeat_rows(table, self.rows, begin, end)


def read_fp8(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented."""
    fields.ignore(*_IGNORED.split())
    fields.one_of("expert_dtype", ("fp8", "fp4"), "fp8")
    sizes = fields.take("weight_block_size", list, [1, 1])
    if len(sizes) != 2 or not all(isinstance(n, int) and 0 < n <= MAX_SIZE for n in sizes):
        raise fields.damaged(
            f"quantization_config.weight_block_size is {shown(sizes)}, expected [n, n]"
        )
    return WeightFormat(
        markers=_SCALES,
        suffixes=(".weight", *_SCALES),
        combine=partial(_combine, block=(sizes[0], sizes[1])),
        skipped=_SKIPPED,
    )


def read_modelopt(fields: Fields) -> WeightFormat:
    """Read `quantization_config` of Model Optimizer; what is quantised, and how, the tensors say.

    Raises UnsupportedModelError for what is not implemented.
    """
    fields.ignore(*_IGNORED_BY_NVIDIA.split())
    fields.one_of("quant_algo", _ALGORITHMS)
    return WeightFormat(
        markers=_SCALES,
        suffixes=(".weight", *_SCALES, _OF_ALL),
        combine=partial(_combine, block=(128, 128)),
        skipped=_SKIPPED,
    )


def _combine(parts: WeightParts, *, block: tuple[int, int]) -> ModelTensor:
    suffix = next(suffix for suffix in parts.parts if suffix not in (".weight", _OF_ALL))
    kind = parts.parts[".weight"].dtype if ".weight" in parts.parts else ""
    if kind == "I8":
        return two_in_a_byte(parts, ".weight", "I8", suffix, (_EXPONENT, "U8"))
    if kind == "U8":
        return nvfp4_tensor(parts, ".weight", _OF_ALL, size=16, divides=False)
    if parts.parts[suffix].dtype == "U8":  # MXFP8
        block = (1, 32)
    scales, layout = read_scales(parts, suffix, block)
    weight = parts.part(".weight", tuple(FP8_CODES), parts.shape)
    return fp8_tensor(parts.name, weight, scales, layout)


def read_scales(
    parts: WeightParts, suffix: str, block: tuple[int, int]
) -> tuple[StoredTensor, ScaleLayout]:
    """Return the scales and what shares one, by their shape: all, a row or a part of it, a `block`.

    Raises CheckpointError for another shape or dtype.
    """
    n_out, n_in = parts.shape
    blocks: Shape = (-(-n_out // block[0]), -(-n_in // block[1]))
    kinds = (*FLOATS, _EXPONENT, "U8")
    of_rows: Shape = (n_out, blocks[1])
    scales = parts.part(suffix, kinds, (), (1,), (1, 1), (n_out,), (n_out, 1), blocks, of_rows)
    if scales.shape in ((), (1,), (1, 1)):
        return scales, ScaleLayout(rows=n_out, columns=0)
    if scales.shape in ((n_out,), (n_out, 1)):
        return scales, ScaleLayout(rows=1, columns=0)
    return scales, ScaleLayout(rows=block[0] if scales.shape == blocks else 1, columns=block[1])


def fp8_tensor(
    name: str,
    weight: StoredTensor,
    scales: StoredTensor,
    layout: ScaleLayout,
    order: RowOrder | None = None,
) -> ModelTensor:
    """Describe the parameter of FP8 `weight` [N, K] and its scales.

    `order` tells which stored rows the parameter's are, if they are not in order.
    """
    n_out, n_in = weight.shape

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        import torch

        codes, factors = stored
        if factors.dtype is torch.uint8:  # powers of two
            factors = factors.view(torch.float8_e8m0fnu)
        taken = codes[begin:end] if order is None else codes[order(begin, end)]
        return Codes(
            codes=taken.contiguous().view(torch.uint8),
            scales=layout.of_rows(factors.float(), begin, end),
        )

    form = PanelForm(
        name=weight.dtype,
        bits=8,
        group=group_of(layout.columns, n_in),
        scale=Scale.FLOAT32,
        code=FP8_CODES[weight.dtype],
    )
    return coded_tensor(name, (n_out, n_in), (weight, scales), form=form, rows=rows)
