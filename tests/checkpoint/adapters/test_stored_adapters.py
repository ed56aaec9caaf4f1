"""What of an adapter's files is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.adapters import as_gguf, deltas, make_peft
from support.models.checkpoints import make_llama

from shardnet.checkpoint.adapters.layer_files import layer_file, open_adapter, read_layer_file
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import ModelConfig


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def config(base: Path) -> ModelConfig:
    return Checkpoint.open(base).config


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"o_proj": 3}},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "inference_mode": True},
    ],
)
def test_each_layer_has_its_own_file(
    settings: dict[str, Any], base: Path, config: ModelConfig, tmp_path: Path
) -> None:
    path = make_peft(tmp_path / "adapter", base, ranks={"up_proj": 6}, **settings)
    adapter, expected = open_adapter(path, config), deltas(path)
    for layer in range(config.n_layers):
        file = tmp_path / "file"
        content, n_weights = layer_file(adapter.read(layer))
        file.write_bytes(content)
        read = read_layer_file(file)
        assert n_weights == sum(one.a.numel() + one.b.numel() for one in read.values())
        for name, one in read.items():
            wanted = expected.pop(f"model.layers.{layer}.{name}.weight")
            torch.testing.assert_close(one.factor * (one.b @ one.a), wanted)
    assert not expected


def test_patterns_name_linears_as_the_file_does(
    base: Path, config: ModelConfig, tmp_path: Path
) -> None:
    """Trained inside a multimodal model, layers stand below its language model."""
    named = "model.language_model.layers.0.self_attn.q_proj"
    path = make_peft(tmp_path / "adapter", base, targets=["q_proj"], alpha_pattern={named: 32})
    file = path / "adapter_model.safetensors"
    inner = {
        k.replace("model.layers", "model.language_model.layers"): v
        for k, v in load_file(file).items()
    }
    save_file(inner, file)
    adapter = open_adapter(path, config)
    factors = [adapter.pairs[layer]["self_attn.q_proj"].factor for layer in range(2)]
    assert factors == [8.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"peft_type": "IA3"}, "not LORA"),
        ({"use_something_new": True}, "use_something_new is not known"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "the pattern"),
        ({"r": 5}, "have rank 4"),
        ({"lora_alpha": "2"}, "not a number"),
        ({"lora_alpha": 1e9}, "is scaled by"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, Any], said: str, base: Path, config: ModelConfig, tmp_path: Path
) -> None:
    path = make_peft(tmp_path / "adapter", base, **settings)
    with pytest.raises(CheckpointError, match=said.replace("(", r"\(")):
        open_adapter(path, config)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 300), "only the linears"),
        ("lm_head.lora_A.weight", (4, 48), "only the linears"),
        ("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", (4, 48), "only the linears"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (48,), "only the linears"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 47), "do not fit"),
        ("model.layers.0.self_attn.qkv_proj.lora_A.weight", (4, 48), "only one of A and B"),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", (4, 48), "only one of A and B"),
    ],
)
def test_tensors_that_are_refused(
    name: str, shape: tuple[int, ...], said: str, base: Path, config: ModelConfig, tmp_path: Path
) -> None:
    path = make_peft(tmp_path / "adapter", base)
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": torch.zeros(shape)}, file)
    with pytest.raises(CheckpointError, match=said):
        open_adapter(path, config)


def test_an_adapter_of_another_model_is_refused(
    base: Path, config: ModelConfig, tmp_path: Path
) -> None:
    deeper = make_llama(tmp_path / "deeper", num_hidden_layers=5)
    wider = make_llama(tmp_path / "wider", hidden_size=96)
    for other, said in ((deeper, "is of layer 4"), (wider, "do not fit")):
        path = make_peft(tmp_path / f"of-{other.name}", other)
        with pytest.raises(CheckpointError, match=said):
            open_adapter(path, config)
    high = make_peft(tmp_path / "high", base, rank=513, targets=["q_proj"])
    with pytest.raises(UnsupportedModelError, match="at most 512"):
        open_adapter(high, config)


def test_ggufs_that_are_refused(base: Path, config: ModelConfig, tmp_path: Path) -> None:
    adapter = make_peft(tmp_path / "adapter", base)
    for settings, said in (
        ({"general.type": "model"}, "no LoRA adapter"),
        ({"adapter.alora.invocation_tokens": "1"}, "not known here"),
        ({"general.architecture": "qwen2"}, "is for 'qwen2' models"),
    ):
        path = as_gguf(adapter, base, tmp_path / "adapter.gguf", **settings)
        with pytest.raises(CheckpointError, match=said):
            open_adapter(path, config)
    with pytest.raises(CheckpointError, match="no LoRA adapter at"):
        open_adapter(base, config)


def test_a_file_cut_short_is_refused(base: Path, config: ModelConfig, tmp_path: Path) -> None:
    path = make_peft(tmp_path / "adapter", base)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_adapter(path, config)
    (path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError):
        open_adapter(path, config)
