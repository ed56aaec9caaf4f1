"""The model families: the one place where each is named, and how config.json finds its own.

Knows for every family its name in config.json, who reads its keys, and its tensors. Must not know
torch: the forward passes are named in family_stages.py, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import tensor_shapes as tables
from shardnet.model.families.config_decoder import (
    read_granite,
    read_llama,
    read_mistral,
    read_olmo2,
    read_phi3,
    read_qwen2,
    read_qwen3,
)
from shardnet.model.families.config_gemma import read_gemma2, read_gemma3
from shardnet.model.families.config_gpt2 import read_gpt2
from shardnet.model.families.config_moe import (
    read_deepseek_v2,
    read_deepseek_v3,
    read_gpt_oss,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_moe,
)
from shardnet.model.families.tensor_shapes import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    `architecture` is the only class of transformers that is implemented. `prefix` is left out of
    tensor names, where a checkpoint has it; `skipped` is a pattern of tensors that transformers
    once stored and nobody needs.
    """

    architecture: str
    read: Callable[[Fields], ModelConfig]
    layer: Callable[[ModelConfig, int], Table]
    embedding: Callable[[ModelConfig], Table] = tables.decoder_embedding
    head: Callable[[ModelConfig], Table] = tables.decoder_head
    prefix: str = ""
    skipped: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", read=read_llama, layer=tables.llama_layer),
    "mistral": Family(
        architecture="MistralForCausalLM", read=read_mistral, layer=tables.llama_layer
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", read=read_qwen2, layer=tables.qwen2_layer),
    "qwen3": Family(architecture="Qwen3ForCausalLM", read=read_qwen3, layer=tables.qwen3_layer),
    "phi3": Family(architecture="Phi3ForCausalLM", read=read_phi3, layer=tables.phi3_layer),
    "gemma2": Family(architecture="Gemma2ForCausalLM", read=read_gemma2, layer=tables.gemma2_layer),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM", read=read_gemma3, layer=tables.gemma3_layer
    ),
    "granite": Family(
        architecture="GraniteForCausalLM", read=read_granite, layer=tables.llama_layer
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", read=read_olmo2, layer=tables.olmo2_layer),
    "mixtral": Family(
        architecture="MixtralForCausalLM", read=read_mixtral, layer=tables.mixtral_layer
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM", read=read_qwen2_moe, layer=tables.qwen2_moe_layer
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM", read=read_qwen3_moe, layer=tables.qwen3_moe_layer
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM", read=read_gpt_oss, layer=tables.gpt_oss_layer
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM", read=read_deepseek_v2, layer=tables.deepseek_layer
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        read=read_deepseek_v3,
        layer=tables.deepseek_layer,
        skipped=r"model\.layers\.(61\..*|\d+\.self_attn\.rotary_emb\.inv_freq)",
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        read=read_gpt2,
        layer=tables.gpt2_layer,
        embedding=tables.gpt2_embedding,
        head=tables.gpt2_head,
        prefix="transformer.",
        skipped=r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
}
"""By `model_type`."""


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read the parsed config.json `raw`; `where` is its path, for messages.

    Raises CheckpointError for a missing or malformed field, UnsupportedModelError for an
    architecture, a value or an unknown key that would change the maths.
    """
    fields = Fields(raw, where)
    config = _family(fields).read(fields)
    fields.refuse_the_rest()
    return config


def _family(fields: Fields) -> Family:
    model_type = fields.take("model_type", str)
    family = FAMILIES.get(model_type)
    if family is None:
        raise fields.unsupported("model_type", model_type, ", ".join(sorted(FAMILIES)))
    architectures = fields.take("architectures", list, [family.architecture])
    if architectures != [family.architecture]:
        raise fields.unsupported("architectures", architectures, f'["{family.architecture}"]')
    return family
