"""MXFP4 experts, as gpt-oss is published, and the 4-bit floats (E2M1) that others store too.

Knows the names of its tensors. Must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.quantization.weight_parts import WeightFormat, WeightParts, coded_tensor
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.fields import Fields
from shardnet.model.config.panel_form import GGUF_FORMS, NVFP4, PanelForm, Scale
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

MXFP4_FORM: Final[PanelForm] = GGUF_FORMS["MXFP4"]
_BYTES: Final = ("U8",)


def read_mxfp4(fields: Fields) -> WeightFormat:
    """Read `quantization_config`, which says nothing but the method."""
    fields.ignore("modules_to_not_convert", "dequantize")
    return WeightFormat(markers=("_blocks",), suffixes=("_blocks", "_scales"), combine=_combine)


def _combine(parts: WeightParts) -> ModelTensor:
    """Combine one expert's blocks [N, K / 32, 16] and their exponents [N, K / 32].

    The outputs of gate and up take turns in the file, and follow each other in the parameter.
    """
    n_out, n_in = parts.shape
    sources = (
        parts.part("_blocks", _BYTES, (n_out, n_in // 32, 16)),
        parts.part("_scales", _BYTES, (n_out, n_in // 32)),
    )
    is_both = parts.stem.endswith("gate_up_proj")

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        import torch

        from shardnet.checkpoint.quantization.packed_codes import split_bits

        index = torch.arange(begin, end)
        if is_both:
            half = n_out // 2
            index = torch.where(index < half, 2 * index, 2 * (index - half) + 1)
        blocks, exponents = (values.view(n_out, -1)[index] for values in stored)
        return Codes(codes=split_bits(blocks, 4), scales=exponents)

    return coded_tensor(parts.name, parts.shape, sources, form=MXFP4_FORM, rows=rows)


def two_in_a_byte(
    parts: WeightParts, codes: str, dtype: str, scales: str, kinds: Sequence[str], size: int = 32
) -> ModelTensor:
    """Combine 4-bit floats [N, K / 2], two in each byte, with an exponent for every `size` inputs.

    `codes` and `scales` are what follows the parameter's name, with the dtypes that they may have.
    """
    n_out, n_in = parts.shape
    sources = (
        parts.part(codes, (dtype,), (n_out, n_in // 2)),
        parts.part(scales, kinds, (n_out, n_in // size)),
    )

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        import torch

        from shardnet.checkpoint.quantization.packed_codes import split_bits

        packed, exponents = (values.view(torch.uint8)[begin:end] for values in stored)
        return Codes(codes=split_bits(packed, 4), scales=exponents.contiguous())

    return coded_tensor(parts.name, parts.shape, sources, form=MXFP4_FORM, rows=rows)


def nvfp4_tensor(
    parts: WeightParts, codes: str, factor: str, *, size: int, divides: bool
) -> ModelTensor:
    """Combine 4-bit floats [N, K / 2], two in each byte, with E4M3 scales for `size` inputs each.

    `codes` and `factor` are what follows the parameter's name: the factor `divides` all scales, or
    multiplies them.
    """
    n_out, n_in = parts.shape
    sources = (
        parts.part(codes, _BYTES, (n_out, n_in // 2)),
        parts.part(".weight_scale", ("F8_E4M3",), (n_out, -(-n_in // size))),
        parts.part(factor, ("F32",), (), (1,)),
    )

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        from shardnet.checkpoint.quantization.packed_codes import split_bits

        packed, scales, of_all = stored
        of_groups, one = scales[begin:end].float(), of_all.view(1, 1)
        return Codes(
            codes=split_bits(packed[begin:end], 4),
            scales=of_groups / one if divides else of_groups * one,
        )

    form = replace(NVFP4, group=size, scale=Scale.FLOAT32)
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)
