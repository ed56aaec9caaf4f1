"""Indexes that name tensors which their files lack: refused only where the model needs these."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder, make_llama
from support.models.consolidated_checkpoints import own_tensors, to_mistral
from support.models.mtp_checkpoints import make_mtp
from support.models.quantized_cases import CASES
from support.models.quantized_checkpoints import quantized
from support.rings.stage_chain import StageChain, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError
from shardnet.types import LayerRange


def save_plain(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


Write = Callable[[Mapping[str, torch.Tensor], Path], object]
FORMS: dict[str, tuple[str, str, Write]] = {
    "safetensors": ("model.safetensors.index.json", "model-00001.safetensors", save_plain),
    "torch": ("pytorch_model.bin.index.json", "pytorch_model-00001.bin", torch.save),
    "own": ("consolidated.safetensors.index.json", "consolidated-00001.safetensors", save_plain),
}
"""The index, its one file, and what writes that."""
UP = "model.layers.1.mlp.up_proj.weight"
Make = Callable[[Path], Path]


def put_into_index(
    folder: Path, form: str, absent: str, tensors: Mapping[str, torch.Tensor] | None = None
) -> str:
    """Store what is in one file by an index that names `absent`, without it; return its file."""
    if tensors is None:
        tensors = load_file(folder / "model.safetensors")
    for single in folder.glob("*.safetensors"):
        single.unlink()
    index, file, write = FORMS[form]
    write({name: tensor for name, tensor in tensors.items() if name != absent}, folder / file)
    named = dict.fromkeys([absent, *tensors], file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return file


def tied(folder: Path, *, is_tied: bool = True) -> Path:
    return make_llama(folder, tie_word_embeddings=is_tied, num_hidden_layers=2)


def pictured(folder: Path, *, is_tied: bool = True) -> Path:
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    return make_decoder(folder, "gemma3", tie_word_embeddings=is_tied, **sizes)


def experts(folder: Path) -> Path:
    return make_decoder(folder, "mixtral", num_hidden_layers=2)


def by_modules(folder: Path) -> Path:
    return make_decoder(folder, "persimmon", num_hidden_layers=2)


def narrow(folder: Path, name: str = "gptq-4") -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    plain = make_llama(folder / "plain", num_hidden_layers=2, **sizes)
    case, made = CASES[name], folder / "made"
    quantized(plain, made, case.config, partial(case.write, np.random.default_rng(3)))
    return made


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize(
    ("make", "absent"),
    [
        (tied, "lm_head.weight"),
        (pictured, "language_model.lm_head.weight"),
        (pictured, "vision_tower.vision_model.head.probe"),
        (tied, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (tied, "of.no.model"),
        (partial(make_mtp, family="qwen3_5_text"), "mtp.fc.weight"),
        (partial(make_mtp, family="glm4_moe"), "model.layers.2.eh_proj.weight"),
    ],
)
def test_a_tensor_that_the_model_does_not_use_may_be_absent(
    tmp_path: Path, make: Make, absent: str, form: str
) -> None:
    folder, prompt = make(tmp_path), random_prompt(9, 300)
    stored = load_file(folder / "model.safetensors").keys() - {absent}
    (expected,) = StageChain.load(folder, [LayerRange(0, 2)]).generate([prompt], 4)
    put_into_index(folder, form, absent)
    assert Checkpoint.open(folder).stored.keys() == stored
    assert not Checkpoint.open(folder).has_mtp
    (found,) = StageChain.load(folder, [LayerRange(0, 2)]).generate([prompt], 4)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize(
    ("make", "absent"),
    [
        (tied, UP),
        (partial(tied, is_tied=False), "lm_head.weight"),
        (partial(pictured, is_tied=False), "language_model.lm_head.weight"),
        (pictured, "language_model.model.layers.1.mlp.up_proj.weight"),
        (experts, "model.layers.1.block_sparse_moe.experts.1.w1.weight"),
        (narrow, "model.layers.1.mlp.up_proj.scales"),
        (by_modules, "model.layers.1.mlp.dense_h_to_4h.weight"),
    ],
)
def test_an_absent_tensor_that_the_model_uses_is_named_with_its_file(
    tmp_path: Path, make: Make, absent: str, form: str
) -> None:
    folder = make(tmp_path)
    assert absent in load_file(folder / "model.safetensors")
    file = put_into_index(folder, form, absent)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    assert error.value.message == f"{folder / file}: tensor {absent} is missing"


@pytest.mark.parametrize(
    ("name", "part", "is_needed"),
    [
        ("gptq-order", ".g_idx", True),
        ("gptq-biases", ".bias", False),
        ("int4-order", ".weight_g_idx", True),
        ("int8-zeros", ".weight_scale", True),
        ("fp8-one", ".weight_scale", True),
        ("fp8-one", ".input_scale", False),
        ("nf4-nested", ".weight.nested_absmax", True),
        ("bnb-8", ".SCB", True),
        ("mlx-4", ".scales", True),
    ],
)
def test_a_part_of_a_quantised_weight_may_be_absent_where_no_value_hangs_on_it(
    name: str, part: str, is_needed: bool, tmp_path: Path
) -> None:
    """Some parts are optional: without the order of its inputs a weight is another one."""
    folder, absent = narrow(tmp_path, name), f"model.layers.1.mlp.up_proj{part}"
    assert absent in load_file(folder / "model.safetensors")
    file = put_into_index(folder, "safetensors", absent)
    if is_needed:
        with pytest.raises(CheckpointError, match=f"{file}: tensor {absent} is missing"):
            Checkpoint.open(folder)
    else:
        assert absent not in Checkpoint.open(folder).stored


def test_of_several_absent_tensors_the_one_that_is_used_is_named(tmp_path: Path) -> None:
    folder = tied(tmp_path)
    file = put_into_index(folder, "safetensors", UP)
    path = folder / FORMS["safetensors"][0]
    index = json.loads(path.read_text())
    unused = ("lm_head.weight", "mtp.fc.weight", UP.replace("weight", "a_scale"))
    index["weight_map"] = dict.fromkeys(unused, file) | index["weight_map"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{file}: tensor {UP} is missing"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("absent", "params", "is_used"),
    [
        ("output.weight", {"tied_embeddings": True}, False),
        ("vision_encoder.ln_pre.weight", {}, False),
        ("output.weight", {}, True),
        ("layers.1.feed_forward.w3.weight", {}, True),
        ("norm.weight", {}, True),
    ],
)
def test_the_same_of_consolidated_files(
    tmp_path: Path, absent: str, params: dict[str, bool], *, is_used: bool
) -> None:
    sizes = {"sliding_window": None, "head_dim": 8, "num_hidden_layers": 2}
    source = make_decoder(tmp_path / "source", "mistral", **sizes)
    folder = to_mistral(source, tmp_path / "own", **params)
    tensors = own_tensors(source)
    file = put_into_index(folder, "own", absent, tensors)
    if is_used:
        with pytest.raises(CheckpointError, match=f"{file}: tensor {absent} is missing"):
            Checkpoint.open(folder)
    else:
        assert Checkpoint.open(folder).stored.keys() == tensors.keys() - {absent}


@pytest.mark.parametrize(("part", "is_needed"), [("qscale_weight", True), ("qscale_act", False)])
def test_the_same_of_the_scales_of_consolidated_files(
    tmp_path: Path, part: str, *, is_needed: bool
) -> None:
    sizes = {"sliding_window": None, "head_dim": 8, "num_hidden_layers": 2}
    source = make_decoder(tmp_path / "source", "mistral", **sizes)
    folder = to_mistral(source, tmp_path / "own", narrow=True)
    tensors = load_file(folder / "consolidated.safetensors")
    absent = f"layers.1.feed_forward.w3.{part}"
    assert absent in tensors
    file = put_into_index(folder, "own", absent, tensors)
    if is_needed:
        with pytest.raises(CheckpointError, match=f"{file}: tensor {absent} is missing"):
            Checkpoint.open(folder)
    else:
        assert Checkpoint.open(folder).stored.keys() == tensors.keys() - {absent}
