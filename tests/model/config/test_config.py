from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_gpt2, make_llama
from transformers import GPT2Config, LlamaConfig

from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import Activation, Rope, RopeKind
from shardnet.model.families.registry import parse_config
from shardnet.types import DType

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 100,
    "vocab_size": 99,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama_defaults_are_those_of_transformers() -> None:
    config = parse_config(LLAMA, "config.json")
    theirs = LlamaConfig(**LLAMA)
    assert config.family == "llama"
    assert config.n_kv_heads == theirs.num_key_value_heads == 4
    assert config.head_size == theirs.head_dim == 16
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.max_positions == theirs.max_position_embeddings
    assert config.rope == Rope(theta=theirs.rope_parameters["rope_theta"])
    assert (config.attention_bias, config.mlp_bias) == (False, False)
    assert config.activation is Activation.SILU
    assert config.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert config.checkpoint_dtype is None
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("name", "layers", "heads", "width"),
    [
        ("gpt2", 12, 12, 768),
        ("medium", 24, 16, 1024),
        ("large", 36, 20, 1280),
        ("xl", 48, 25, 1600),
    ],
)
def test_the_four_sizes_of_gpt2(name: str, layers: int, heads: int, width: int) -> None:
    """The fields of the published config.json of each size."""
    raw = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "n_special": 0,
        "predict_special_tokens": True,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    config = parse_config(raw, "config.json")
    assert (config.n_layers, config.n_heads, config.hidden_size) == (layers, heads, width)
    assert (config.head_size, config.intermediate_size) == (64, 4 * width)
    assert config.tie_word_embeddings
    assert config.activation is Activation.GELU_NEW
    assert config.eos_token_ids == (50256,)
    assert config.rope is None


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 3.2": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 16,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rope_scaling": LLAMA3 | {"factor": 32.0, "rope_type": "llama3"},
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
    },
    "smollm2": {
        "is_llama_config": True,
        "pad_token_id": 2,
        "rope_interleaved": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"fp16": "float16"}},
    },
    "llama 1": {"max_sequence_length": 2048, "pad_token_id": -1, "torch_dtype": "float16"},
}


READ: dict[str, dict[str, Any]] = {
    "llama 3.2": {
        "head_size": 16,
        "n_kv_heads": 2,
        "max_positions": 131072,
        "eos_token_ids": (128001, 128008, 128009),
        "checkpoint_dtype": DType.BFLOAT16,
        "rope": Rope(
            kind=RopeKind.LLAMA3,
            theta=500000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=64,
        ),
    },
    "smollm2": {"tie_word_embeddings": True},
    "llama 1": {"checkpoint_dtype": DType.FLOAT16},
}
"""What differs from the config without these keys; what else is published changes nothing."""


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_llama_configs_are_read(name: str) -> None:
    config = parse_config(LLAMA | PUBLISHED[name], "config.json")
    assert config == replace(parse_config(LLAMA, "config.json"), **READ[name])


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """Every key that transformers' own classes put into config.json is known."""
    for make in (make_llama, make_gpt2):
        folder = make(tmp_path / make.__name__, with_tokenizer=False)
        raw = json.loads((folder / "config.json").read_text())
        config = parse_config(raw, "config.json")
        assert config.checkpoint_dtype is DType.FLOAT32
    for full in (LlamaConfig(), GPT2Config()):
        raw = full.to_dict() | {"architectures": None}
        assert parse_config(raw, "config.json").n_layers == full.num_hidden_layers


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_llama3_rope_in_both_spellings(raw: dict[str, Any]) -> None:
    expected = Rope(
        kind=RopeKind.LLAMA3,
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=64,
    )
    assert parse_config(LLAMA | raw, "config.json").rope == expected


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_rope(key: str) -> None:
    rope = parse_config(LLAMA | {"rope_scaling": {key: "linear", "factor": 2}}, "c").rope
    assert rope == Rope(kind=RopeKind.LINEAR, factor=2.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "alexnet", "architectures": ["AlexNet"]}, "alexnet"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "swiglu_oai"}, "swiglu_oai"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "axial"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 0.7}}, "rope_scaling.mscale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"logit_scale": 0.1}, "logit_scale"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as error:
        parse_config(LLAMA | change, "/models/x/config.json")
    assert str(error.value).startswith("/models/x/config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"add_cross_attention": True},
        {"activation_function": "mish"},
    ],
)
def test_gpt2_variants_are_refused(change: dict[str, Any]) -> None:
    raw = GPT2Config().to_dict() | {"architectures": ["GPT2LMHeadModel"]} | change
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        parse_config(raw, "config.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected int"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "hidden size 66 is no multiple of 4 heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"model_type": None}, "model_type is missing"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "disagree",
        ),
    ],
)
def test_a_malformed_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config(LLAMA | change, "config.json")


def test_an_unknown_key_that_is_switched_off_is_let_be() -> None:
    off = {"new_feature": False, "other_feature": None, "layer_list": [], "sliding_window": None}
    assert parse_config(LLAMA | off, "config.json") == parse_config(LLAMA, "config.json")


def test_eos_as_one_id_or_several() -> None:
    assert parse_config(LLAMA | {"eos_token_id": 7}, "c").eos_token_ids == (7,)
    assert parse_config(LLAMA | {"eos_token_id": [7, 9]}, "c").eos_token_ids == (7, 9)


def test_default_context_is_bounded() -> None:
    assert parse_config(LLAMA | {"max_position_embeddings": 131072}, "c").default_context == 8192
    assert parse_config(LLAMA | {"max_position_embeddings": 512}, "c").default_context == 512
