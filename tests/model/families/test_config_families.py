"""The families' config.json: published ones are read, what changes the maths is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from transformers import AutoConfig, DeepseekV4Config

from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import (
    Activation,
    DeltaNet,
    Experts,
    HeadShape,
    Latent,
    ModelConfig,
    Rope,
    RopeKind,
    Temperature,
)
from shardnet.model.config.ngram_hashes import head_rows
from shardnet.model.families.registry import FAMILIES, parse_config
from shardnet.model.families.stage_tensors import layer_tensors, left_over, stage_tensors
from shardnet.types import LayerRange

DECODERS = [family for family in FAMILIES if family != "gpt2"]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 99,
}
QWEN2 = SIZES | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
}
PHI4_MINI = SIZES | {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1, 1.1, 1.2, 1.3, 1.4, 1.5],
        "short_factor": [1.0] * 6,
        "type": "longrope",
    },
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
GEMMA2 = SIZES | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 144,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA3 = SIZES | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
LLAMA4 = SIZES | {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_jitter_noise": 0.0,
    "use_qk_norm": True,
}
MISTRAL = SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN3 = SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIXTRAL = SIZES | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.1,
    "sliding_window": None,
}
QWEN3_MOE = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN2_MOE = SIZES | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
GPT_OSS = SIZES | {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "rms_norm_eps": 1e-05,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
DEEPSEEK = SIZES | {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_group": 8,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "seq_aux": True,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}
DEEPSEEK_V2 = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
QSA = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
RAW = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "hunyuan_v1_moe": SIZES | {"model_type": "hunyuan_v1_moe", "num_experts": 8},
    "qwen2_moe": QWEN2_MOE,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI4_MINI,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
}


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config(raw | changes, "config.json")


@pytest.mark.parametrize("family", DECODERS)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    """Every key that transformers' own classes put into config.json is known."""
    folder = make_decoder(tmp_path, family, with_tokenizer=False)
    raw = json.loads((folder / "config.json").read_text())
    config = parse_config(raw, "config.json")
    assert (config.family, config.n_layers, config.vocab_size) == (family, 4, 320)


