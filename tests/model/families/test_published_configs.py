"""config.json files with the keys and values that the makers of models publish are read."""

from __future__ import annotations

from typing import Any

import pytest

from shardnet.model.families.registry import parse_config

GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pad_token_id": 154820,
    "eos_token_id": [154820, 154827, 154829],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "transformers_version": "5.0.0rc0",
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
OLMO_3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": [
        "full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)
    ],
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": False,
    "vocab_size": 100278,
}
SEED_OSS_36B = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": True,
    "vocab_size": 155136,
}


@pytest.mark.parametrize(
    ("published", "read"),
    [
        pytest.param(
            GLM_4_7_FLASH,
            {"n_layers": 47, "n_kv_heads": 1, "sparse_layers": tuple(range(1, 47))},
            id="GLM-4.7-Flash",
        ),
        pytest.param(
            OLMO_3_7B,
            {"windows": (4096, 4096, 4096, None) * 8, "max_positions": 65536},
            id="Olmo-3-7B",
        ),
        pytest.param(
            SEED_OSS_36B,
            {"attention_bias": True, "head_size": 128, "n_kv_heads": 8},
            id="Seed-OSS-36B",
        ),
    ],
)
def test_no_key_of_the_makers_refuses_a_model(
    published: dict[str, Any], read: dict[str, Any]
) -> None:
    config = parse_config(published, "config.json")
    assert {name: getattr(config, name) for name in read} == read
