"""Integers as GPTQ, AWQ and AutoRound store them, each with the packings of its kernels.

Knows the keys of their configs and the names of their tensors. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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


ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an integer the 4 bits of each of 8 outputs stand, with `gemm`."""
_IGNORED_OF_AWQ: Final = (
    *("checkpoint_format", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    "zero_point",  # the tensors have zeros in any case
)


def read_awq(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented."""
    take_shared(fields)
    fields.ignore(*_IGNORED_OF_AWQ)
    fields.require("bits", 4)
    version = fields.take("version", str, fields.take("format", str, "gemm")).lower()
    combine = {"gemm": _combine_gemm, "gemv": _combine_gemv}.get(version)
    if combine is None:
        raise fields.unsupported("version", version, "gemm, gemv")
    return WeightFormat(
        markers=(".qweight",),
        suffixes=(".qweight", ".qzeros", ".scales"),
        combine=partial(combine, group_size=read_group_size(fields)),
    )


def _awq_form(group_size: int, n_in: int, dtype: str) -> PanelForm:
    return PanelForm(
        name="AWQ 4",
        bits=4,
        group=group_of(group_size, n_in),
        scale=FLOAT_SCALES[dtype],
        minimum=Minimum.ZERO_POINT,
    )


def _combine_gemm(parts: WeightParts, *, group_size: int) -> ModelTensor:
    """Combine qweight [K, N / 8], 8 outputs in each integer, qzeros [G, N / 8], scales [G, N]."""
    n_out, n_in = parts.shape
    n_groups = -(-n_in // (group_size or n_in))
    sources = (
        parts.part(".qweight", _INTEGERS, (n_in, n_out // 8)),
        parts.part(".qzeros", _INTEGERS, (n_groups, n_out // 8)),
        parts.part(".scales", FLOATS, (n_groups, n_out)),
    )

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        qweight, qzeros, scales = stored
        eights = slice(begin // 8, end // 8)
        return Codes(
            codes=_outputs(qweight[:, eights]),
            scales=scales[:, begin:end].T,
            minimums=_outputs(qzeros[:, eights]),
        )

    form = _awq_form(group_size, n_in, sources[2].dtype)
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)


def _outputs(packed: Tensor) -> Tensor:
    """Split integers [R, n / 8] into the codes of outputs in order: uint8 [n, R]."""
    import torch

    by_output = packed.T.contiguous()
    made = torch.empty(by_output.shape[0], 8, by_output.shape[1], dtype=torch.uint8)
    for low in range(0, 8, 2):  # two codes of each byte
        byte = (by_output >> 4 * low).to(torch.uint8)
        torch.bitwise_and(byte, 15, out=made[:, ORDER.index(low)])
        torch.bitwise_right_shift(byte, 4, out=made[:, ORDER.index(low + 1)])
    return made.flatten(0, 1)


def _combine_gemv(parts: WeightParts, *, group_size: int) -> ModelTensor:
    """Combine qweight [N, K / 8], 8 inputs in each integer, qzeros [N, W], scales [N, 8 W].

    W has room for the groups, and more for small ones.
    """
    n_out, n_in = parts.shape
    n_groups = -(-n_in // (group_size or n_in))
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    width = -(-n_groups // (8 * multiple)) * multiple
    sources = (
        parts.part(".qweight", _INTEGERS, (n_out, n_in // 8)),
        parts.part(".qzeros", _INTEGERS, (n_out, width)),
        parts.part(".scales", FLOATS, (n_out, 8 * width)),
    )

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        from shardnet.checkpoint.quantization.packed_codes import split_bits

        qweight, qzeros, scales = (values[begin:end] for values in stored)
        return Codes(
            codes=split_bits(qweight, 4),
            scales=scales[:, :n_groups],
            minimums=split_bits(qzeros, 4)[:, :n_groups],
        )

    form = _awq_form(group_size, n_in, sources[2].dtype)
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)


_AWQ: Final = ("auto_round:auto_awq", "auto_round:awq")
_ZERO_OFFSETS: Final[Mapping[str, int]] = {
    "auto_round": 0,
    "auto_round:exllamav2": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round:auto_gptq:exllamav2": 1,
    "auto_round:gptq:exllamav2": 1,
}
"""By packing: what is added to the zeros, as in GPTQ's first version or its second."""
_PLAIN_BITS: Final = 16
"""Weights, and activations, with so many bits are not quantised."""
_IGNORED_OF_AUTO_ROUND: Final = (
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "enable_alg_ext", "model_free"),
    *("quant_block_list", "quant_lm_head", "static_attention_dtype", "static_kv_dtype"),
    "supported_types",
)
"""Of activations that are not quantised, of the cache, and of the making."""


def read_auto_round(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented.

    `extra_config` names layers that are quantised otherwise, or not at all.
    """
    fields.ignore(*_IGNORED_OF_AUTO_ROUND)
    known = (*_ZERO_OFFSETS, *_AWQ)
    packing = fields.one_of("packing_format", known, "auto_round:gptq")  # transformers' default
    if (act_bits := fields.take("act_bits", int, _PLAIN_BITS)) < _PLAIN_BITS:
        raise fields.unsupported("act_bits", act_bits, f"{_PLAIN_BITS} and more")
    take_shared(fields)
    usual = read_bits(fields), read_group_size(fields)
    others = _others(fields, usual)
    if packing not in _AWQ:
        return gptq_format(usual, others, zero_offset=_ZERO_OFFSETS[packing])
    if others:
        raise fields.unsupported("extra_config", [*others], "layers like all others, or plain")
    return read_awq(fields)


def _others(fields: Fields, usual: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Read bits and inputs that share a scale of the layers that differ in them from `usual`.

    Patterns in place of names match none: tensors of another shape than is expected are refused.
    """
    found = {}
    extra = fields.inner("extra_config", fields.take("extra_config", dict, {}))
    for name, said in extra.take_the_rest().items():
        if not isinstance(said, dict):
            raise extra.unsupported(name, said, "objects with bits and group_size")
        one = extra.inner(name, said)
        if one.take("bits", int, usual[0]) >= _PLAIN_BITS:
            continue
        one.ignore("act_bits", *_IGNORED_OF_AUTO_ROUND)
        take_shared(one)
        found[name] = read_bits(one, usual[0]), read_group_size(one, usual[1])
        one.note_the_rest()
    return {name: how for name, how in found.items() if how != usual}