@pytest.mark.parametrize("family", DECODERS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A config that names nothing but the sizes that have no default of their own."""
    sizes = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
    sizes |= {"hidden_size": 512, "num_attention_heads": 32, "pad_token_id": 0}
    if family == "deepseek_v2":
        sizes["num_experts_per_tok"] = 4  # has no default of its own
    if family == "dots1":
        sizes |= {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
    if family in ("helium", "glm5_next_text"):
        sizes["num_key_value_heads"] = 32  # has a number for a default
    if family == "nemotron_h":
        sizes["layers_block_type"] = [*("linear_attention", "moe") * 2, *("full_attention", "mlp")]
        sizes["num_hidden_layers"] = 6
    if family == "gemma4_text":
        sizes["hidden_size_per_layer_input"] = 0
    if family == "qwen4_exp_text":
        sizes |= QSA
    if family == "cohere_compass_text":  # has a base by no default
        sizes["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    theirs = AutoConfig.for_model(family, **sizes)
    theirs.allow_global_per_layer_attribute_access = True
    ours = parse_config(sizes | {"model_type": family}, "config.json")
    assert ours.max_positions == theirs.max_position_embeddings
    kv_heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    if family == "mimo_v2_flash":
        assert ours.full_heads is not None
        assert (ours.full_heads.n_kv_heads, ours.value_size) == (kv_heads, theirs.v_head_dim)
        kv_heads *= 2  # of layers with a window
    assert ours.latent or ours.n_kv_heads == kv_heads
    size = theirs.qk_rope_head_dim if ours.latent else getattr(theirs, "head_dim", None)
    assert ours.head_size == (16 if size is None else size)
    keys = ("rms_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    eps = next((one for key in keys if (one := getattr(theirs, key, None)) is not None), 1e-5)
    assert ours.norm_eps == eps
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if kinds is None:
        assert set(ours.windows) <= {window}
    else:
        limits = {"sliding_attention": window}
        limits["chunked_attention"] = getattr(theirs, "attention_chunk_size", None)
        expected = [limits.get(kind) for kind in kinds]
        assert [ours.window(layer) for layer in range(ours.n_layers)] == expected
        stateful = ("linear_attention", "conv", "moe", "mlp", "hybrid")
        linear = [kind in stateful for kind in kinds]
        has_states = [ours.state(layer) is not None for layer in range(ours.n_layers)]
        assert has_states == ([True] * len(kinds) if ours.compressed else linear)
    if ours.compressed is not None:
        check_compressed(ours, theirs)
    if ours.delta_net is not None and hasattr(theirs, "linear_num_key_heads"):
        check_delta_net(ours, theirs)
    if ours.experts is not None:
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        n_experts = next(getattr(theirs, name) for name in names if hasattr(theirs, name))
        assert ours.experts.n_experts == n_experts
        assert ours.experts.top_k == theirs.num_experts_per_tok
        if ours.latent is not None:
            check_latent(ours, theirs)
        normalizes = getattr(theirs, "norm_topk_prob", family not in ("llama4_text", "phimoe"))
        assert ours.experts.normalize_top_k is normalizes
        inner = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.experts.intermediate_size == inner
    rope = getattr(theirs, "rope_parameters", {"rope_theta": 10000.0})
    assert ours.rope is not None
    assert ours.rope.theta == rope.get("full_attention", rope.get("compress", rope))["rope_theta"]
    activation = getattr(theirs, "hidden_activation", None) or getattr(theirs, "hidden_act", "silu")
    activation = getattr(theirs, "mlp_hidden_act", activation)
    assert activation == "xielu" or ours.activation is Activation(activation)


def check_delta_net(ours: ModelConfig, theirs: Any) -> None:
    """Hold what only families with linear attention have against transformers' defaults."""
    assert ours.delta_net is not None
    assert ours.rope is not None
    assert ours.rope.share == (theirs.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    assert ours.delta_net == DeltaNet(
        n_key_heads=theirs.linear_num_key_heads,
        n_value_heads=theirs.linear_num_value_heads,
        key_size=theirs.linear_key_head_dim,
        value_size=theirs.linear_value_head_dim,
        n_taps=theirs.linear_conv_kernel_dim,
        layers=(0, 1, 2, 4, 5, 6),
        write_scale=2.0 if getattr(theirs, "linear_allow_neg_eigval", False) else 1.0,
    )


def test_deepseek_v4_may_be_said_in_older_words() -> None:
    """As its makers write it, and as transformers does what it has read of that."""
    raw = SIZES | {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4],
        "compress_rope_theta": 160000,
        "num_hash_layers": 2,
        "expert_dtype": "fp4",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    others = {key: raw[key] for key in raw if key != "rope_scaling"}
    theirs = DeepseekV4Config(**others, rope_parameters=dict(raw["rope_scaling"]))
    written = json.loads(theirs.to_json_string())
    ours = parse_config(raw, "config.json")
    check_compressed(ours, theirs)
    assert ours == parse_config(written, "config.json")
    assert ours.rope is not None
    assert ours.local_rope is not None
    assert (ours.rope.theta, ours.rope.factor, ours.rope.magnitude) == (160000, 16, 1)
    assert (ours.local_rope.theta, ours.local_rope.kind) == (10000, RopeKind.DEFAULT)
    assert ours.rope.rotated(ours.head_size) == 64


@pytest.mark.parametrize("key", ["compress_ratios", "layer_types", "mlp_layer_types"])
@pytest.mark.parametrize("kinds", [[[0]] * 7, [4] * 3, ["moe"] * 6 + [{}]])
def test_kinds_of_layers_that_are_none_are_named(key: str, kinds: list[Any]) -> None:
    raw = SIZES | {"model_type": "deepseek_v4", "num_key_value_heads": 1, key: kinds}
    with pytest.raises(CheckpointError, match="do not say the kinds of 7 layers"):
        parse_config(raw, "config.json")


def check_compressed(ours: ModelConfig, theirs: Any) -> None:
    """Hold what only DeepSeek-V4 has against transformers' defaults."""
    own, streams = ours.compressed, ours.streams
    assert own is not None
    assert streams is not None
    rates = {"sliding_attention": 0, **theirs.compress_rates}
    assert own.rates == (*(rates[kind] for kind in theirs.layer_types), 0)
    assert (own.window, own.rope_size) == (theirs.sliding_window, theirs.qk_rope_head_dim)
    assert (own.query_rank, own.n_groups) == (theirs.q_lora_rank, theirs.o_groups)
    assert (own.output_rank, own.indexer.n_chosen) == (theirs.o_lora_rank, theirs.index_topk)
    assert (own.indexer.n_heads, own.indexer.head_size) == (
        theirs.index_n_heads,
        theirs.index_head_dim,
    )
    assert (streams.count, streams.n_rounds) == (theirs.hc_mult, theirs.hc_sinkhorn_iters)
    assert ours.experts is not None
    kinds = enumerate(theirs.mlp_layer_types)
    assert ours.experts.hashed_layers == tuple(n for n, kind in kinds if kind == "hash_moe")


def check_latent(ours: ModelConfig, theirs: Any) -> None:
    """Hold what only DeepSeek's families have against transformers' defaults."""
    assert ours.latent is not None
    assert ours.experts is not None
    assert ours.latent == Latent(
        rank=theirs.kv_lora_rank,
        rope_size=theirs.qk_rope_head_dim,
        nope_size=theirs.qk_nope_head_dim,
        value_size=theirs.v_head_dim,
        query_rank=theirs.q_lora_rank,
        interleaved=getattr(theirs, "rope_interleave", bool(ours.rope and not ours.nope_layers))
        and ours.family != "hy_v4",
        norm_eps=theirs.rms_norm_eps if ours.family == "glm5_next_text" else 1e-6,
    )
    kinds = ["dense"] * getattr(theirs, "first_k_dense_replace", 1) + ["sparse"] * 7
    kinds = getattr(theirs, "mlp_layer_types", None) or kinds[:7]
    assert ours.sparse_layers == tuple(n for n in range(7) if kinds[n] == "sparse")
    assert ours.experts.output_scale == theirs.routed_scaling_factor
    shared = theirs.n_shared_experts * theirs.moe_intermediate_size
    assert ours.experts.shared_intermediate_size == shared
    groups = (theirs.n_group or 1, theirs.topk_group or 1)
    assert (ours.experts.n_groups, ours.experts.top_groups) == groups


def test_mistral_has_a_window_unless_it_says_null() -> None:
    assert parse(MISTRAL).windows == (4096,) * 7
    assert parse(MISTRAL, sliding_window=100).windows == (100,) * 7
    assert parse(MISTRAL, sliding_window=None).windows == (None,) * 7


def test_qwen_windows_begin_at_a_layer_where_they_are_switched_on() -> None:
    config = parse(QWEN2)
    assert config.windows == (None,) * 7
    assert config.attention_bias
    assert config.rope == Rope(theta=1e6)
    assert parse(QWEN2, use_sliding_window=True).windows == (None,) * 5 + (4096,) * 2
    kinds = ["sliding_attention"] + ["full_attention"] * 6
    on = parse(QWEN2, use_sliding_window=True, layer_types=kinds)
    assert on.windows == (4096,) + (None,) * 6


def test_qwen_with_yarn_reaches_further_than_it_says() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = parse(QWEN2, rope_scaling=scaling)
    assert config.max_positions == 131072
    assert config.rope is not None
    assert config.rope.kind is RopeKind.YARN


def test_phi4_mini() -> None:
    config = parse(PHI4_MINI)
    assert config.windows == (262144,) * 7
    assert config.rope is not None
    assert config.rope.rotated(config.head_size) == 12
    assert config.rope.original_max_positions == 4096
    assert config.rope.long_factors == (1, 1.1, 1.2, 1.3, 1.4, 1.5)
    assert config.rope.magnitude == pytest.approx((1 + 5 / 12) ** 0.5)  # ln 32 / ln 4096
    assert (config.max_positions, config.default_context) == (131072, 4096)


def test_gemma2() -> None:
    config = parse(GEMMA2)
    assert config.windows == (4096, None, 4096, None, 4096, None, 4096)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.attention_scale == pytest.approx(1 / 12)
    assert (config.embedding_multiplier, config.norm_offset) == (8.0, 1.0)
    assert config.tie_word_embeddings
    bare = {key: GEMMA2[key] for key in GEMMA2 if "softcapping" not in key}
    assert parse(bare) == config
    capless = parse(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (capless.attention_soft_cap, capless.logit_soft_cap) == (None, None)


def test_gemma3_in_both_spellings() -> None:
    config = parse(GEMMA3)
    assert config.windows == (512,) * 5 + (None, 512)
    assert config.rope == Rope(kind=RopeKind.LINEAR, theta=1e6, factor=8.0)
    assert config.local_rope == Rope(theta=1e4)
    assert (config.layer_rope(5), config.layer_rope(6)) == (config.rope, config.local_rope)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    new = {key: GEMMA3[key] for key in GEMMA3 if not key.startswith("rope_")}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parse(new) == config


def test_mixtral() -> None:
    config = parse(MIXTRAL)
    assert (config.windows, config.rope) == ((None,) * 7, Rope(theta=1e6))
    assert config.experts == Experts(
        n_experts=8, top_k=2, intermediate_size=100, normalize_top_k=True, layers=tuple(range(7))
    )
    assert parse(MIXTRAL, sliding_window=4096).windows == (4096,) * 7
    every_one = parse(MIXTRAL, num_experts_per_tok=8).experts
    assert every_one is not None
    assert every_one.top_k == 8


def test_qwen3_moe_in_both_spellings() -> None:
    config = parse(QWEN3_MOE)
    assert config.experts == Experts(
        n_experts=128, top_k=8, intermediate_size=768, normalize_top_k=True, layers=tuple(range(7))
    )
    new = {key: QWEN3_MOE[key] for key in QWEN3_MOE if key != "num_experts"}
    assert parse(new, num_local_experts=128) == config
    assert parse(QWEN3_MOE, num_local_experts=128) == config
    assert parse(QWEN3_MOE, use_sliding_window=True, sliding_window=9).windows == (9,) * 7


def test_qwen2_moe() -> None:
    config = parse(QWEN2_MOE)
    assert config.experts == Experts(
        n_experts=60,
        top_k=4,
        intermediate_size=1408,
        normalize_top_k=False,
        shared_intermediate_size=5632,
        layers=tuple(range(7)),
    )
    assert config.attention_bias
    assert config.windows == (None,) * 7
    assert parse(QWEN2_MOE, sliding_window=0) == config  # as transformers 5 writes it
    on = parse(QWEN2_MOE, use_sliding_window=True, sliding_window=9, max_window_layers=4)
    assert on.windows == (9, None, 9) + (None,) * 4


def test_gpt_oss() -> None:
    config = parse(GPT_OSS)
    assert config.windows == (128, None, 128, None, 128, None, 128)
    assert config.experts == Experts(
        n_experts=32,
        top_k=4,
        intermediate_size=100,
        normalize_top_k=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        layers=tuple(range(7)),
    )
    assert config.rope is not None
    assert (config.rope.kind, config.rope.truncate) == (RopeKind.YARN, False)
    assert (config.max_positions, config.attention_bias, config.has_sinks) == (131072, True, True)
    left_out = ("rope_scaling", "rope_theta", "layer_types")
    bare = {key: GPT_OSS[key] for key in GPT_OSS if key not in left_out}
    assert parse(bare) == config


def test_deepseek_v3() -> None:
    config = parse(DEEPSEEK_V3)
    assert config.experts == Experts(
        n_experts=256,
        top_k=8,
        intermediate_size=2048,
        normalize_top_k=True,
        shared_intermediate_size=2048,
        n_groups=8,
        top_groups=4,
        output_scale=2.5,
        layers=(3, 4, 5, 6),
    )
    assert config.usual_heads == HeadShape(n_kv_heads=1, key_size=576, value_size=0)
    magnitude = 0.1 * math.log(40) + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * magnitude**2)
    assert config.rope is not None
    assert config.rope.magnitude == 1  # mscale by mscale_all_dim
    assert config.max_positions == 163840
    scaling = DEEPSEEK_V3["rope_scaling"] | {"mscale": 0, "mscale_all_dim": 0.0}
    assert parse(DEEPSEEK_V3, rope_scaling=scaling).attention_scale == pytest.approx(192**-0.5)
    plain = {key: DEEPSEEK_V3[key] for key in DEEPSEEK_V3 if key != "rope_scaling"}
    assert parse(plain).attention_scale == pytest.approx(192**-0.5)
    assert parse(DEEPSEEK_V3, first_k_dense_replace=7).experts is None
    assert parse(DEEPSEEK_V3, model_type="kimi_k2") == config


def test_deepseek_v2() -> None:
    config = parse(DEEPSEEK_V2)
    assert config.experts is not None
    assert (config.experts.n_groups, config.experts.top_groups) == (8, 3)
    assert (config.experts.shared_intermediate_size, config.experts.output_scale) == (3072, 16.0)
    lite = parse(DEEPSEEK_V2, topk_method="greedy", n_group=1, topk_group=1, q_lora_rank=None)
    assert lite.experts is not None
    assert lite.latent is not None
    assert (lite.experts.n_groups, lite.latent.query_rank) == (1, None)


def test_what_predicts_tokens_ahead_is_left_out() -> None:
    """DeepSeek-V3's layers beyond the config's, which transformers does not load either."""
    names = [f"model.layers.{n}.{rest}.weight" for n in (6, 7, 12) for rest in ("eh_proj", "x")]
    assert left_over(parse(DEEPSEEK_V3), names) == names[:2]
    assert left_over(parse(QWEN3), [*names, "mtp.layers.0.fc.weight"]) == sorted(names)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_positions_are_chosen_as_the_config_says(family: str) -> None:
    raw = SIZES | {"model_type": family, "num_key_value_heads": 4, "index_topk": 100}
    config = parse_config(raw, "config.json")
    assert config.indexer is not None
    assert (config.indexer.n_chosen, config.indexer.head_size) == (100, 128)
    assert config.indexer.layers == tuple(range(config.n_layers + 1))
    assert [config.heads(layer).value_size for layer in range(config.n_layers)] == [128] * 7
    with pytest.raises(UnsupportedModelError, match="rope_interleave = False is not supported"):
        parse_config(raw | {"rope_interleave": False}, "config.json")


@pytest.mark.parametrize(
    "said",
    [
        {"index_topk_freq": 3, "index_skip_topk_offset": 2},
        {"index_topk_pattern": "FFSSFSS"},
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared", "shared"]},
    ],
)
def test_layers_may_take_the_choice_of_one_before(said: dict[str, Any]) -> None:
    raw = SIZES | {"model_type": "glm_moe_dsa", "num_key_value_heads": 4}
    config = parse_config(raw | said, "config.json")
    assert config.indexer is not None
    assert config.indexer.layers == (0, 1, 4, config.n_layers)
    assert [each.value_size for each in config.uneven_heads(range(3))] == [128, 128, 0]
    for wrong in ("SFFFFFF", "FFF", "FFSSFSX"):
        with pytest.raises(CheckpointError, match="indexer_types"):
            parse_config(raw | {"index_topk_pattern": wrong}, "config.json")


GLM5_NEXT = SIZES | {"model_type": "glm5_next_text", "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"linear_lower_bound": None, "swiglu_limit": 7.0, "hc_mult": 3, "index_topk": 64},
        {"linear_attn_config": {"head_dim": 64, "num_heads": 3, "gate_lower_bound": -4.0}},
        {"linear_attn_config": {"short_conv_kernel_size": 3, "gate_lower_bound": None}},
        {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}},
        {"index_topk_pattern": "SSSFSSF", "layer_types": None, "head_dim": 0},
    ],
)
def test_glm_flash_reads_its_own_keys_as_transformers_does(said: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(**GLM5_NEXT | said)
    ours = parse_config(GLM5_NEXT | said, "config.json")
    kinds = [n for n, kind in enumerate(theirs.layer_types) if kind == "linear_attention"]
    assert ours.delta_net == DeltaNet(
        n_key_heads=theirs.linear_num_heads,
        n_value_heads=theirs.linear_num_heads,
        key_size=theirs.linear_head_dim,
        value_size=theirs.linear_head_dim,
        n_taps=theirs.linear_conv_kernel_dim,
        layers=tuple(kinds),
        has_key_decays=True,
        decay_floor=theirs.linear_lower_bound or 0.0,
    )
    assert ours.indexer is not None
    assert (ours.indexer.n_chosen, ours.indexer.n_pooled) == (theirs.index_topk, theirs.index_kpool)
    sizes = (theirs.index_n_heads, theirs.index_head_dim)
    assert (ours.indexer.n_heads, ours.indexer.head_size) == sizes
    full = [n for n, kind in enumerate(theirs.indexer_types) if kind == "full" and n not in kinds]
    assert ours.indexer.layers == (*full, theirs.num_hidden_layers)  # the last one is MTP's
    assert ours.mlp_limit == theirs.swiglu_limit
    assert ours.experts is not None
    assert ours.experts.swiglu_limit == theirs.swiglu_limit
    assert ours.streams is not None
    assert (ours.streams.count, ours.streams.eps) == (theirs.hc_mult, theirs.hc_eps)
    assert ours.streams.n_rounds == theirs.hc_sinkhorn_iters
    assert not ours.streams.has_head


def test_layers_of_glm_flash_that_are_measured_choose_as_before() -> None:
    thin = parse_config(GLM5_NEXT | {"num_hidden_layers": 16}, "config.json").thinned(4)
    assert thin.delta_net is not None  # of layers 2, 6, 10, 14
    assert (thin.delta_net.layers, thin.uneven_heads(range(4))) == ((0, 1, 2, 3), ())
    kinds = ["indexed_attention", *["linear_attention"] * 2, "indexed_attention"] * 2
    said = {"num_hidden_layers": 8, "layer_types": kinds}
    thin = parse_config(GLM5_NEXT | said, "config.json").thinned(4)  # layers 1, 3, 5, 7
    assert thin.indexer is not None
    assert thin.indexer.layers == (1, 3, 4)


def test_glm_flash_has_a_config_of_its_own_inside_or_none() -> None:
    """Its makers' own files of the language model alone say everything outside."""
    outer = {"model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"]}
    outer |= {"vision_config": {"depth": 1}, "image_token_id": 5}
    inside = parse_config(outer | {"text_config": GLM5_NEXT}, "config.json")
    flat = {key: GLM5_NEXT[key] for key in GLM5_NEXT if key != "model_type"}
    assert parse_config(flat | outer, "config.json") == inside
    assert (inside.family, inside.wrapper) == ("glm5_next_text", "glm5_next")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64 is not supported"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False"),
        ({"index_topk_pattern": "FFFSFFF"}, "shared in layer 3"),
        ({"index_kpool": 3}, "index_topk 2048 is no multiple of index_kpool 3"),
        ({"q_lora_rank": None}, "q_lora_rank = None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"some_gate": True}, "some_gate = True is not known"),
    ],
)
def test_what_glm_flash_does_not_compute_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        parse_config(GLM5_NEXT | said, "config.json")


