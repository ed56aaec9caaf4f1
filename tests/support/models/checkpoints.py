"""Tiny random checkpoints in Hugging Face layout, written by transformers' own classes.

Every parameter is random, biases and norms too, so that no part of the maths can hide. The same
arguments give the same files.
"""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from support.models.deepseek_v41_checkpoints import write_deepseek_v41
from support.oracles.plain_deepseek_v41 import PlainDeepseekV41
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 6,
}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
}
SHARED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
QWEN4 = (
    DELTA_NET
    | SHARED_EXPERTS
    | {"hc_count": 3, "hc_lowrank": 14, "full_attention_interval": 2}
    | {"indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 10}
    | {"indexer_budget": 16, "indexer_compress_ratio": 4}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
)
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2}
FEW_EXPERTS: dict[str, dict[str, Any]] = {
    "llama4": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "head_dim": 8, "global_head_dim": 12},
    "lfm2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "afmoe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 8},
    "bailing_hybrid": LATENT
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": None}
    | {"n_group": 2, "topk_group": 1, "head_dim": 8, "layer_group_size": 2},
    "laguna": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 16, "shared_expert_intermediate_size": 24},
    "step3p5": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 16, "share_expert_dim": 24, "sliding_window": 20},
    "mellum": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 12},
    "deepseek_v4": {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 20,
        "o_groups": 3,
        "o_lora_rank": 10,
        "sliding_window": 20,
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 5,
    },
    "hy_v4": LATENT
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": 14}
    | {"index_head_dim": 16, "index_n_heads": 6},
    "glm5_next_text": {key: value for key, value in LATENT.items() if "first" not in key}
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "q_lora_rank": 14, "qk_rope_head_dim": 0}
    | {"index_head_dim": 16, "index_n_heads": 6, "linear_head_dim": 10, "linear_num_heads": 4},
    "hy_v3": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 8, "mlp_layer_types": ["sparse"] * 4},
    "cohere2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 10}
    | {"num_shared_experts": 2},
    "mimo_v2_flash": {
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "gemma4_unified_text": {"head_dim": 8, "global_head_dim": 12},
    "sarvam_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 10},
    "sarvam_mla": LATENT | {"n_routed_experts": 6, "num_experts_per_tok": 2},
    "flint": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 10, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "kolibri1": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"head_dim": 10, "shared_expert_intermediate_size": 24},
    "minicpm3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 6,
    },
    "glm4": {"head_dim": 12},
    "ernie4_5": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 12},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "deepseek_v2": LATENT | {"n_routed_experts": 6, "num_experts_per_tok": 2, "q_lora_rank": None},
    "deepseek_v3": LATENT
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": 14}
    | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": 14}
        | {"index_head_dim": 16, "index_n_heads": 6, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe_lite": LATENT
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "q_lora_rank": 14}
    | {"first_k_dense_replace": 1},
    "mistral4": LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": 14},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 8,
        "num_mtp_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8},
    "exaone_moe": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "num_shared_experts": 2,
    },
    "vaultgemma": {"head_dim": 8},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 6,  # as wide as the keys: transformers writes taps in thirds
    },
    "kimi_linear": {key: value for key, value in LATENT.items() if "first" not in key}
    | {"num_local_experts": 6, "num_experts_per_tok": 2, "linear_head_dim": 10}
    | {"linear_num_heads": 4, "layer_types": ["full_attention", *["linear_attention"] * 3]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 96},
    "granitemoehybrid": MAMBA2
    | {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 10,
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "ssm_state_size": 12,
        "n_groups": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
    },
    "gpt_neox": {"num_key_value_heads": None},
    "helium": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "cwm": {"head_dim": 12},
    "gemma": {"head_dim": 12},
    "glm": {"head_dim": 12},
    "youtu": {key: value for key, value in LATENT.items() if "_k_" not in key and "moe" not in key}
    | {"q_lora_rank": 14},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 24,
    },
    "granitemoe_swa": {"num_local_experts": 5, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 24},
    "phimoe": {"num_local_experts": 6},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 6, "moe_topk": 3},
    "dots1": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
    },
    "solar_open": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 10,
    },
    "glm4v_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
    },
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": SHARED_EXPERTS,
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "qwen3_vl_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "qwen3_next": DELTA_NET | SHARED_EXPERTS,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | SHARED_EXPERTS,
    "qwen3_5_moe": DELTA_NET | SHARED_EXPERTS,
    **dict.fromkeys(("qwen4_exp_text", "qwen4_exp"), QWEN4),
}
"""What keeps the families with experts or linear attention small."""
_SIGLIP = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_EYES = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
_GEMMA4_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mm_embed_dim": 16,
    "output_proj_dims": 48,
    "mm_posemb_size": 16,
}
_GLM_EYES = _QWEN_EYES | {"out_hidden_size": 48, "image_size": 14}
WRAPPED: dict[str, dict[str, Any]] = {
    "gemma3": _SIGLIP | {"model_type": "siglip_vision_model"},
    "gemma4": _GEMMA4_EYES,
    "gemma4_unified": _GEMMA4_EYES,
    "glm4v": _GLM_EYES,
    "glm46v": _GLM_EYES,
    "glm4v_moe": _GLM_EYES,
    "glm5_next_text": _GLM_EYES | {"projection_intermediate_size": 8},
    "llama4": _SIGLIP
    | {
        "intermediate_size": 32,
        "vision_output_dim": 8,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
    },
    "mistral3": _SIGLIP | {"model_type": "pixtral", "head_dim": 8},
    "step3p5": {"width": 12, "layers": 1, "heads": 1, "image_size": 28, "mlp_ratio": 2.0},
    "qwen2_vl": {"depth": 1, "embed_dim": 8, "hidden_size": 48, "num_heads": 1},
    "qwen2_5_vl": _QWEN_EYES | {"out_hidden_size": 48, "fullatt_block_indexes": [0]},
    "qwen3_vl": _QWEN_EYES | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _QWEN_EYES | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    "qwen3_5": _QWEN_EYES | {"out_hidden_size": 48},
    "qwen3_5_moe": _QWEN_EYES | {"out_hidden_size": 48},
    "qwen4_exp": _QWEN_EYES | {"out_hidden_size": 48},
}
"""The `vision_config` of multimodal checkpoints, as small as it goes."""
VOCAB_SIZE = 320
"""Wider than the tokenizer's 300 tokens: the last 20 rows pad the vocabulary."""
N_TOKENS = 300
BOS_ID, EOS_ID = 0, 1

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()


