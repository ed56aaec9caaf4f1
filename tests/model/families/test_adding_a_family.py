"""A family that the package does not know, added by this file alone: InternLM3.

It is Llama with heads of 128, and biases in all linears or none.
docs/adding-a-model.md shows what is done here with a family of the package.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.oracles.oracle import check_generation, load_reference
from support.rings.stage_chain import CPU, StageChain, even_split, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import UnsupportedModelError
from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import Family
from shardnet.model.families.layout import record
from shardnet.model.families.registry import FAMILIES
from shardnet.types import DType, LayerRange

ROOT = Path(__file__).parents[3]


def read_config(fields: Fields) -> ModelConfig:
    fields.require("qkv_bias", False)  # older names, which its published config has
    fields.require("bias", False)
    return read_decoder(
        fields,
        n_kv_heads=2,
        max_positions=32768,
        norm_eps=1e-5,
        head_size=128,
        attention_bias=False,
        mlp_bias=False,
    )


INTERNLM3 = record("internlm3", "LlamaForCausalLM", read_config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    biases = {"attention_bias": True, "mlp_bias": True}
    return make_decoder(tmp_path, "internlm3", head_dim=12, num_hidden_layers=3, **biases)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    families = cast("dict[str, Family]", FAMILIES)
    monkeypatch.setitem(families, INTERNLM3.model_type, INTERNLM3)


def test_without_it_transformers_modules_would_compute_the_family(folder: Path) -> None:
    outline = Checkpoint.open(folder).config.outline
    assert outline is not None
    assert outline.model_type == "internlm3"


@pytest.mark.usefixtures("added")
def test_its_tokens_and_logits_are_those_of_transformers(folder: Path) -> None:
    reference = load_reference(folder)
    prompts = [random_prompt(length, 300, seed=length) for length in (1, 19, 270)]
    check_generation(StageChain.load(folder, [LayerRange(0, 3)]), reference, prompts, 12)


@pytest.mark.usefixtures("added")
def test_its_splits_give_the_same_bits(folder: Path) -> None:
    prompts = [random_prompt(length, 300, seed=length) for length in (7, 40)]
    choice = replace(probed(CPU, DType.FLOAT32, None), exact_rows=1)
    whole = StageChain.load(folder, [LayerRange(0, 3)], choice).generate(prompts, 2)
    parts = StageChain.load(folder, even_split(3, 3), choice).generate(prompts, 2)
    for expected, logits in zip(whole, parts, strict=True):
        assert torch.equal(logits, expected)


@pytest.mark.usefixtures("added")
def test_what_it_does_not_know_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"qkv_bias": True}))
    with pytest.raises(UnsupportedModelError, match="qkv_bias = True"):
        Checkpoint.open(folder)


def test_every_family_is_listed_under_its_own_name() -> None:
    assert {name: family.model_type for name, family in FAMILIES.items()} == {
        name: name for name in FAMILIES
    }


def test_the_documented_example_stands_in_the_package() -> None:
    page = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = ROOT / "shardnet" / "model" / "families" / "qwen.py"
    parts = re.split(r"\n\n\n| +\.\.\.,\n", example)
    assert all(part in file.read_text(encoding="utf-8") for part in parts)
    assert len([line for line in example.splitlines() if line]) <= 40