def test_kinds_of_layers_may_have_no_positions() -> None:
    raw = SIZES | {"model_type": "cohere_compass_text"}
    kinds = ["full_attention", *["sliding_attention"] * 6]
    turned = {"rope_type": "default", "rope_theta": 5e4}
    config = parse(raw, layer_types=kinds, rope_parameters={"sliding_attention": turned})
    assert config.local_rope == Rope(theta=5e4)
    assert (config.nope_layers, config.windows[:2]) == ((0,), (None, 4096))
    both = {"full_attention": turned | {"mrope_section": [4, 2, 2]}, "sliding_attention": None}
    config = parse(raw, layer_types=kinds, rope_parameters=both, logit_scale=0.25)
    assert config.rope is not None
    assert (config.rope.theta, config.nope_layers) == (5e4, (1, 2, 3, 4, 5, 6))
    assert config.logit_divisor == 4.0


def test_granite_with_windows_says_the_base_of_each_layer() -> None:
    """Where layers of one kind differ in it, transformers' modules compute the model."""
    plain = SIZES | {"model_type": "granite_swa"}
    config = parse(plain, layer_rope_theta=[0, 1e4, 0, 1e4, 5e5, 1e4, 1e4])
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (5e5, 1e4)
    assert config.nope_layers == (0, 2)
    assert parse(plain, layer_rope_theta=[0] * 7).nope_layers == tuple(range(7))
    assert parse(plain, layer_rope_theta=[1e4, *[2e4, 3e4] * 3]).outline is not None
    for wrong in ([1e4], [-1.0] * 7, ["1e4"] * 7, [True] * 7):
        with pytest.raises(CheckpointError, match=r"layer_rope_theta is .*, expected 7 of 0 or 1 "):
            parse(plain, layer_rope_theta=wrong)


