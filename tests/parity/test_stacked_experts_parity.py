"""Checkpoints that transformers saves as it computes: all experts of a layer in one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import VOCAB_SIZE, make_decoder
from support.oracles.oracle import check_generation, load_reference
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError


def save_stacked(source: Path, family: str, folder: Path) -> Path:
    """Let transformers write `source` anew in its own form; return `folder`."""
    load_reference(source).save_pretrained(folder, save_original_format=False)
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names, family
    return folder


@pytest.mark.parametrize(
    "family",
    cases(
        ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "qwen3_5_moe_text"], ["deepseek_v3"]
    ),
)
def test_stacked_experts_run_as_those_of_their_own(family: str, tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "source", family, with_tokenizer=False, num_hidden_layers=4)
    folder = save_stacked(source, family, tmp_path / "stacked")
    chain = StageChain.load(folder, even_split(4, 2))
    prompts = [random_prompt(40, VOCAB_SIZE, seed=3), random_prompt(5, VOCAB_SIZE, seed=4)]
    check_generation(chain, load_reference(source), prompts, 8)
    one, other = Checkpoint.open(folder), Checkpoint.open(source)
    assert one.tensors.keys() == other.tensors.keys()
    for name in other.tensors:
        assert torch.equal(one.read(name), other.read(name))


@pytest.mark.parametrize("cut", ["rows", "experts"])
def test_a_stack_of_another_shape_has_no_place(cut: str, tmp_path: Path) -> None:
    source = make_decoder(tmp_path / "source", "mixtral", with_tokenizer=False)
    folder = save_stacked(source, "mixtral", tmp_path / "stacked")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = (tensors[name][:, :0] if cut == "rows" else tensors[name][:3]).clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.\S*experts\.0\.w2\.weight is missing"):
        StageChain.load(folder, even_split(4, 1))
