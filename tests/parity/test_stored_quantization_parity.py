"""Quantized checkpoints: what transformers says of the weights that they mean."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import VOCAB_SIZE, make_decoder, make_llama
from support.models.quantized_checkpoints import GROUP, Made, awq, fp8, gptq, mxfp4, quantized
from support.oracles.oracle import (
    FLOAT32_TOLERANCE,
    check_generation,
    load_reference,
    reference_logits,
)
from support.rings.stage_chain import StageChain, even_split, random_prompt
from transformers import AutoModelForCausalLM

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats import dequantize
from shardnet.errors import CheckpointError
from shardnet.stage.estimate.memory_estimate import WeightForm, stage_weight_bytes
from shardnet.types import DType, LayerRange

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        partial(gptq, first=True, ordered=True),
    ),
    "gptq-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        partial(gptq, first=True, ordered=False),
    ),
    "gptq-v2": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "checkpoint_format": "gptq_v2",
        },
        partial(gptq, first=False, ordered=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
        awq,
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
        partial(fp8, scales="block"),
    ),
    "fp8-rows": ({"quant_method": "fp8"}, partial(fp8, scales="row")),
    "fp8-one": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(fp8, scales="one"),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_quantized_weights_are_what_they_mean(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, form = CASES[case]
    rng = np.random.default_rng(7)

    def make(n: int, k: int) -> Made:
        made: Made = form(rng, n, k)
        return made

    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=2)
    folder = tmp_path / "quantized"
    meant = quantized(source, folder, config, make)
    checkpoint = Checkpoint.open(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(checkpoint.read(name), meant[name], rtol=1e-6, atol=1e-7)
    whole = checkpoint.read(name, torch.bfloat16)
    assert whole.dtype is torch.bfloat16
    monkeypatch.setattr(dequantize, "BLOCK_ELEMENTS", 500)
    assert torch.equal(checkpoint.read(name, torch.bfloat16), whole), "whatever the pieces"
    chain = StageChain.load(folder, even_split(2, 2))
    reference = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    reference.load_state_dict(meant)
    prompts = [random_prompt(40, VOCAB_SIZE, seed=3), random_prompt(5, VOCAB_SIZE, seed=4)]
    check_generation(chain, reference, prompts, 8)


def test_biases_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    """AutoGPTQ once wrote zeros for all of them."""
    config, form = CASES["gptq"]
    rng = np.random.default_rng(7)
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=2)
    folder = tmp_path / "quantized"
    quantized(source, folder, config, lambda n, k: form(rng, n, k))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(80)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias .* has no place in a llama model"):
        StageChain.load(folder, even_split(2, 1))


def test_memory_counts_what_is_resident_and_moving_what_is_stored(tmp_path: Path) -> None:
    config, form = CASES["awq"]
    rng = np.random.default_rng(7)
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=2)
    quantized(source, tmp_path / "quantized", config, lambda n, k: form(rng, n, k))
    checkpoint, whole = Checkpoint.open(tmp_path / "quantized"), Checkpoint.open(source)
    layers = LayerRange(0, 1)
    form = WeightForm(dtype=DType.BFLOAT16)
    sizes = [stage_weight_bytes(c.config, layers, form) for c in (checkpoint, whole)]
    assert sizes[0] == sizes[1]
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].size_bytes < whole.tensors[name].size_bytes / 4


def test_mxfp4_experts_run_as_what_they_mean(tmp_path: Path) -> None:
    """gpt-oss as it is published, and with the same experts in float32."""
    plain = make_decoder(
        tmp_path / "plain", "gpt_oss", num_hidden_layers=2, hidden_size=64, intermediate_size=32
    )
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    rng = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        n_experts, n_in, n_out = tensors[name].shape
        parts, tensors[name] = mxfp4(rng, n_experts, n_out, n_in)
        del stored[name]
        stored |= {name + suffix: part for suffix, part in parts.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed = shutil.copytree(plain, tmp_path / "packed")
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(config))
    prompt = random_prompt(40, 300)
    logits = StageChain.load(packed, even_split(2, 2)).prefill(0, prompt)
    assert torch.equal(logits, StageChain.load(plain, even_split(2, 1)).prefill(0, prompt))
    expected = reference_logits(load_reference(plain), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