def test_llama4() -> None:
    """As Scout is published: layers that turn heads attend in chunks."""
    config = parse(LLAMA4)
    assert config.experts is not None
    assert config.experts.layers == tuple(range(7))
    assert (config.intermediate_size, config.experts.intermediate_size) == (16384, 100)
    assert (config.nope_layers, config.has_unit_heads) == ((3,), True)
    assert config.temperature == Temperature(scale=0.1, floor=8192, shift=1)
    assert config.max_positions == 10485760
    assert (config.has_chunks, config.windows[:5]) == (True, (8192, 8192, 8192, None, 8192))
    assert parse(LLAMA4, attention_chunk_size=None).windows == (None,) * 7
    kinds = ["chunked_attention", "full_attention"] * 3 + ["full_attention"]
    listed = parse(LLAMA4, layer_types=kinds, attention_chunk_size=16)
    assert listed.windows == (16, None, 16, None, 16, None, None)
    untuned = parse(LLAMA4, attn_temperature_tuning=False, no_rope_layers=[1, 0] * 3 + [1])
    assert (untuned.temperature, untuned.nope_layers) == (None, (1, 3, 5))
    assert config.thinned(2).nope_layers == ()
    assert untuned.thinned(2).nope_layers == (0, 1)
    assert parse(LLAMA4, interleave_moe_layer_step=2).sparse_layers == (1, 3, 5)
    assert parse(LLAMA4, moe_layers=[5, 2]).sparse_layers == (2, 5)
    assert parse(LLAMA4, num_local_experts=0, num_experts_per_tok=0).experts is None


