"""Multimodal checkpoints: whose config is read, which tensors are the language model's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from support.oracles.oracle import load_reference
from transformers import CONFIG_MAPPING

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import read_tower
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.families.registry import FAMILIES, parse_config
from shardnet.model.families.stage_tensors import canonical_name, stage_tensors
from shardnet.model.families.wrappers import WRAPPERS
from shardnet.tokenizers.token_table import read_eos_ids
from shardnet.types import LayerRange

GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
QWEN25_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "eos_token_id": 151645,
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32},
    "vision_token_id": 151654,
    "vocab_size": 151936,
}
SIZES = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_local_experts", "vocab_size", "tie_word_embeddings"),
}
"""What every config has to say, or the file says."""

TOWERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen2_vl": (
        {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3}
        | {"hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2}
        | {"spatial_patch_size": 14, "temporal_patch_size": 2},
        (32, 1280, 5120, 16, 14, 2),
    ),
    "glm4v": (
        {"depth": 24, "hidden_size": 1536, "num_heads": 12, "attention_bias": False}
        | {"intermediate_size": 13696, "hidden_act": "silu", "hidden_dropout_prob": 0.0}
        | {"initializer_range": 0.02, "image_size": 336, "patch_size": 14}
        | {"out_hidden_size": 3584, "rms_norm_eps": 1e-05, "spatial_merge_size": 2}
        | {"temporal_patch_size": 2},
        (24, 1536, 13696, 12, 14, 2),
    ),
    "llama4": (
        {"attention_dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1408, "image_size": 336}
        | {"initializer_range": 0.02, "intermediate_size": 5632, "norm_eps": 1e-05}
        | {"model_type": "llama4_vision_model", "multi_modal_projector_bias": False}
        | {"num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 34}
        | {"patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_dropout": 0.0}
        | {"projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10000}
        | {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        | {"vision_output_dim": 4096},
        (34, 1408, 5632, 16, 14, 2),
    ),
}
"""The `vision_config` of published models, from memory, and the sizes that follow."""


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config(raw | changes, "CONFIG")


def test_every_wrapper_is_of_a_family() -> None:
    assert {wrapper.family for wrapper in WRAPPERS.values()} <= FAMILIES.keys()
    assert not WRAPPERS.keys() & FAMILIES.keys()


def test_what_a_published_config_leaves_out() -> None:
    config = parse(GEMMA3_4B)
    assert (config.family, config.wrapper) == ("gemma3_text", "gemma3")
    assert (config.vocab_size, config.n_heads, config.n_kv_heads) == (262208, 8, 4)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((1, 106), True)
    assert config.smallest_window == 1024
    inner = GEMMA3_4B["text_config"] | {"eos_token_id": 7, "num_attention_heads": 16}
    outer = {key: GEMMA3_4B[key] for key in GEMMA3_4B if key != "eos_token_id"}
    config = parse(outer, text_config=inner)
    assert (config.eos_token_ids, config.n_heads) == ((7,), 16)


@pytest.mark.parametrize(
    "model_type", ["gemma4_unified", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
)
def test_what_is_left_out_is_what_transformers_takes(model_type: str) -> None:
    """Where the language model's class has other defaults than that of the family alone."""
    whole = CONFIG_MAPPING[model_type]().to_dict()
    outer = {"model_type": model_type, "architectures": [WRAPPERS[model_type].architecture]}
    text = {**whole["text_config"], "eos_token_id": None, "bos_token_id": None}
    unknown: list[str] = []
    expected = parse_config(outer | {"text_config": text}, "CONFIG", unknown)
    for key in text.keys() - SIZES:
        less = {name: value for name, value in text.items() if name != key}
        assert parse_config(outer | {"text_config": less}, "CONFIG", unknown) == expected, key


def test_ids_of_pictures_within_the_text_config() -> None:
    """As a config whose keys were all at the top is saved again."""
    ids = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_token_id": 151654}
    text = {key: QWEN25_VL[key] for key in QWEN25_VL.keys() - {"vision_config", "architectures"}}
    again = QWEN25_VL | {"text_config": text | ids | {"model_type": "qwen2_5_vl_text"}}
    assert parse(again) == parse(QWEN25_VL)


