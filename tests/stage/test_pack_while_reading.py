"""Weights that several threads pack while they read them have the bits of those packed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_llama
from support.models.gguf_files import write_gguf
from support.models.packed_blocks import packed_and_plain
from support.needs import needs_vectors
from support.rings.stage_chain import CPU

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import probe
from shardnet.model.kernels.panel_linear import pack_floats
from shardnet.model.kernels.panels import pack_into
from shardnet.model.kernels.quantized_linear import pack_all
from shardnet.stage import tensor_reader
from shardnet.stage.load import load_stage
from shardnet.stage.streaming import buffers
from shardnet.stage.tensor_reader import TensorReader
from shardnet.types import DType, LayerRange

pytestmark = needs_vectors

SIZES: Any = {"with_tokenizer": False} | {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
Read = list[tuple[list[str], torch.Tensor]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The parameters that were packed while they were read, and what became of them."""
    found: Read = []
    usual = TensorReader.pack_while_reading

    def noted(reader: TensorReader, some: Any, packed: torch.Tensor) -> None:
        usual(reader, some, packed)
        found.append(([name for name, _ in some], packed.clone()))

    monkeypatch.setattr(TensorReader, "pack_while_reading", noted)
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", 20_000)
    monkeypatch.setattr(buffers, "_PACKED_AT_A_TIME", 9000)  # a panel has 8192, or 16 896
    return found


def load(checkpoint: Checkpoint, kind: Quantization | None = None) -> None:
    choice = probe(CPU, DType.FLOAT32, checkpoint.config.checkpoint_dtype, kind)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load_stage(
            checkpoint,
            LayerRange(0, checkpoint.config.n_layers),
            choice=choice,
            device=CPU,
            room_blocks=1,
            progress=lambda done, total: None,
        )
    finally:
        torch.set_num_threads(n_threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats_and_quantised_ones(dtype: torch.dtype, read: Read, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_llama(tmp_path, dtype=dtype, intermediate_size=528, **SIZES))
    native = native_kernels()
    assert native is not None
    for kind in (None, Quantization.INT8, Quantization.INT4):
        read.clear()
        load(checkpoint, kind)
        assert len(read) == 5, "queries to values, outputs, gate and up, down, head"
        for names, packed in read:
            weights = [checkpoint.read(name) for name in names]
            is_head = names == ["lm_head.weight"]
            own = Quantization.INT8 if kind is not None and is_head else kind
            whole = pack_floats(weights, native).packed if own is None else pack_all(weights, own)
            assert torch.equal(packed, whole), (kind, names)


def test_blocks_of_a_gguf_file(read: Read, tmp_path: Path) -> None:
    """Rows that stay in their order in pieces, those of queries and keys all at once."""
    source = make_llama(tmp_path / "source", intermediate_size=512, **SIZES)
    types = {"attn_q": "Q6_K", "attn_k": "Q4_0", "ffn_down": "Q8_0", "": "Q4_K"}
    pack = packed_and_plain(types)[0]
    checkpoint = Checkpoint.open(write_gguf(source, tmp_path / "m.gguf", pack=pack))
    load(checkpoint)
    assert len(read) >= 6
    for names, packed in read:
        end = 0
        for name in names:
            tensor = checkpoint.tensors[name]
            assert tensor.packed is not None
            n_panels = -(-tensor.shape[0] // 16)
            whole = torch.empty_like(packed[:n_panels])
            rows = tensor.packed.rows(checkpoint.stored_of(name), 0, tensor.shape[0])
            pack_into(whole, rows, tensor.packed.form)
            begin, end = end, end + n_panels
            assert torch.equal(packed[begin:end], whole), name


@pytest.mark.parametrize("happens", ["truncated", "replaced", "gone"])
def test_a_file_that_changes_meanwhile_is_named(
    happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(tmp_path, **SIZES)
    checkpoint, file = Checkpoint.open(folder), folder / "model.safetensors"
    usual, n_read = buffers.fill, 0

    def change(*some: Any) -> None:
        nonlocal n_read
        n_read += 1
        if n_read == 2:
            if happens == "truncated":
                with file.open("r+b") as opened:
                    opened.truncate(1000)
            else:
                file.unlink()
            if happens == "replaced":
                file.write_bytes(b"another file")
        usual(*some)

    monkeypatch.setattr(buffers, "fill", change)
    with pytest.raises(CheckpointError, match=r"safetensors(: it has changed| cannot be read)"):
        load(checkpoint)
