"""Weights in every form that is stored: their values by plain formulas, and their panels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_llama
from support.models.quantized_cases import CASES
from support.models.quantized_checkpoints import quantized

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.quantization import codes

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 328}
"""The vocabulary is no multiple of 16, and 96 of neither 64 nor of 24."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_llama(
        folder, with_tokenizer=False, num_hidden_layers=1, num_attention_heads=4, **SHAPE
    )


@pytest.mark.parametrize("name", list(CASES))
def test_weights_are_what_the_format_says(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    folder = tmp_path / "quantized"
    write = partial(case.write, np.random.default_rng(7))
    meant = quantized(source, folder, case.config, write, case.also)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == meant.keys()
    for weight, values in meant.items():
        tensor = checkpoint.tensors[weight]
        torch.testing.assert_close(checkpoint.read(weight), values, rtol=1e-6, atol=1e-7)
        if "_proj." in weight or weight in case.also:
            packed = tensor.packed
            assert (packed.form.name if packed is not None else "") == case.form
    whole = checkpoint.read("model.layers.0.mlp.down_proj.weight", torch.bfloat16)
    monkeypatch.setattr(codes, "PIECE_ELEMENTS", 500)
    again = checkpoint.read("model.layers.0.mlp.down_proj.weight", torch.bfloat16)
    assert torch.equal(again, whole), "whatever the pieces"
