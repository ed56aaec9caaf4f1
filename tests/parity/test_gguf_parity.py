"""Every architecture of GGUF: the same tokens and logits as transformers says of its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.models.checkpoints import VOCAB_SIZE, make_decoder, make_gpt2
from support.models.family_cases import CASES as FAMILIES
from support.models.family_cases import FALCON_H1, GEMMA4, GROWING, LFM2
from support.models.gguf_files import converted, write_gguf
from support.oracles.oracle import check_generation, made_reference
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.families.registry import parse_config
from shardnet.model.families.stage_tensors import left_over

ODD = {"hidden_size": 35, "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 20}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def llama3_factors(size: int) -> dict[str, Any]:
    """What the converter computes of LLAMA3 for heads of `size` columns."""
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(0, size, 2) / size)
    smooth = (64 / wavelengths - 1.0) / (4.0 - 1.0)
    factors = 1 / ((1 - smooth) / 8.0 + smooth)
    factors = np.where(wavelengths < 64 / 4.0, 1.0, factors)
    factors = np.where(wavelengths > 64 / 1.0, 8.0, factors)
    return {"rope_freqs.weight": factors.astype(np.float32)}


def factors_of(name: str, values: list[float]) -> dict[str, Any]:
    return {f"rope_factors_{name}.weight": np.array(values, dtype=np.float32)}


def turning_factors(size: int) -> dict[str, Any]:
    """What the converter writes of heads of which a quarter of the columns turn."""
    n_turning = size // 8
    factors = [1.0] * n_turning + [1e30] * (size // 2 - n_turning)
    return {"rope_freqs.weight": np.array(factors, dtype=np.float32)}


LLAMA4 = {
    "head_dim": 8,
    "intermediate_size_mlp": 56,
    "attn_temperature_tuning": True,
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
GLM5 = FAMILIES["glm5_next_text"] | {
    "num_hidden_layers": 4,
    "linear_num_heads": 6,
    "layer_types": ["indexed_attention", "linear_attention"],
    "mlp_layer_types": None,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True}, {}),
    "llama-llama3-tied": (
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_hidden_layers": 3},
        {"extra": llama3_factors(8)},
    ),
    "llama-linear": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
    ),
    "mistral": ({"sliding_window": None, "head_dim": 10}, {}),
    "granite": (
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "qwen2": ({"tie_word_embeddings": True}, {}),
    "qwen2-yarn": (
        {"rope_parameters": YARN},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 128,
            "rope__scaling__yarn_ext_factor": 1.0,
            "rope__scaling__yarn_attn_factor": 0.878,
        },
    ),
    "qwen3": (ODD, {}),
    "olmo2": ({}, {}),
    "olmo3": (
        {
            "num_hidden_layers": 5,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 128,
            "attention__sliding_window_pattern": [True, True, True, False, True],
            "rope__freq_base_swa": 1e4,
        },
    ),
    "smollm3": ({"num_hidden_layers": 5}, {}),
    "exaone4": (
        {"num_hidden_layers": 5, "sliding_window": 20},
        {"attention__sliding_window_pattern": [True, True, True, False, True]},
    ),
    "ministral3": (
        {"rope_parameters": YARN | GROWING | {"original_max_position_embeddings": 16}},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 16,
            "rope__scaling__yarn_log_multiplier": 1.0,
            "attention__temperature_scale": 0.5,
        },
    ),
    "ministral3-plain": (
        {"rope_parameters": YARN | GROWING | {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 128,
            "rope__scaling__yarn_log_multiplier": 0.0,
            "attention__temperature_scale": 0.0,
        },
    ),
    "seed_oss": ({"head_dim": 10}, {}),
    "mixtral": ({"sliding_window": None, "head_dim": 10, "num_hidden_layers": 3}, {}),
    "arcee": ({"num_hidden_layers": 2}, {}),
    "nemotron": ({"num_hidden_layers": 2, "head_dim": 8}, {}),
    "starcoder2": ({"num_hidden_layers": 2}, {}),
    "glm4": ({"num_hidden_layers": 2}, {}),
    "ernie4_5": ({"num_hidden_layers": 2}, {}),
    "ernie4_5_moe": ({"num_hidden_layers": 3}, {}),
    "hunyuan_v1_dense": ({"num_hidden_layers": 2}, {}),
    "minimax_m2": ({"num_hidden_layers": 3, "rotary_dim": 6}, {}),
    "mimo_v2_flash": ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, {}),
    "mimo_v2_flash-windows": ({"head_dim": 24, "v_head_dim": 16}, {"expert_weights_norm": None}),
    "mimo_v2_flash-ahead": (
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        {
            "block_count": 6,
            "nextn_predict_layers": 3,
            "attention__head_count_kv": [1, 2, 2, 2, 2, 2],
            "attention__sliding_window_pattern": [0, 1, 1, 1, 1, 1],
            "extra": {"blk.5.attn_q.weight": np.zeros((4, 4), np.float32)},
        },
    ),
    "afmoe": ({"num_hidden_layers": 4, "mup_enabled": True, "sliding_window": 20}, {}),
    "kimi_linear": ({"linear_num_heads": 6, "layer_types": KINDS, "num_hidden_layers": 3}, {}),
    "olmoe": ({"num_hidden_layers": 3}, {}),
    "qwen2_moe": ({"num_hidden_layers": 3}, {}),
    "qwen2_moe-plain": (
        {"qkv_bias": False, "norm_topk_prob": True, "num_hidden_layers": 2},
        {"expert_weights_norm": True, "expert_gating_func": 1},
    ),
    "qwen3_moe": (
        {"norm_topk_prob": True, "num_hidden_layers": 3, "head_dim": 10},
        {},
    ),
    "qwen3_next": ({}, {}),
    "qwen3_5_text": (
        {"full_attention_interval": 2, "linear_num_value_heads": 6, "tie_word_embeddings": True},
        {},
    ),
    "qwen3_5_moe_text": (
        {},
        {
            "feed_forward_length": None,
            "full_attention_interval": 2,  # which counts where nothing says it of each layer
            "attention__recurrent_layers": [True, True, True, False, False],
            "block_count": 5,
            "nextn_predict_layers": 1,  # the last layer, which is left out
            "extra": {"blk.4.nextn.eh_proj.weight": np.zeros((4, 8), np.float32)},
        },
    ),
    "qwen4_exp_text": (FAMILIES["qwen4_exp_text"] | {"ple_layer_ids": [3]}, {}),
    "qwen4_exp_text-plain": (
        {"num_hidden_layers": 2, "output_gate_type": "sigmoid", "tie_word_embeddings": True},
        {},
    ),
    "glm5_next_text": (
        GLM5 | {"layer_types": ["linear_attention", "indexed_attention"] * 2},
        {},
    ),
    "glm5_next_text-ahead": (
        GLM5 | {"num_hidden_layers": 2, "linear_lower_bound": None, "norm_topk_prob": False},
        {
            "block_count": 3,
            "nextn_predict_layers": 1,
            "attention__head_count_kv": [1, 0, 1],
            "swiglu_clamp_exp": [0.05] * 3,
            "swiglu_clamp_shexp": [0.05] * 3,
            "extra": {"blk.2.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)},
        },
    ),
    "glm4_moe": ({"num_hidden_layers": 2, "attention_bias": True}, {}),
    "solar_open": ({"num_hidden_layers": 2}, {"leading_dense_block_count": 0}),
    "gpt_oss": ({"num_hidden_layers": 3, "sliding_window": 20}, {}),
    "phi3": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
            "sliding_window": 20,
        },
        {},
    ),
    "phi3-longrope": (
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "sliding_window": None,
        },
        {
            "extra": factors_of("short", LONGROPE["short_factor"])
            | factors_of("long", LONGROPE["long_factor"]),
            "rope__scaling__original_context_length": 64,
            "rope__scaling__attn_factor": float(np.sqrt(1 + np.log(512 / 64) / np.log(64))),
        },
    ),
    "gemma2": (GEMMA | {"num_hidden_layers": 5}, {}),
    "gemma3_text": (GEMMA | {"num_hidden_layers": 7}, {}),
    "gemma4_text": (
        GEMMA4 | {"num_hidden_layers": 7, "final_logit_softcapping": 5.0},
        {"extra": turning_factors(12)},
    ),
    "gemma4_text-moe": (
        GEMMA4
        | {"num_hidden_layers": 2, "attention_k_eq_v": False, "enable_moe_block": True}
        | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
        {"extra": turning_factors(12)},
    ),
    "lfm2": (LFM2 | {"num_hidden_layers": 4}, {}),
    "lfm2_moe": ({"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}, {}),
    "qwen3-vl": (
        {"head_dim": 8, "num_hidden_layers": 2},
        {
            "architecture": "qwen3vl",
            "rope__dimension_sections": [2, 1, 1, 0],
            "n_deepstack_layers": 3,
        },
    ),
    "llama4_text": (LLAMA4 | {"num_hidden_layers": 4}, {}),
    "llama4_text-dense": (
        LLAMA4 | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
        {"expert_gating_func": 2},
    ),
    "llama4_text-none": (
        LLAMA4
        | {
            "num_hidden_layers": 4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "no_rope_layers": [1] * 4,
        },
        {"attention__sliding_window": 0},
    ),
    "deepseek_v2": ({"num_hidden_layers": 3, "first_k_dense_replace": 1}, {}),
    "deepseek_v2-groups-whole": (
        {
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "q_lora_rank": 14,
            "routed_scaling_factor": 16.0,
            "num_hidden_layers": 2,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            "has_whole_latents": True,
            "attention__head_count_kv": 6,
            "attention__key_length": 18,
            "attention__value_length": 12,
            "attention__key_length_mla": None,
            "attention__value_length_mla": None,
            "expert_gating_func": 1,
        },
    ),
    "deepseek_v3": (
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            "block_count": 4,
            "nextn_predict_layers": 1,
            "extra": {"blk.3.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)},
        },
    ),
    "glm4_moe_lite": ({"num_hidden_layers": 3}, {}),
    "minicpm3": ({"num_hidden_layers": 2}, {"has_whole_latents": True}),
    "glm_moe_dsa": (
        {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1},
        {"attention__indexer__types": [True, False, True]},
    ),
    "deepseek_v4": (
        FAMILIES["deepseek_v4"]
        | {
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 128,
            },
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0},
        },
        {},
    ),
    "hy_v4": (FAMILIES["hy_v4"] | {"index_topk": 20}, {}),
    "gpt2": ({}, {}),
    "gemma": ({"num_hidden_layers": 2}, {}),
    "olmo": ({"num_hidden_layers": 2}, {}),
    "jais2": ({"num_hidden_layers": 2}, {}),
    "cohere": ({"num_hidden_layers": 2, "use_qk_norm": True, "logit_scale": 2.0}, {}),
    "cohere2": ({"num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 2.0}, {}),
    "stablelm": ({"num_hidden_layers": 2, "use_parallel_residual": True}, {}),
    "phi": ({"num_hidden_layers": 2}, {}),
    "gpt_neox": ({"num_hidden_layers": 2}, {}),
    "granitemoe": ({"num_hidden_layers": 2}, {}),
    "granitemoeshared": ({"num_hidden_layers": 2}, {}),
    "phimoe": ({"num_hidden_layers": 2, "attention_bias": True, "lm_head_bias": True}, {}),
    "hunyuan_v1_moe": ({"num_hidden_layers": 2}, {}),
    "dots1": ({"num_hidden_layers": 3}, {}),
    "exaone": ({"num_hidden_layers": 2}, {}),
    "granitemoehybrid": ({"num_hidden_layers": 4}, {}),
    "falcon_h1": (FALCON_H1 | {"num_hidden_layers": 2}, {}),
    "falcon_h1-norm": (
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {},
    ),
    "granitemoehybrid-rotated": (
        {
            "num_hidden_layers": 3,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 80,
        },
        {"architecture": "granite", "rope__scaling__finetuned": True},
    ),
    "granitemoehybrid-dense": ({"num_hidden_layers": 4, "num_local_experts": 0}, {}),
    "nemotron_h": ({}, {}),
    "nemotron_h-ahead": (
        {},
        {
            "block_count": 5,
            "nextn_predict_layers": 1,
            "attention__head_count_kv": [0, 0, 2, 0, 2],
            "feed_forward_length": [0, 80, 0, 80, 0],
            "extra": {"blk.4.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)},
        },
    ),
}

WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
PARTIAL = ("glm4", "nemotron", "gpt_neox", "stablelm", "phi", "qwen3_next", "qwen3_5_text")
"""Families that turn a part of each head where config.json is silent."""
CASES |= {f"{family}-whole": ({"rope_parameters": WHOLE}, {}) for family in PARTIAL}
SELDOM = ["llama4_text", "stablelm-whole", "phi-whole"]


def pack_experts(values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    return gguf.quants.quantize(np.ascontiguousarray(values), kind)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_expert_is_read_alone(family: str, tmp_path: Path) -> None:
    """To the values that the whole stack has."""
    number = gguf.GGMLQuantizationType.Q8_0
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32}
    source = make_decoder(tmp_path / "source", family, with_tokenizer=False, **sizes)
    stacks: dict[str, Any] = {}

    def pack(name: str, values: Any) -> tuple[Any, gguf.GGMLQuantizationType | None]:
        if values.ndim < 3:
            return values, None
        stacks[name] = pack_experts(values, number)
        return stacks[name], number

    checkpoint = Checkpoint.open(write_gguf(source, tmp_path / "packed.gguf", pack=pack))
    name = next(name for name in checkpoint.tensors if re.search(r"\.experts\.1\.(gate|w1)", name))
    read = checkpoint.read(name)
    parts = ["gate", "up"] if family == "gpt_oss" else ["gate"]
    meant = [gguf.quants.dequantize(stacks[f"blk.0.ffn_{p}_exps.weight"], number) for p in parts]
    assert torch.equal(read, torch.from_numpy(np.concatenate([stack[1] for stack in meant])))
    [n_read] = checkpoint.bytes_read.values()
    stack = checkpoint.stored["blk.0.ffn_gate_exps.weight"]
    assert n_read == len(parts) * stack.size_bytes // stack.shape[0]


@pytest.mark.parametrize("case", cases([case for case in CASES if case not in SELDOM], SELDOM))
def test_a_gguf_says_what_its_weights_say_in_transformers(case: str, tmp_path: Path) -> None:
    config, metadata = CASES[case]
    family = case.split("-")[0]
    source = tmp_path / "source"
    if family == "gpt2":
        make_gpt2(source, with_tokenizer=False, **config)
    else:
        make_decoder(source, family, with_tokenizer=False, **config)
    path = write_gguf(source, tmp_path / "model.gguf", **metadata)
    checkpoint = Checkpoint.open(path)
    config_read = checkpoint.config
    assert left_over(config_read, checkpoint.tensors) == []
    assert checkpoint.unknown_keys == ()
    chain = StageChain.load(path, even_split(config_read.n_layers, 2))
    length = 150 if family == "deepseek_v4" else 40  # 128 positions make an entry
    prompts = [random_prompt(length, VOCAB_SIZE, seed=3), random_prompt(5, VOCAB_SIZE, seed=4)]
    check_generation(chain, made_reference(source), prompts, 4)


@pytest.mark.parametrize(
    ("family", "architecture", "axes"),
    [("qwen2", "qwen2vl", (0, 0, 1, 2)), ("qwen3", "qwen3vl", (0, 1, 2, 0))],
)
def test_columns_turn_by_the_axes_that_the_sections_say(
    family: str, architecture: str, axes: tuple[int, ...], tmp_path: Path
) -> None:
    """Side by side, or since Qwen3-VL in turns; to other nodes it travels as config.json."""
    source = make_decoder(tmp_path, family, num_hidden_layers=1, head_dim=8)
    sections = {"rope__dimension_sections": [2, 1, 1, 0]}
    file = write_gguf(source, tmp_path / "m.gguf", architecture=architecture, **sections)
    found = Checkpoint.open(file)
    assert found.config.rope is not None
    assert found.config.rope.axes == axes
    assert parse_config(json.loads(found.config_text), "config.json").rope == found.config.rope


def test_pairs_of_glm_stand_apart_where_they_have_axes(tmp_path: Path) -> None:
    """llama.cpp's converter puts the first ones of all pairs before the second ones then."""
    source = make_decoder(tmp_path / "source", "glm4", with_tokenizer=False, num_hidden_layers=2)
    config = json.loads((source / "config.json").read_text())
    size = config["head_dim"]
    pairs = np.arange(size // 2).reshape(-1, 2).T.ravel()
    order = np.concatenate((pairs, np.arange(size // 2, size)))
    turned = {
        name: values.reshape(-1, size, *values.shape[1:])[:, order].reshape(values.shape)
        for name, values in converted(source).items()
        if re.search(r"attn_[qk]\.", name)
    }
    sections = {"rope__dimension_sections": [1, 1, size // 4 - 2, 0]}
    file = write_gguf(source, tmp_path / "m.gguf", extra=turned, **sections)
    chain = StageChain.load(file, even_split(2, 2))
    check_generation(chain, made_reference(source), [random_prompt(40, VOCAB_SIZE, seed=3)], 4)
