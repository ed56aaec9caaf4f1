"""GPTQ's integers of 2, 3, 4 or 8 bits, as AutoGPTQ, GPTQModel and transformers store them.

Knows the keys of their config and the names of their tensors. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.quantization.weight_parts import (
    FLOAT_SCALES,
    FLOATS,
    WeightFormat,
    WeightParts,
    coded_tensor,
    group_of,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.fields import MAX_SIZE, Fields
from shardnet.model.config.panel_form import Minimum, PanelForm
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS: Final = ("I32",)
_BITS: Final = (2, 3, 4, 8)
_IGNORED: Final = (
    "sym desc_act damp_percent damp_auto_increment lm_head model_name_or_path "
    "model_file_base_name true_sequential static_groups meta dataset tokenizer batch_size "
    "block_name_to_quantize cache_block_outputs exllama_config max_input_length model_seqlen "
    "module_name_preceding_first_block modules_in_block_to_quantize pad_token_id use_cuda_fp16 "
    "use_exllama disable_exllama backend is_marlin_format mse quantizer act_group_aware "
    "amp autoround_version enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input "
    "gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr nsamples seqlen "
    "method modules_to_not_convert pack_impl provider scale_dtype to_quant_block_names"
)
"""Keys about the making of a checkpoint, or for other programs."""


def read_gptq(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented."""
    take_shared(fields)
    newer = fields.take("format", str, "gptq")
    version = fields.take("checkpoint_format", str, newer).lower()
    if version not in ("gptq", "gptq_v2"):
        raise fields.unsupported("checkpoint_format", version, "gptq, gptq_v2")
    usual = read_bits(fields), read_group_size(fields)
    return gptq_format(usual, {}, zero_offset=1 if version == "gptq" else 0)


def gptq_format(
    usual: tuple[int, int], others: Mapping[str, tuple[int, int]], *, zero_offset: int
) -> WeightFormat:
    """Make the format of weights with the `usual` bits and inputs that share a scale (0: all).

    `others` has those of single weights, by the beginning of their tensors' names. `zero_offset` is
    added to the zeros: 1 in the first version of the format.
    """

    def combine(parts: WeightParts) -> ModelTensor:
        bits, group_size = others.get(parts.stem, usual)
        return _combine(parts, bits=bits, group_size=group_size, zero_offset=zero_offset)

    return WeightFormat(
        markers=(".qweight",),
        suffixes=(".qweight", ".qzeros", ".scales", ".g_idx", ".bias"),
        combine=combine,
    )


def read_bits(fields: Fields, *default: int) -> int:
    """Read the bits of a weight."""
    return int(fields.one_of("bits", _BITS, *default))


def take_shared(fields: Fields) -> None:
    """Take what GPTQModel, AutoRound and transformers write of GPTQ and AWQ alike.

    Raises UnsupportedModelError for other integers, or for modules stored in another way.
    """
    fields.ignore(*_IGNORED.split())
    for key, only in (("pack_dtype", "int32"), ("data_type", "int")):
        fields.require(key, only)
    exceptions = fields.take("dynamic", dict, {})
    if not all(pattern.startswith("-:") for pattern in exceptions):
        raise fields.unsupported("dynamic", exceptions, "patterns that begin with -:")


def read_group_size(fields: Fields, default: int = 128) -> int:
    """Read the number of inputs that share a scale; 0 for all of them."""
    size = fields.take("group_size", int, default or -1)
    if size != -1 and not 1 <= size <= MAX_SIZE:
        raise fields.damaged(f"quantization_config.group_size is {size}, expected -1 or 1 on")
    return 0 if size == -1 else int(size)


def _combine(parts: WeightParts, *, bits: int, group_size: int, zero_offset: int) -> ModelTensor:
    """Combine qweight [K x bits / 32, N], qzeros [G, N x bits / 32], scales [G, N], g_idx [K].

    AutoGPTQ once wrote biases of zeros where the model has none.
    """
    n_out, n_in = parts.shape
    n_groups = -(-n_in // (group_size or n_in))
    sources = {
        ".qweight": parts.part(".qweight", _INTEGERS, (n_in * bits // 32, n_out)),
        ".qzeros": parts.part(".qzeros", _INTEGERS, (n_groups, n_out * bits // 32)),
        ".scales": parts.part(".scales", FLOATS, (n_groups, n_out)),
    }
    if ".g_idx" in parts.parts:
        sources[".g_idx"] = parts.part(".g_idx", ("I32", "I64"), (n_in,))
    if ".bias" in parts.parts:
        sources[".bias"] = parts.part(".bias", FLOATS, (n_out,))
    form = PanelForm(
        name=f"GPTQ {bits}",
        bits=bits,
        group=group_of(group_size, n_in),
        scale=FLOAT_SCALES[sources[".scales"].dtype],
        minimum=Minimum.ZERO_POINT,
    )
    places = {suffix: place for place, suffix in enumerate(sources)}

    def input_order(stored: Sequence[Tensor]) -> Tensor | None:
        if ".g_idx" not in places:
            return None
        return order_of_groups(stored[places[".g_idx"]], group_size or n_in, parts, ".g_idx")

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        from shardnet.checkpoint.quantization.packed_codes import bit_columns, split_bits

        if ".bias" in places and stored[places[".bias"]][begin:end].any():
            raise parts.damaged(".bias", "is not all zeros, and the model has no such bias")
        codes = split_bits(stored[0][:, begin:end].T, bits)
        order = input_order(stored)
        if order is not None:
            codes = codes[:, order]
        zeros = bit_columns(stored[1], bits, begin, end) + zero_offset & ((1 << bits) - 1)
        return Codes(
            codes=codes,
            scales=stored[2][:, begin:end].T,
            minimums=zeros.T,
        )

    has_order = ".g_idx" in places
    return coded_tensor(
        parts.name,
        parts.shape,
        list(sources.values()),
        form=form,
        rows=rows,
        input_order=input_order if has_order else None,
    )


def order_of_groups(
    groups: Tensor, group_size: int, parts: WeightParts, suffix: str
) -> Tensor | None:
    """Return the inputs, int32 [K], in the order of the groups that they are in.

    None if they are in order. Raises CheckpointError for groups of another size.
    """
    import torch

    in_order = torch.arange(groups.shape[0]) // group_size
    if torch.equal(groups.long(), in_order):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), in_order):
        raise parts.damaged(
            suffix,
            f"does not divide the inputs into {int(in_order[-1]) + 1} groups of {group_size}",
        )
    return order.int()
