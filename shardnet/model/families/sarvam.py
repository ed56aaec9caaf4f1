"""Sarvam's models with experts (transformers: classes of GLM-4.5 and of DeepSeek-V3).

The small one has Qwen3's attention, whose queries, keys and values are one linear.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, STACKED
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import FUSED_HEADS, LATENT_HEADS

_LEFT_OUT: Final = ("architectures", "head_dim", "q_head_dim", "use_qk_norm")
"""What is read elsewhere, and what the makers say of latents in words of other attention."""
_NAMES: Final = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)


def _read_small(fields: Fields) -> ModelConfig:
    """Read a SarvamMoEConfig, also with the keys of its makers."""
    fields.require("use_bias", only=False)
    fields.ignore("max_window_layers")  # there are no windows
    config = read_decoder(
        fields,
        n_kv_heads=4,
        max_positions=131072,
        head_size=64,
        intermediate_size=8192,
        rope=partial(read_rope, theta=8e6),
    )
    bias = fields.take("use_qkv_bias", bool, False)
    config = replace(
        config,
        attention_bias=fields.take("attention_bias", bool, bias),
        has_head_norms=fields.take("use_qk_norm", bool, True),
    )
    return _read_experts(fields, config, n_experts=128, top_k=6, inner=1024)


def _read_large(fields: Fields) -> ModelConfig:
    """Read a SarvamMLAConfig, also with the keys of its makers."""
    raw = fields.take_all()
    kept = {key: raw[key] for key in raw if key not in _LEFT_OUT}
    fields = Fields(kept, fields.where, unknown=fields.unknown)
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        max_positions=4096,
        defaults=replace(deepseek_v2.LATENT, query_rank=None),
        rope=partial(read_rope, aliases={"deepseek_yarn": "yarn"}),
    )
    config = _read_experts(fields, config, n_experts=128, top_k=8, inner=2048)
    fields.note_the_rest()
    return config


def _read_experts(
    fields: Fields, config: ModelConfig, *, n_experts: int, top_k: int, inner: int
) -> ModelConfig:
    """Add DeepSeek-V3's experts; the arguments are defaults."""
    fields.require("moe_router_enable_expert_bias", only=True)
    deepseek_v2.require_text(fields, "score_function", "sigmoid")
    fields.ignore("output_dropout")
    defaults = Experts(
        n_experts=n_experts,
        top_k=top_k,
        intermediate_size=inner,
        normalize_top_k=fields.take("norm_topk_prob", bool, True),
        shared_intermediate_size=fields.positive("num_shared_experts", 1),
        output_scale=2.5,
        layers=(1,),
    )
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


FAMILIES: Final = (
    record(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        _read_small,
        Layout(attention=FUSED_HEADS, mlp=DEEPSEEK_EXPERTS),
        same_architectures=("SarvamMoEForCausalLM",),
        renamed_tensors=_NAMES,
        **STACKED,
    ),
    record(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        _read_large,
        Layout(attention=LATENT_HEADS, mlp=DEEPSEEK_EXPERTS),
        same_architectures=("SarvamMLAForCausalLM",),
        **STACKED,
    ),
)