@pytest.mark.parametrize(
    "change",
    [
        {"no_rope_layers": [1, 0]},
        {"no_rope_layers": [[]] * 7},
        {"moe_layers": [7]},
        {"moe_layers": ["0"]},
        {"layer_types": ["full_attention"]},
        {"attention_chunk_size": -1},
    ],
)
def test_damage_of_llama4(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        parse(LLAMA4, **change)


def test_which_layers_of_qwen3_moe_have_experts() -> None:
    assert parse(QWEN3_MOE, decoder_sparse_step=3).sparse_layers == (2, 5)
    assert parse(QWEN3_MOE, mlp_only_layers=[0, 3]).sparse_layers == (1, 2, 4, 5, 6)
    assert parse(QWEN3_MOE, mlp_only_layers=[1], decoder_sparse_step=2).sparse_layers == (3, 5)
    assert parse(QWEN3_MOE, decoder_sparse_step=8).experts is None


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mixtral", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("mixtral", {"shared_expert_intermediate_size": 9}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"n_group": 2}, "n_group"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"head_dim": 128}, "head_dim"),
        ("mistral", {"architectures": ["MistralForSequenceClassification"]}, "architectures"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["full_attention"] * 7}, "layer_types"),
        ("mistral", {"model_type": "voxtral"}, "voxtral"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3", {"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("hunyuan_v1_moe", {"moe_topk": [[1]]}, "moe_topk"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("phi3", {"rope_scaling": PHI4_MINI["rope_scaling"] | {"long_mscale": 1.1}}, "long_mscale"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "mish"}, "mish"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
        ("gemma3_text", {"model_type": "gemma3x"}, "'gemma3x'.*gemma3_text"),
        (
            "gemma3_text",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "Gemma3ForConditionalGeneration",
        ),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(
    family: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as error:
        parse_config(RAW[family] | change, "/models/x/config.json")
    assert str(error.value).startswith("/models/x/config.json: ")
    assert "\n" not in str(error.value)


YARN = {"type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, expected 1 to 32767"),
        ("mixtral", {"num_local_experts": 40_000}, "num_local_experts is 40000"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, there are 8 experts"),
        ("mixtral", {"num_experts": 4}, "num_local_experts and num_experts disagree"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_tok and experts_per_token disagree"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("deepseek_v3", {"n_group": 7}, "n_group 7 and topk_group 4 do not go with 256 experts"),
        ("deepseek_v3", {"n_group": 256}, "n_group 256 and topk_group 4 do not go"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group 9 do not go"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window is 0, expected 1 or more",
        ),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers is .True"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'"),
        ("mistral", {"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 7"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 7}, "there is no sliding_window"),
        ("qwen2", {"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ("qwen2", {"rope_scaling": YARN | {"factor": 1e300}}, "rope_scaling.factor is 1e"),
        ("qwen2", {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta is 1"),
        ("qwen2", {"rope_scaling": YARN | {"factor": 10**400}}, "rope_scaling.factor is 1"),
        ("qwen3", {"head_dim": 7}, "head_dim 7 is odd"),
        ("phi3", {"partial_rotary_factor": 0.7}, "leaves 11 columns"),
        ("phi3", {"partial_rotary_factor": 2.0}, "leaves 32 columns"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor is missing"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}},
            "short_factor has 1 numbers, expected 6",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1, 1, "x"]}},
            "short_factor holds 'x'",
        ),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma3_text", {"rope_local_base_freq": "x"}, "rope_local_base_freq is 'x'"),
    ],
)
def test_a_malformed_field_is_named(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config(RAW[family] | change, "config.json")


def test_a_thinned_model_has_layers_from_all_over() -> None:
    gemma = parse(GEMMA3, num_hidden_layers=12)
    assert gemma.thinned(12) == gemma
    assert gemma.thinned(1).windows == (512,)  # layer 6
    assert gemma.thinned(6).windows == (512, 512, None, 512, 512, None)  # 1, 3, 5, 7, 9, 11
    assert parse(QWEN3_MOE, mlp_only_layers=[0, 1, 2]).thinned(2).sparse_layers == (1,)  # 1, 5


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"rope_theta": [1e4, 1e5, 1e5, 1e4, 1e5, 1e5, 2e4]}, UnsupportedModelError, "rope_theta"),
        ({"rope_theta": [1e4] * 8}, CheckpointError, "rope_theta is .*expected 7 numbers"),
        ({"num_hidden_layers": 2**30}, CheckpointError, "num_hidden_layers is 1073741824"),
        ({"swiglu_limits": [7] * 6}, CheckpointError, "swiglu_limits is .*expected 7 numbers"),
        ({"swiglu_limits": [-7.0] * 7}, CheckpointError, "swiglu_limits is"),
        ({"num_sliding_attention_heads": 5}, CheckpointError, "5 heads"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, UnsupportedModelError, "per_layer_config"),
        ({"attention_other_setting": {"head_dim": 8}}, UnsupportedModelError, "setting.head_dim"),
        ({"gating": "elementwise"}, UnsupportedModelError, "gating"),
        ({"moe_router_activation": "softmax"}, UnsupportedModelError, "moe_router_activation"),
        ({"yarn_only_types": ["sliding_attention"]}, UnsupportedModelError, "yarn_only_types"),
    ],
)
def test_step_has_the_same_in_all_layers_of_a_kind(
    change: dict[str, Any], error: type[Exception], named: str
) -> None:
    kinds = ["full_attention", *["sliding_attention"] * 2] * 3
    raw = SIZES | {"model_type": "step3p5", "layer_types": kinds[:7], "sliding_window": 9}
    assert parse(raw, num_sliding_attention_heads=6).query_heads == (4, 6, 6, 4, 6, 6, 4)
    assert parse(raw, num_sliding_attention_heads=6).thinned(2).query_heads == (6, 6)
    with pytest.raises(error, match=named):
        parse(raw, **change)


