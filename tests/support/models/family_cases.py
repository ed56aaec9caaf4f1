"""What tiny checkpoints of each family are made with: every switch of a family is on in one."""

from __future__ import annotations

from typing import Any

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
GROWING = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
ODD = {"hidden_size": 35, "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 20}
LFM2 = {"block_multiple_of": 8, "full_attn_idxs": [1, 3]}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "sliding_window": 20,
}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LLAMA4 = {
    "head_dim": 8,
    "floor_scale": 16,
    "attn_scale": 0.7,
    "attention_chunk_size": 512,
    "intermediate_size_mlp": 56,
    "no_rope_layer_interval": 2,
}
SAME_FACTORS = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
FALCON_H1 = {
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 2.5,
    "key_multiplier": 1.4,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [1.3, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.9, 1.3, 0.8, 1.2, 0.7],
    "ssm_out_multiplier": 1.6,
}
CASES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 20, "head_dim": 8},
    "mistral-no-window": {"sliding_window": None, "head_dim": None, "num_hidden_layers": 3},
    "mistral-odd": ODD | {"sliding_window": 260, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-windows": SOME_WINDOWS | {"num_hidden_layers": 5},
    "qwen2-yarn": {"rope_parameters": YARN},
    "qwen3": ODD | {"num_hidden_layers": 3},
    "qwen3-windows": SOME_WINDOWS | {"head_dim": 12, "attention_bias": True},
    "phi3": {"sliding_window": 20, "num_hidden_layers": 3},
    "phi3-partial-tied": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        "tie_word_embeddings": True,
    },
    "gemma2": GEMMA | {"num_hidden_layers": 5},
    "gemma2-no-caps": GEMMA
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 10},
    "gemma3_text": GEMMA | {"num_hidden_layers": 7},
    "gemma3_text-long": GEMMA
    | {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4_text": GEMMA4 | {"num_hidden_layers": 7},
    "gemma4_text-moe": GEMMA4
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": False,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "final_logit_softcapping": 5.0,
    },
    "lfm2": LFM2 | {"num_hidden_layers": 5},
    "lfm2-bias-untied": LFM2
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "conv", "conv"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm3": {"num_hidden_layers": 5, "sliding_window": 20},
    "lfm3-bias-untied": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "conv"],
        "sliding_window": 20,
        "attention_bias": True,
        "conv_bias": True,
        "tie_word_embeddings": False,
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
    },
    "olmo2": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "olmo2-odd": ODD | {"attention_bias": True},
    "olmo3": {
        "num_hidden_layers": 5,
        "sliding_window": 20,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0]},
    "exaone4": ODD | {"num_hidden_layers": 5, "sliding_window": 20, "tie_word_embeddings": True},
    "exaone4-full": {"num_hidden_layers": 2, "sliding_window": None}
    | {"layer_types": ["full_attention"] * 2},
    "ministral3": ODD
    | {"num_hidden_layers": 3, "tie_word_embeddings": True}
    | {"rope_parameters": YARN | {"original_max_position_embeddings": 16} | GROWING},
    "seed_oss": ODD | {"num_hidden_layers": 2, "mlp_bias": True, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 5, "sliding_window": 20, "num_hidden_layers": 3},
    "mixtral-odd": ODD | {"num_local_experts": 4, "num_experts_per_tok": 3, "hidden_act": "gelu"},
    "arcee": {"num_hidden_layers": 3, "mlp_bias": True, "head_dim": 10},
    "nemotron": {"num_hidden_layers": 3, "head_dim": 12, "attention_bias": True},
    "starcoder2": {"num_hidden_layers": 3, "sliding_window": 20},
    "glm4": {"num_hidden_layers": 3, "head_dim": 12},
    "ernie4_5": ODD | {"num_hidden_layers": 2, "use_bias": True},
    "ernie4_5_moe": {"num_hidden_layers": 4, "moe_layer_end_index": 2},
    "hunyuan_v1_dense": ODD
    | {"num_hidden_layers": 2, "tie_word_embeddings": True}
    | {"rope_parameters": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    "minimax_m2": ODD | {"num_hidden_layers": 3, "rotary_dim": 6, "tie_word_embeddings": True},
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4}
            | {"partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
            | {"partial_rotary_factor": 0.5},
        },
    },
    "mimo_v2_flash-odd": ODD
    | {
        "num_attention_heads": 6,
        "head_dim": 14,
        "v_head_dim": 10,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_value_scale": None,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": True,
    },
    "olmoe": {"num_hidden_layers": 3, "norm_topk_prob": True, "attention_bias": True},
    "deepseek_v2": {"num_hidden_layers": 3, "mlp_bias": True, "first_k_dense_replace": 1},
    "deepseek_v2-groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "q_lora_rank": 14,
        "routed_scaling_factor": 16.0,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    },
    "deepseek_v3": {
        "num_hidden_layers": 5,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "hidden_size": 42,
        "tie_word_embeddings": True,
    },
    "deepseek_v3-straight": {
        "q_lora_rank": None,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "num_hidden_layers": 3,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v32": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "index_topk": 24,
    },
    "glm_moe_dsa": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "indexer_types": ["full", "full", "shared", "full"],
        "qk_nope_head_dim": 14,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 40,
    },
    "glm4_moe": {"num_hidden_layers": 3, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe-groups": {
        "num_hidden_layers": 3,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": False,
        "first_k_dense_replace": 2,
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": {
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "mistral4": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN | {"original_max_position_embeddings": 16} | GROWING,
    },
    "gpt_oss": {"sliding_window": 20, "num_hidden_layers": 3},
    "gpt_oss-odd": ODD
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_limit": 0.5},
    "qwen2_moe": {"norm_topk_prob": True, "num_hidden_layers": 3},
    "qwen2_moe-windows": ODD
    | SOME_WINDOWS
    | {"num_hidden_layers": 5, "mlp_only_layers": [0], "qkv_bias": False},
    "qwen3_moe": {"num_hidden_layers": 5, "mlp_only_layers": [1]},
    "qwen3_moe-odd": ODD
    | {"norm_topk_prob": True, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    "llama4_text": LLAMA4 | {"num_hidden_layers": 3},
    "llama4_text-dense": LLAMA4
    | ODD
    | {
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 2,
        "use_qk_norm": False,
        "num_hidden_layers": 4,
        "attn_temperature_tuning": False,
        "no_rope_layers": [0, 1, 1, 0],
    },
    "llama4": LLAMA4 | {"num_hidden_layers": 2, "rope_parameters": SAME_FACTORS},
    "glm46v": {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": AXES},
    "glm4v": {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": AXES},
    "glm4v_moe": {"num_hidden_layers": 2, "head_dim": 8}
    | {"rope_parameters": AXES | {"mrope_section": [1, 0, 1]}},
    "gemma3": GEMMA | {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "gemma4": GEMMA4 | {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "gemma4_unified": GEMMA4 | {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "mistral3": {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": None},
    "mistral3-ministral3": {"model_type": "ministral3", "num_hidden_layers": 2, "head_dim": 8}
    | {"rope_parameters": YARN | GROWING},
    "qwen2_vl": {"num_hidden_layers": 2, "rope_parameters": AXES},
    "qwen2_5_vl": {"num_hidden_layers": 2, "rope_parameters": AXES, "tie_word_embeddings": True},
    "qwen3_vl": {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": AXES},
    "qwen3_vl_moe": {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": AXES},
    "qwen3_next": {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    "qwen3_5_text": {
        "full_attention_interval": 3,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": {"num_hidden_layers": 4, "linear_num_value_heads": 2},
    "qwen3_5": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3_5_moe": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "helium": {"num_hidden_layers": 2, "attention_bias": True},
    "cwm": {"num_hidden_layers": 5, "head_dim": 10, "sliding_window": 20},
    "iquestcoder": {"num_hidden_layers": 2, "head_dim": 10, "attention_bias": True},
    "exaone": {"num_hidden_layers": 2, "mlp_bias": False},
    "vaultgemma": GEMMA | {"num_hidden_layers": 3, "seed": 1},
    "hyperclovax": {
        "num_hidden_layers": 3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.6,
    },
    "exaone_moe": {"num_hidden_layers": 5, "sliding_window": 20, "seed": 1},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1]},
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
        "seed": 3,
    },
    "olmo_hybrid-positions": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_allow_neg_eigval": False,
        "tie_word_embeddings": True,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "hidden_size": 42,
        "seed": 1,  # of 0 transformers' own two forms of the recurrence differ by 1e-4
    },
    "kimi_linear-ranks": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "q_lora_rank": 14,
        "linear_num_heads": 3,
        "linear_head_dim": 18,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "falcon_h1": FALCON_H1 | {"num_hidden_layers": 3},
    "falcon_h1-norm": FALCON_H1
    | {
        "num_hidden_layers": 2,
        "head_dim": 10,
        "mamba_d_ssm": None,
        "mamba_d_head": "auto",
        "mamba_n_heads": 5,
        "mamba_n_groups": 5,
        "hidden_size": 35,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {"num_hidden_layers": 4, "residual_multiplier": 0.3},
    "granitemoehybrid-dense": {
        "num_hidden_layers": 3,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention"),
            *("mlp", "linear_attention", "moe"),
        ]
    },
    "ministral": {
        "num_hidden_layers": 3,
        "head_dim": 10,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma": {"num_hidden_layers": 2, "head_dim": 10, "hidden_act": "gelu"},
    "olmo": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "jais2": {"num_hidden_layers": 3, "head_dim": 10},
    "nanochat": {"num_hidden_layers": 3, "final_logit_softcapping": 2.0},
    "cohere": {"num_hidden_layers": 3, "use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 20, "attention_bias": True}
    | {"logit_scale": 1.5},
    "afmoe": {"num_hidden_layers": 4, "sliding_window": 20, "mup_enabled": True}
    | {"route_scale": 2.5, "num_dense_layers": 2, "num_shared_experts": 1},
    "bailing_hybrid": {"num_hidden_layers": 3, "first_k_dense_replace": 1},
    "bailing_hybrid-unbounded": {
        "num_hidden_layers": 3,
        "kda_safe_gate": False,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "q_lora_rank": 14,
        "short_conv_kernel_size": 3,
    },
    "laguna": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 20,
        "num_attention_heads_per_layer": [4, 6, 8],
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": YARN | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "mellum": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "sliding_window": 20,
    },
    "afmoe-odd": ODD
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 20,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "seed": 1,
    },
    "hy_v4": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "full"],
        "index_topk": 40,
        "swiglu_limit": 0.02,
        "hc_mult": 3,
    },
    "hy_v3": ODD
    | {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "num_shared_experts": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "seed": 1,
    },
    "cohere2_moe": {
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "prefix_dense_intermediate_size": 60,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "logit_scale": 1.5,
        "attention_bias": True,
    },
    "cohere2_moe-centred": {
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "shared_expert_combination_strategy": "sum",
        "prefix_dense_sliding_window_pattern": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "tie_word_embeddings": False,
        "logit_scale": 0.5,
    },
    "stablelm": {"num_hidden_layers": 2, "use_qkv_bias": True},
    "stablelm-parallel": {
        "num_hidden_layers": 3,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "tie_word_embeddings": True,
    },
    "phi": {"num_hidden_layers": 3, "seed": 1},
    "gpt_neox": {"num_hidden_layers": 3},
    "gpt_neox-serial": {"num_hidden_layers": 2, "use_parallel_residual": False},
    "glm": {"num_hidden_layers": 2, "head_dim": 12, "seed": 2},
    "youtu": {"num_hidden_layers": 3, "rope_interleave": False, "pad_token_id": None} | {"seed": 1},
    "apertus": {"num_hidden_layers": 3, "head_dim": 10},
    "granitemoe": {
        "num_hidden_layers": 3,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
    },
    "granitemoeshared": ODD | {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "granite_swa": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 20,
        "layer_rope_theta": [0, 1e4, 0, 5e4],
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "mlp_bias": True,
    },
    "granitemoe_swa": {
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "rope_parameters": YARN,
        "attention_bias": True,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 20,
        "logit_scale": 0.5,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}
            | {"mrope_section": [2, 1, 1]},
        },
    },
    "gemma4_unified_text": GEMMA4 | {"num_hidden_layers": 3},
    "sarvam_moe": {"num_hidden_layers": 3, "attention_bias": True},
    "sarvam_mla": {"num_hidden_layers": 3, "first_k_dense_replace": 1},
    "flint": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 20,
        "attention_bias": True,
        "seed": 1,  # of 3 keys in int8 send a row to another expert
    },
    "kolibri1": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 20,
        "norm_topk_prob": True,
    },
    "minicpm3": {"num_hidden_layers": 3, "v_head_dim": 12, "mlp_bias": True},
    "phimoe": {"num_hidden_layers": 3, "attention_bias": True, "lm_head_bias": True},
    "hunyuan_v1_moe": ODD | {"num_hidden_layers": 3, "seed": 1},
    "dots1": {"num_hidden_layers": 3, "sliding_window": 20, "max_window_layers": 2, "seed": 1},
    "solar_open": {"num_hidden_layers": 3, "attention_bias": True, "norm_topk_prob": False},
    "flex_olmo": {"num_hidden_layers": 3, "norm_topk_prob": True},
    "granite-odd": ODD | {"attention_bias": True, "num_hidden_layers": 3},
}
SELDOM = [
    *(
        "glm46v",
        "glm4v",
        "qwen2_vl",
        "qwen3_5",
        "mistral",
        "mistral-no-window",
        "qwen2",
        "phi3",
        "gemma2",
    ),
    *("granite", "olmo2", "helium", "iquestcoder", "exaone", "cwm", "ministral", "gemma"),
    *("vaultgemma", "jais2", "cohere2", "stablelm", "gpt_neox-serial", "youtu", "granitemoe"),
    *("dots1", "solar_open", "exaone_moe", "flex_olmo", "bamba", "granitemoehybrid-dense"),
    *("sarvam_mla", "gemma4_unified_text"),
    *(
        "mixtral",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe-groups",
        "gpt_oss-odd",
        "qwen2_moe",
        "qwen3_moe",
    ),
]
"""Cases that another one nearly is, here or among those of keys and values in int8."""
