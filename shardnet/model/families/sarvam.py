"""Sarvam's models with experts (transformers: classes of GLM-4.5 and of DeepSeek-V3).

The small one has Qwen3's attention, whose queries, keys and values are one linear.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.config.rope import read_rope
from shardnet.model.families import deepseek_v2, deepseek_v3, phi3
from shardnet.model.families.family import Stacking
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import LATENT, Part
from shardnet.model.families.tensor_shapes import Table, head_norms

if TYPE_CHECKING:
    from shardnet.model.layers.modules import SelfAttention
    from shardnet.model.layers.weight_source import WeightSource

_EXPERTS: Final = Part(tensors=deepseek_v3.mlp_tensors, load=deepseek_v3.load_mlp)
_STACKED: Final = {"experts": deepseek_v2.EXPERTS, "stacking": Stacking.CONCATENATED}
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


def _joined_heads(config: ModelConfig, layer: int) -> Table:
    """Name queries, keys and values as one linear, and the norms over heads."""
    made = phi3.joined_attention(config, layer, with_bias=config.attention_bias)
    return made | (head_norms(config, layer) if config.has_head_norms else {})


def _load_joined_heads(config: ModelConfig, weights: WeightSource, layer: int) -> SelfAttention:
    from shardnet.model.layers.norms import HeadNorm

    plain = phi3.load_joined_attention(config, weights, layer)
    if not config.has_head_norms:
        return plain
    queries, keys = (
        weights.norm(f"model.layers.{layer}.self_attn.{name}_norm", config.norm_eps, 0.0)
        for name in "qk"
    )
    norm = HeadNorm.join(queries, keys, config.n_heads, config.n_kv_heads)
    return replace(plain, qk_norm=norm)


FAMILIES: Final = (
    record(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        _read_small,
        Layout(attention=Part(tensors=_joined_heads, load=_load_joined_heads), mlp=_EXPERTS),
        same_architectures=("SarvamMoEForCausalLM",),
        renamed_tensors=_NAMES,
        **_STACKED,
    ),
    record(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        _read_large,
        Layout(attention=LATENT, mlp=_EXPERTS),
        same_architectures=("SarvamMLAForCausalLM",),
        **_STACKED,
    ),
)