def test_a_config_without_a_text_config() -> None:
    """Qwen-VL's on the Hub; later programs wrote the same keys inside, or at both places."""
    config = parse(QWEN25_VL)
    axes = (0,) * 16 + (1,) * 24 + (2,) * 24
    rope = Rope(theta=1e6, original_max_positions=8192, axes=axes)
    assert (config.family, config.rope) == ("qwen2", rope)
    outer_keys = ("architectures", "model_type", "vision_config", "torch_dtype")
    outer = {key: QWEN25_VL[key] for key in outer_keys}
    inner = {key: QWEN25_VL[key] for key in QWEN25_VL if key not in outer_keys}
    inner["model_type"] = "qwen2_5_vl_text"
    del inner["image_token_id"], inner["vision_token_id"]
    assert parse(outer, text_config=inner) == config
    assert parse(QWEN25_VL, text_config=inner) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "architectures"),
        ({"text_config": {"model_type": "mistral"}}, r"text_config\.model_type = 'mistral'"),
        ({"smell_config": {"depth": 3}}, "smell_config"),
        ({"text_config": GEMMA3_4B["text_config"] | {"logit_scale": 0.1}}, "logit_scale"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse(GEMMA3_4B, **change)


def test_damage() -> None:
    with pytest.raises(CheckpointError, match="text_config is 7, expected dict"):
        parse(GEMMA3_4B, text_config=7)


@pytest.mark.parametrize(
    ("stored", "inner"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.encoder.layers.0.mlp.fc1.bias", None),
        ("vision_tower.vision_model.post_layernorm.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.visual.merger.mlp.0.bias", None),
        ("audio_tower.conv1.weight", None),
        ("smell_tower.conv1.weight", "smell_tower.conv1.weight"),
    ],
)
def test_names_of_tensors(stored: str, inner: str | None) -> None:
    assert canonical_name(parse(GEMMA3_4B), stored) == inner


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe"])
def test_both_ways_of_saving_have_the_same_parameters(family: str, tmp_path: Path) -> None:
    """As on the Hub and as transformers 5 names them; nothing else is a parameter."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    own = {"rope_parameters": rope} if family == "qwen2_5_vl" else {}
    hub = make_decoder(tmp_path / "hub", family, num_hidden_layers=2, head_dim=8, **own)
    model = load_reference(hub)
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    if family == "qwen3_vl_moe":  # its experts are turned on the Hub
        for name, values in model.named_parameters():
            if ".mlp.experts." in name:
                values.data = values.data.transpose(1, 2).contiguous()
        model.save_pretrained(hub, save_original_format=False)
    one, other = Checkpoint.open(hub), Checkpoint.open(tmp_path / "new")
    assert one.tensors.keys() == other.tensors.keys()
    assert one.tensors.keys() == stage_tensors(one.config, LayerRange(0, 2)).all.keys()
    for name in one.tensors:
        assert one.read(name).equal(other.read(name)), name


def test_whether_the_head_is_tied_is_what_the_file_says(tmp_path: Path) -> None:
    make_decoder(tmp_path, "mistral3", num_hidden_layers=1, tie_word_embeddings=False)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": True}
    path.write_text(json.dumps(config))
    assert "lm_head.weight" in stage_tensors(Checkpoint.open(tmp_path).config, LayerRange(0, 1)).all


def test_eos_of_the_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3, 4]}}))
    assert read_eos_ids(tmp_path) == (3, 4)
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": [3, 4]}})
    )
    assert read_eos_ids(tmp_path) == (5,)


@pytest.mark.parametrize("kind", TOWERS)
def test_towers_of_published_configs(kind: str) -> None:
    own, sizes = TOWERS[kind]
    tower, text = WRAPPERS[kind].vision, replace(parse(QWEN25_VL), hidden_size=3584)
    assert tower is not None
    made = read_tower(tower, {"vision_config": own, "image_token_id": 7}, "config.json", text)
    found = (made.n_layers, made.hidden_size, made.intermediate_size, made.n_heads)
    assert (*found, made.patch, made.merge) == sizes
    with pytest.raises(UnsupportedModelError, match=r"vision_config\.spikes"):
        read_tower(tower, {"vision_config": own | {"spikes": 3}, "image_token_id": 7}, "", text)
