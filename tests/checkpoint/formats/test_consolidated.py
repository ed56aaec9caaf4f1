"""Meta's and Mistral's own layout: tensors, published configs, and every damage named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder, make_llama
from support.models.consolidated_checkpoints import own_tensors, to_meta, to_mistral
from support.rings.stage_chain import StageChain

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.consolidated import config_of_params
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.model.families.registry import parse_config
from shardnet.types import DType, LayerRange

META_LLAMA_3_1_8B = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
}
META_LLAMA_3_2_1B = META_LLAMA_3_1_8B | {
    "dim": 2048,
    "n_layers": 16,
    "ffn_dim_multiplier": 1.5,
    "multiple_of": 256,
}
META_LLAMA_2_7B = {
    "dim": 4096,
    "multiple_of": 256,
    "n_heads": 32,
    "n_layers": 32,
    "norm_eps": 1e-05,
    "vocab_size": -1,
}
MISTRAL_7B = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_llama(folder, with_tokenizer=False, num_hidden_layers=2, intermediate_size=128)


def published(params: dict[str, Any]) -> Any:
    config = config_of_params(params, vocab_size=32000, is_tied=False, dtype="bfloat16", where="p")
    return parse_config(config, "p")


@pytest.mark.parametrize(
    ("params", "inner", "positions", "factor"),
    [
        (META_LLAMA_3_1_8B, 14336, 131072, 8.0),
        (META_LLAMA_3_2_1B, 8192, 131072, 32.0),
        (META_LLAMA_2_7B, 11008, 4096, 1.0),
        (MISTRAL_7B, 14336, 32768, 1.0),
    ],
    ids=["Llama 3.1", "Llama 3.2", "Llama 2", "Mistral"],
)
def test_published_params(
    params: dict[str, Any], inner: int, positions: int, factor: float
) -> None:
    config = published(params)
    assert (config.intermediate_size, config.max_positions) == (inner, positions)
    assert config.rope.factor == factor
    assert config.window(3) == params.get("sliding_window")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe": {"num_experts": 8}}, "moe.num_experts_per_tok is missing"),
        (
            {"moe": {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}},
            "moe.num_shared_experts = 1 is not known to shardnet",
        ),
        (
            {"quantization": {"qformat_weight": "nvfp4"}},
            "quantization.qformat_weight = 'nvfp4' is not supported; supported: fp8_e4m3",
        ),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3", "config_groups": {"a": 1}}},
            "quantization.config_groups = .* is not known",
        ),
        ({"n_layers": None}, "n_layers is missing"),
        ({"hidden_dim": "wide"}, "hidden_dim is 'wide', expected int"),
        ({"n_kv_heads": 5}, "num_attention_heads 32 is no multiple"),
        ({"sliding_window": [4096, None]}, "sliding_window is .* expected int"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardnetError, match="^p: " + message):
        published(MISTRAL_7B | change)


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize("cut_embedding_columns", [True, False])
def test_parts_are_joined(
    llama: Path, tmp_path: Path, n_parts: int, cut_embedding_columns: bool
) -> None:
    folder = to_meta(llama, tmp_path / "own", n_parts, cut_embedding_columns=cut_embedding_columns)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.checkpoint_dtype is DType.FLOAT32
    kept = load_file(llama / "model.safetensors")
    assert checkpoint.tensors.keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(checkpoint.read(name), tensor), name


def test_opening_imports_no_torch(llama: Path, tmp_path: Path) -> None:
    folder = to_meta(llama, tmp_path / "own", 2, cut_embedding_columns=True)
    code = (
        "import sys; from shardnet.checkpoint.checkpoint import Checkpoint;"
        f"Checkpoint.open({str(folder)!r}).model_id; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_index_names_the_files(tmp_path: Path) -> None:
    source = make_decoder(
        tmp_path / "source", "mistral", sliding_window=None, head_dim=8, num_hidden_layers=2
    )
    folder = to_mistral(source, tmp_path / "own")
    (folder / "consolidated.safetensors").unlink()
    tensors = own_tensors(source)
    names, index = list(tensors), {}
    for number in range(2):
        file = f"consolidated-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[number::2]}, folder / file)
        index |= dict.fromkeys(names[number::2], file)
    where = folder / "consolidated.safetensors.index.json"
    where.write_text(json.dumps({"weight_map": index}))
    checkpoint = Checkpoint.open(folder)
    for name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert where.name in {head.name for head in checkpoint.skeleton()}


def test_the_hugging_face_form_goes_first(llama: Path, tmp_path: Path) -> None:
    folder = to_meta(llama, tmp_path / "own", 1, cut_embedding_columns=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((llama / name).read_bytes())
    checkpoint = Checkpoint.open(folder)
    assert {head.name for head in checkpoint.skeleton()} == {"config.json", "model.safetensors"}


def save_other(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "consolidated.01.pth"
    tensors = torch.load(path, weights_only=True) | changes
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "params is no json": (lambda f: (f / "params.json").write_text("{"), "params.json: not read"),
    "a part is missing": (
        lambda f: (f / "consolidated.01.pth").rename(f / "consolidated.02.pth"),
        "consolidated.01.pth: this part is missing",
    ),
    "the last part is missing": (
        lambda f: (f / "consolidated.01.pth").unlink(),
        "consolidated.00.pth: tensor .* has shape",
    ),
    "a part is truncated": (
        lambda f: (f / "consolidated.01.pth").write_bytes(b"PK\3\4"),
        "consolidated.01.pth: damaged zip archive",
    ),
    "parts are unlike": (
        lambda f: save_other(f, **{"layers.1.attention.wo.weight": torch.zeros(48, 25)}),
        "consolidated.00.pth: tensor consolidated.00/layers.1.attention.wo.weight has shape",
    ),
    "a part has other types": (
        lambda f: save_other(f, **{"layers.1.attention.wo.weight": torch.zeros(48, 24).half()}),
        "consolidated.00/layers.1.attention.wo.weight has shape",
    ),
    "a tensor that has no place": (
        lambda f: save_other(f, **{"layers.1.attention.gate.weight": torch.zeros(3)}),
        "tensor consolidated.01/layers.1.attention.gate.weight .1 such. has no place",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_damage_is_named(llama: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    folder = to_meta(llama, tmp_path / "own", 2, cut_embedding_columns=False)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        StageChain.load(folder, [LayerRange(0, 2)])
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
