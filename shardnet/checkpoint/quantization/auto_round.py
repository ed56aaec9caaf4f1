"""AutoRound's integers, in the tensors of GPTQ or AWQ.

Knows the keys of its config, and whose tensors a packing has. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardnet.checkpoint.quantization.awq import read_awq
from shardnet.checkpoint.quantization.gptq import (
    gptq_format,
    read_bits,
    read_group_size,
    take_shared,
)
from shardnet.checkpoint.quantization.weight_parts import WeightFormat
from shardnet.model.config.fields import Fields

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
_IGNORED: Final = (
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "enable_alg_ext", "model_free"),
    *("quant_block_list", "quant_lm_head", "static_attention_dtype", "static_kv_dtype"),
    "supported_types",
)
"""Of activations that are not quantised, of the cache, and of the making."""


def read_auto_round(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented.

    `extra_config` names layers that are quantised otherwise, or not at all.
    """
    fields.ignore(*_IGNORED)
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
        one.ignore("act_bits", *_IGNORED)
        take_shared(one)
        found[name] = read_bits(one, usual[0]), read_group_size(one, usual[1])
        one.note_the_rest()
    return {name: how for name, how in found.items() if how != usual}
