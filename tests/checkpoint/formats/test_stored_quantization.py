"""What config.json says of quantization: read, or refused by name; parts that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_llama
from support.models.quantized_checkpoints import GROUP, awq, fp8, gptq, mxfp4, quantized
from support.rings.stage_chain import StageChain

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats import dequantize
from shardnet.checkpoint.formats.stored_quantization import read_quantization
from shardnet.errors import CheckpointError, ShardnetError, UnsupportedModelError
from shardnet.types import LayerRange

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}


def test_mxfp4_is_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, meant = mxfp4(np.random.default_rng(3), experts=3, n=10, k=64)
    source = make_llama(tmp_path, with_tokenizer=False, num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    tensors |= {stem + suffix: part for suffix, part in parts.items()}
    save_file(tensors, source / "model.safetensors")
    checkpoint = Checkpoint.open(source)
    assert checkpoint.tensors[stem].shape == meant.shape
    assert torch.equal(checkpoint.read(stem), meant)
    monkeypatch.setattr(dequantize, "BLOCK_ELEMENTS", 100)
    assert torch.equal(checkpoint.read(stem, torch.bfloat16), meant.bfloat16())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method = 'bitsandbytes' is not supported; supp"),
        ({}, r"quant_method is missing"),
        (GPTQ | {"bits": 8}, r"bits = 8 is not supported; supported: 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin' is not supported"),
        (GPTQ | {"group_size": 0}, r"group_size is 0, expected"),
        (GPTQ | {"dynamic": {"lm_head": {}}}, r"dynamic = .* is not known"),
        (AWQ | {"version": "gemv"}, r"version = 'gemv' is not supported; supported: gemm"),
        (AWQ | {"zero_point": False}, r"zero_point = False is not supported"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (FP8 | {"rotation": "hadamard"}, r"rotation = 'hadamard' is not known"),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardnetError, match=r"^c\.json: (quantization_config\.)*" + message):
        read_quantization(config, "c.json")


def test_without_a_word_in_the_config_integers_are_refused(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=1)
    rng = np.random.default_rng(7)
    folder = tmp_path / "quantized"
    quantized(source, folder, FP8, partial(fp8, rng, scales="block"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is stored as F8_E4M3; supported: BF16, F16, F32"):
        StageChain.load(folder, [LayerRange(0, 1)])


def test_an_object_is_expected(tmp_path: Path) -> None:
    source = make_llama(tmp_path, with_tokenizer=False, num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": [1]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantization_config is \[1\], expected an object"):
        Checkpoint.open(source)


STEM = "model.layers.0.mlp.up_proj"
DAMAGES: dict[str, tuple[dict[str, Any], Any, dict[str, Callable[[Any], Any]], str]] = {
    "no zeros": (GPTQ, gptq, {".qzeros": lambda t: None}, f"tensor {STEM}.qzeros is missing"),
    "no scales": (AWQ, awq, {".scales": lambda t: None}, f"tensor {STEM}.scales is missing"),
    "zeros of another shape": (
        GPTQ,
        gptq,
        {".qzeros": lambda t: t[:1].clone()},
        rf"{STEM}\.qzeros is I32 \[1, 10\], expected I32 \[3, 10\]",
    ),
    "integers of another type": (
        AWQ,
        awq,
        {".qweight": lambda t: t.long()},
        rf"{STEM}\.qweight is I64 .*, expected I32",
    ),
    "a group beyond the last": (
        GPTQ,
        gptq,
        {".g_idx": lambda t: t + 1},
        f"tensor {STEM}.g_idx names a group beyond 3",
    ),
    "no matrix": (AWQ, awq, {".qweight": lambda t: t.flatten()}, r"has shape \[480\], expected 2"),
    "scales of another shape": (
        FP8,
        fp8,
        {".weight_scale_inv": lambda t: t[:2].clone()},
        rf"{STEM}\.weight_scale_inv is F32 \[2, 3\], expected F32 or F16 or BF16 \[5, 3\]",
    ),
    "a weight that is not narrow": (
        FP8,
        fp8,
        {".weight": lambda t: t.float()},
        rf"{STEM}\.weight is F32 \[80, 48\], expected F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_parts_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    config, form, changes, message = DAMAGES[name]
    options: dict[Any, dict[str, Any]] = {
        gptq: {"first": True, "ordered": True},
        fp8: {"scales": "block"},
        awq: {},
    }
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=1)
    folder = tmp_path / "quantized"
    quantized(source, folder, config, partial(form, np.random.default_rng(7), **options[form]))
    tensors = load_file(folder / "model.safetensors")
    for suffix, change in changes.items():
        changed = change(tensors.pop(STEM + suffix))
        if changed is not None:
            tensors[STEM + suffix] = changed
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as error:
        StageChain.load(folder, [LayerRange(0, 1)])
    assert str(folder) in str(error.value)


def test_other_methods_are_refused_when_opened(tmp_path: Path) -> None:
    source = make_llama(tmp_path, with_tokenizer=False, num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError,
        match=r"config\.json: quantization_config\.quant_method = 'hqq' is not supported; "
        "supported: awq, fp8, gptq, mxfp4",
    ):
        Checkpoint.open(source)