def make_llama(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    with_tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write a random Llama checkpoint; `config` overrides LlamaConfig's fields. Return `folder`."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    model = LlamaForCausalLM(LlamaConfig(**defaults | config))
    return _save(model, folder, seed, dtype, max_shard_size, with_tokenizer)


def make_gpt2(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    with_tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write a random GPT-2 checkpoint; `config` overrides GPT2Config's fields. Return `folder`."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    model = GPT2LMHeadModel(GPT2Config(**defaults | config))
    return _save(model, folder, seed, dtype, max_shard_size, with_tokenizer)


def make_decoder(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    with_tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write a random checkpoint of `family`, a `model_type` that shares Llama's keys.

    `config` overrides its config's fields. Return `folder`.
    """
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
    }
    if family.removesuffix("_text") == "deepseek_v41":  # of which transformers has no class
        folder.mkdir(parents=True, exist_ok=True)
        make_tokenizer(folder)
        _last[:] = [(folder, write_deepseek_v41(folder, seed=seed, dtype=dtype, **config))]
        return folder
    few = FEW_EXPERTS.get(family, {})
    config = defaults | few | config
    if family in WRAPPED:
        return _save(_wrapped(family, config), folder, seed, dtype, max_shard_size, with_tokenizer)
    own = AutoConfig.for_model(family, **config)
    is_left_out = isinstance(own, Mistral4Config)  # of the automatic choice
    model = Mistral4ForCausalLM(own) if is_left_out else AutoModelForCausalLM.from_config(own)
    return _save(model, folder, seed, dtype, max_shard_size, with_tokenizer)


def _wrapped(family: str, text: dict[str, Any]) -> PreTrainedModel:
    """Put the smallest eyes before a language model."""
    outer = {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    whole = {"text_config": text | outer, "vision_config": WRAPPED[family], **outer}
    kind = "step3p7" if family == "step3p5" else family.removesuffix("_text")
    config = AutoConfig.for_model(kind, **whole)
    return AutoModelForImageTextToText.from_config(config)


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE of 300 tokens whose post-processor puts `<s>` in front."""
    (folder / "tokenizer.json").write_text(_tokenizer_text())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@functools.cache
def _tokenizer_text() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentence = (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune"
    )
    tokenizer.train_from_iterator([sentence], trainer)
    assert tokenizer.get_vocab_size() == N_TOKENS
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    text: str = tokenizer.to_str(pretty=True)
    return text


_last: list[tuple[Path, PreTrainedModel | PlainDeepseekV41]] = []


def last_made(folder: Path) -> PreTrainedModel | PlainDeepseekV41:
    """The model whose checkpoint was the last one written, which is in `folder`."""
    [(where, model)] = _last
    assert where == folder, f"{where} was written after {folder}"
    return model


def _save(
    model: PreTrainedModel,
    folder: Path,
    seed: int,
    dtype: torch.dtype,
    max_shard_size: str,
    with_tokenizer: bool,
) -> Path:
    generator, stored = torch.Generator().manual_seed(seed), model.state_dict()
    is_hybrid = hasattr(model.config, "linear_num_key_heads")  # norms store what exceeds 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            centre = 0 if is_hybrid and ".linear_attn." not in name else 1
            parameter.copy_(centre + 0.1 * noise if is_norm else 0.15 * noise)
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point():
                centre = name.endswith("layer_scalar")
                buffer.copy_(centre + 0.15 * torch.randn(buffer.shape, generator=generator))
            if name.endswith(".tid2eid"):  # each token has experts of its own
                own = torch.Generator().manual_seed(seed + len(buffer))
                scores = torch.rand(len(buffer), model.config.n_routed_experts, generator=own)
                buffer.copy_(scores.argsort(1)[:, : buffer.shape[1]])
    if dtype is not torch.float32:
        with warnings.catch_warnings():  # Llama 4's eyes have a buffer of complex numbers
            warnings.filterwarnings("ignore", "Casting complex values")
            model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _last[:] = [(folder, model)]
    if with_tokenizer:
        make_tokenizer(folder)
    return folder
