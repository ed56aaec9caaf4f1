"""DeepSeek-V3.2 and GLM-5 (transformers, modeling_deepseek_v32.py, modeling_glm_moe_dsa.py).

DeepSeek-V3 whose tokens attend to the `index_topk` positions that an indexer chooses: up to so many
positions to all of them. Contexts end there, and the indexer is left out.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.model_config import Experts, Latent, ModelConfig
from shardnet.model.families import deepseek_v2, deepseek_v3
from shardnet.model.families.expert_parts import STACKED
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.layout import record

_UNUSED: Final = (
    *("index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq"),
    *("index_topk_pattern", "indexer_rope_interleave", "indexer_types", "layer_types"),
)
"""Keys of the indexer."""
_EXPERTS: Final = Experts(
    n_experts=256,
    top_k=8,
    intermediate_size=2048,
    normalize_top_k=True,
    shared_intermediate_size=1,
    n_groups=8,
    top_groups=4,
    output_scale=2.5,
    layers=(3,),
)
_GLM: Final = Latent(
    rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=2048, interleaved=True
)


def _read_config(fields: Fields) -> ModelConfig:
    """Read a DeepseekV32Config."""
    config = deepseek_v2.read_latent_attention(fields, interleaved=True, max_positions=163840)
    return _read_rest(fields, config, _EXPERTS)


def _read_glm(fields: Fields) -> ModelConfig:
    """Read a GlmMoeDsaConfig."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=True, max_positions=202752, norm_eps=1e-5, defaults=_GLM
    )
    return _read_rest(fields, config, replace(_EXPERTS, n_groups=1, top_groups=1))


def _read_rest(fields: Fields, config: ModelConfig, defaults: Experts) -> ModelConfig:
    """Read the experts, and how many positions are chosen."""
    fields.ignore(*_UNUSED)
    fields.require("rope_interleave", True)
    deepseek_v2.require_text(fields, "scoring_func", "sigmoid")
    deepseek_v2.require_text(fields, "topk_method", "noaux_tc")
    normalizes = fields.take("norm_topk_prob", bool, True)
    defaults = replace(defaults, normalize_top_k=normalizes)
    n_chosen = fields.positive("index_topk", 2048)
    return replace(
        deepseek_v2.read_experts(fields, config, defaults, smallest_group=2),
        max_positions=min(config.max_positions, n_chosen),
        n_chosen=n_chosen,
    )


def _read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata of GLM-5."""
    fields.require("expert_gating_func", 2)  # sigmoid
    fields.ignore(*(f"attention.indexer.{key}" for key in ("head_count", "key_length", "types")))
    config = deepseek_v2.read_gguf(fields, tensors, factors)
    return config | {"index_topk": fields.positive("attention.indexer.top_k")}


_RECORD: Final = {
    "ignored_tensors": r"(model\.layers|blk)\.\d+\.(self_attn\.)?indexer\..*",
    "mtp": MtpNames.LAYER,
    **STACKED,
}

FAMILIES: Final = (
    record("deepseek_v32", "DeepseekV32ForCausalLM", _read_config, deepseek_v3.LAYOUT, **_RECORD),
    record(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        _read_glm,
        deepseek_v3.LAYOUT,
        **_RECORD,
        gguf=GgufFormat(
            architecture="glm-dsa",
            read=_read_gguf,
            renamed=(("correction_bias", "correction.bias"),),
        ),
    ),
)
