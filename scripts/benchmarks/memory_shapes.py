"""The published sizes of models that are larger than one machine of a home lab.

Of the parts that compute text alone. DeepSeek-V4-Flash's and GLM-5.3-Flash's are those of their
configs, Qwen3.8-Flash-Next's and Hy4-preview's (Hunyuan 4) those that programs for them name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardnet.types import Quant

FP8_BLOCK: Final = 128
"""Rows and columns of weights that share a scale."""
GLM: Final = Path(__file__).parents[2] / "tests/model/families/published/glm-5.3-flash.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A config, and how its makers store weights: `bf16`, `fp8`, or `fp4` for experts and `fp8`.

    `quant` is what they are to be quantised to.
    """

    config: dict[str, Any]
    form: str
    quant: Quant = ""

    def narrowed(self, **values: Any) -> Published:
        """Return it with other values."""
        return replace(self, config=self.config | values)


def _fp8(**more: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]} | more}


_DEEPSEEK: Final = {
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "hc_mult": 4,
    "max_position_embeddings": 1048576,
    "eos_token_id": 1,
}
_QWEN: Final = {
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "split_ngram_parts": 128,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
    },
    "max_position_embeddings": 1048576,
    "eos_token_id": 248044,
}
_HUNYUAN: Final = {
    "model_type": "hy_v4",
    "dtype": "bfloat16",
    "vocab_size": 120832,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full", *["full", "shared", "shared", "shared"] * 19, "full"],
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "hc_mult": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "max_position_embeddings": 1048576,
    "eos_token_id": 120025,
}
_GLM: Final = json.loads(GLM.read_text())["text_config"]

MODELS: Final = {
    "deepseek-v4-flash": Published(config=_DEEPSEEK | _fp8(expert_dtype="fp4"), form="fp4"),
    "glm-5.3-flash": Published(config=_GLM | _fp8(), form="fp8"),
    "qwen3.8-flash-next": Published(config=_QWEN | _fp8(), form="fp8"),
    "hy4-preview": Published(config=_HUNYUAN, form="bf16", quant="int4"),
}
SMALL: Final = {
    "deepseek-v4-flash": MODELS["deepseek-v4-flash"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=7,
        num_attention_heads=16,
        head_dim=256,
        n_routed_experts=48,
        moe_intermediate_size=512,
        compress_ratios=[0, 0, 4, 128, 4, 128, 4],
        o_groups=4,
        o_lora_rank=256,
    ),
    "glm-5.3-flash": MODELS["glm-5.3-flash"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=32,
        moe_intermediate_size=512,
        intermediate_size=4096,
        layer_types=_GLM["layer_types"][:9],
        indexer_types=_GLM["indexer_types"][:9],
        mlp_layer_types=_GLM["mlp_layer_types"][:9],
        linear_attn_config=_GLM["linear_attn_config"]
        | {"full_attn_layers": [3, 7], "kda_layers": [0, 1, 2, 4, 5, 6, 8], "num_heads": 16},
    ),
    "qwen3.8-flash-next": MODELS["qwen3.8-flash-next"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=8,
        num_experts=48,
        moe_intermediate_size=384,
        shared_expert_intermediate_size=384,
        ple_embed_dim=1024,
        split_ngram_parts=4,
        ngram_vocab_size_base=20000,
    ),
    "hy4-preview": MODELS["hy4-preview"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=16,
        q_lora_rank=512,
        n_routed_experts=32,
        moe_intermediate_size=512,
        intermediate_size=4096,
        indexer_types=["full", "full", "shared", "shared", "shared", "full"],
    ),
}
"""The same kinds of layers, narrow."""
