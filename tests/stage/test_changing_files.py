"""A file that is cut off while a stage loads from it is an error with its name, in every form.

A mapping would end the process: a page of a file that is no longer there is SIGBUS.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.models.checkpoints import make_gpt2, make_llama
from support.models.gguf_files import write_gguf
from support.models.quantized_cases import CASES
from support.models.quantized_checkpoints import quantized
from support.rings.stage_chain import CPU, probed
from support.soak import is_soak

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.tensors import stored_tensor
from shardnet.errors import CheckpointError
from shardnet.stage.load import load_stage
from shardnet.types import DType, LayerRange

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


@pytest.fixture(params=["plain", "gpt2", "gguf", "gptq-4", "awq", "nf4", "bnb-8", "fp8-blocks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The path of one that is cut, and copied back, by what it is made of."""
    kind, folder = request.param, tmp_path / "made"
    if kind == "gpt2":
        return make_gpt2(folder, with_tokenizer=False)
    source = make_llama(tmp_path / "plain", with_tokenizer=False, num_attention_heads=4, **SIZES)
    if kind == "plain":
        return source
    if kind == "gguf":
        return write_gguf(source, tmp_path / "model.gguf")
    case = CASES[kind]
    write = partial(case.write, np.random.default_rng(7))
    quantized(source, folder, case.config, write, case.also)
    return folder


class Cut:
    """Cuts a file off at the `nth` report of progress before the end; counts them."""

    def __init__(self, file: Path, nth: int) -> None:
        self._file = file
        self._nth = nth
        self.n_reports = 0

    def __call__(self, done: int, total: int) -> None:
        self.n_reports += done < total
        if done < total and self.n_reports == self._nth:
            os.truncate(self._file, 100)


def test_it_is_cut_at_any_report(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensor, "READ_AT_A_TIME", 2048)
    file = checkpoint if checkpoint.is_file() else checkpoint / "model.safetensors"
    whole = file.read_bytes()
    usual = Cut(file, 0)
    load(Checkpoint.open(checkpoint), usual)
    n_cuts = 40 if is_soak() else 12
    for nth in range(1, usual.n_reports + 1, max(1, usual.n_reports // n_cuts)):
        opened = Checkpoint.open(checkpoint)
        try:
            with pytest.raises(CheckpointError, match=f"{file}: it has changed"):
                load(opened, Cut(file, nth))
        finally:
            file.write_bytes(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="lists what is mapped by /proc")
def test_no_file_of_a_checkpoint_is_mapped(checkpoint: Path) -> None:
    def look(done: int, total: int) -> None:
        assert str(checkpoint) not in Path("/proc/self/maps").read_text(encoding="utf-8")

    load(Checkpoint.open(checkpoint), look)


def load(checkpoint: Checkpoint, progress: object) -> None:
    load_stage(
        checkpoint,
        LayerRange(0, checkpoint.config.n_layers),
        choice=probed(CPU, DType.FLOAT32, checkpoint.config.checkpoint_dtype),
        device=CPU,
        room_blocks=1,
        progress=progress,  # type: ignore[arg-type]
    )