def test_blocks_of_positions_are_chosen_as_the_config_says() -> None:
    raw = SIZES | {"model_type": "qwen4_exp_text", "layer_types": ["full_attention"] * 7} | QSA
    config = parse_config(raw, "config.json")
    assert config.indexer is not None
    assert (config.indexer.n_chosen, config.indexer.n_pooled) == (2048, 16)
    assert config.heads(0).value_size == config.head_size + 130  # 256 and 3 digits, on two heads
    assert config.streams is not None
    assert (config.streams.count, config.streams.rank) == (4, 320)
    with pytest.raises(CheckpointError, match="indexer_budget is no multiple"):
        parse_config(raw | {"indexer_budget": 2050}, "config.json")
    with pytest.raises(CheckpointError, match="indexer_n_heads is missing"):
        parse_config({key: raw[key] for key in raw if key != "indexer_n_heads"}, "config.json")
    with pytest.raises(UnsupportedModelError, match="output_gate_type"):
        parse_config(raw | {"output_gate_type": "gelu"}, "config.json")


def test_tables_of_ngrams_have_primes_of_rows_and_count_in_no_layer() -> None:
    raw = SIZES | {"model_type": "qwen4_exp_text", "eos_token_id": 3} | QSA
    raw |= {"ple_layer_ids": [3, 1], "ple_embed_dim": 32, "ngram_vocab_size_base": 1000}
    raw |= {"split_ngram_parts": 5}
    config = parse_config(raw, "config.json")
    assert config.ngrams is not None
    assert (config.ngrams.layers, config.ngrams.end_id) == ((0, 2), 3)
    assert head_rows(config.ngrams, 0)[:3] == (1009, 1013, 1019)
    assert head_rows(config.ngrams, 2)[0] > head_rows(config.ngrams, 0)[-1]
    tables = stage_tensors(config, LayerRange(0, 1)).looked_up
    assert sum(n for n, _ in tables.values()) == -(-sum(head_rows(config.ngrams, 0)) // 128) * 128
    assert not tables.keys() & layer_tensors(config, 0).keys()
    assert not stage_tensors(config, LayerRange(1, 2)).looked_up
    assert config.thinned(2).ngrams is not None
    with pytest.raises(CheckpointError, match=r"ple_layer_ids \[4\] are not all of layers"):
        parse_config(raw | {"ple_layer_ids": [4]}, "config.json")


def test_tables_of_deepseek_v41_are_refused_in_a_config_of_v4() -> None:
    older = SIZES | {"model_type": "deepseek_v4", "num_key_value_heads": 1}
    older |= {"engram_layer_ids": [1, 14]}
    with pytest.raises(UnsupportedModelError, match=r"engram_layer_ids = \[1, 14\] is not known"):
        parse_config(older, "config.json")
