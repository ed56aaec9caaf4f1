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
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.quantization import packed_codes
from shardnet.checkpoint.tensors.stored_tensor import FileState, read_stored
from shardnet.model.config.panel_form import PANEL
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels, pack_into, unpack

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 328}
"""The vocabulary is no multiple of 16, and 96 of neither 64 nor of 24."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_llama(
        folder, with_tokenizer=False, num_hidden_layers=1, num_attention_heads=4, **SHAPE
    )


def write_case(name: str, source: Path, folder: Path) -> dict[str, Tensor]:
    case = CASES[name]
    write = partial(case.write, np.random.default_rng(7))
    return quantized(source, folder, case.config, write, case.also)


def stored_of(checkpoint: Checkpoint, name: str) -> list[Tensor]:
    return [
        read_stored(checkpoint.folder, part, FileState.of(checkpoint.folder / part.file))
        for part in checkpoint.tensors[name].sources
    ]


def panels_of(checkpoint: Checkpoint, name: str, step: int = 32) -> Panels:
    """Pack a parameter, some rows at a time."""
    tensor = checkpoint.tensors[name]
    weight, stored = tensor.packed, stored_of(checkpoint, name)
    assert weight is not None
    n_out, n_in = tensor.shape
    packed = torch.empty(weight.form.packed_shape(n_out, n_in), dtype=torch.uint8)
    for begin in range(0, n_out, step):
        end = min(begin + step, n_out)
        into = packed[begin // PANEL : -(-end // PANEL)]
        pack_into(into, weight.rows(stored, begin, end), weight.form)
    order = weight.input_order(stored) if weight.input_order is not None else None
    return Panels(packed=packed, form=weight.form, shape=(n_out, n_in), input_order=order)


@pytest.mark.parametrize("name", list(CASES))
def test_weights_are_what_the_format_says(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, folder = CASES[name], tmp_path / "quantized"
    meant = write_case(name, source, folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == meant.keys()
    for weight, values in meant.items():
        tensor = checkpoint.tensors[weight]
        torch.testing.assert_close(checkpoint.read(weight), values, rtol=1e-6, atol=1e-7)
        if "_proj." in weight or weight in case.also:
            packed = tensor.packed
            assert (packed.form.name if packed is not None else "") == case.form
    whole = checkpoint.read("model.layers.0.mlp.down_proj.weight", torch.bfloat16)
    monkeypatch.setattr(packed_codes, "PIECE_ELEMENTS", 500)
    again = checkpoint.read("model.layers.0.mlp.down_proj.weight", torch.bfloat16)
    assert torch.equal(again, whole), "whatever the pieces"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.form])
def test_panels_hold_what_the_format_says(name: str, source: Path, tmp_path: Path) -> None:
    meant = write_case(name, source, tmp_path / "quantized")
    checkpoint = Checkpoint.open(tmp_path / "quantized")
    rows = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    for weight in ("model.layers.0.mlp.down_proj.weight", *CASES[name].also):
        panels, values = panels_of(checkpoint, weight), meant[weight]
        order = slice(None) if panels.input_order is None else panels.input_order
        unpacked = torch.empty_like(values)
        unpacked[:, order] = unpack(panels, torch.float32)
        torch.testing.assert_close(unpacked, values, rtol=1e-6, atol=1e-6)
        tokens = rows[:, : values.shape[1]].contiguous()
        expected = tokens @ values.T
        error = (PanelLinear([panels], None)(tokens) - expected).norm() / expected.norm()
        assert error < 0.02  # the library rounds tokens to int8
