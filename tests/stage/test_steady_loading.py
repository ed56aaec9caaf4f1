"""Loading in small steps: it says how far it is, ends when told to, and has the disk read ahead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_llama
from support.needs import needs_vectors
from support.rings.stage_chain import CPU

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.tensors import stored_tensor
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels import quantized_linear
from shardnet.model.kernels.library import NativeMatmul
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.stage import tensor_reader
from shardnet.stage.load import load_stage
from shardnet.stage.packs import pack_cache
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.types import ANY_ROWS, DType, LayerRange

PIECE = 1000
"""Bytes that are read, written or rounded at a time here: no tensor of a product has so few."""

Report = Callable[[int, int], None]


class GivenUp(Exception):
    """What the one who reports raises to end the loading."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensor, "READ_AT_A_TIME", PIECE)
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(pack_cache, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(quantized_linear, "_NATIVE_CHUNK_WEIGHTS", PIECE)
    monkeypatch.setattr(quantized_linear, "_TORCH_CHUNK_WEIGHTS", PIECE)


def load_range(
    checkpoint: Checkpoint,
    layers: LayerRange,
    choice: KernelChoice | None = None,
    report: Report = lambda done, total: None,
    packs: PackCache | None = None,
) -> StageModel:
    return load_stage(
        checkpoint,
        layers,
        choice=choice or probe(CPU, DType.FLOAT32, None),
        device=CPU,
        room_blocks=8,
        progress=report,
        packs=packs,
    )


def load(
    checkpoint: Checkpoint,
    report: Report,
    kind: Quantization | None = None,
    packs: PackCache | None = None,
) -> None:
    choice = probe(CPU, DType.FLOAT32, None, kind)
    load_range(checkpoint, LayerRange(0, 4), choice, report, packs).finish_packs()


def largest_step(seen: list[int]) -> int:
    return max(after - before for before, after in itertools.pairwise([0, *seen]))


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "gpt_oss"])
def test_progress_moves_within_a_tensor(kind: str, tmp_path: Path) -> None:
    """From the checkpoint, and from packed weights: forward only, and to the end."""
    if kind == "gpt_oss":
        make_decoder(tmp_path, kind)
    else:
        make_llama(tmp_path, tie_word_embeddings=kind == "llama, tied")
    checkpoint, packs = Checkpoint.open(tmp_path), tmp_path / "packs"
    largest = max(tensor.size_bytes for tensor in checkpoint.tensors.values())
    panel_bytes = 16 * 4 * max(checkpoint.config.hidden_size, checkpoint.config.intermediate_size)
    assert largest > 20 * PIECE
    assert largest > 3 * panel_bytes
    for rounded in (None, Quantization.INT8, Quantization.INT8):
        seen: list[int] = []
        totals: set[int] = set()

        def report(
            done: int, total: int, seen: list[int] = seen, totals: set[int] = totals
        ) -> None:
            seen.append(done)
            totals.add(total)

        cache = PackCache(packs, "one", "m", rounded) if rounded else None
        load(checkpoint, report, rounded, cache)
        assert seen == sorted(seen)
        assert {seen[-1]} == totals
        # A packed byte stands for four stored ones; what is packed while read comes by panels.
        assert largest_step(seen) <= max(5 * PIECE, torch.get_num_threads() * panel_bytes)


def test_loading_ends_at_any_report_that_says_so(tmp_path: Path) -> None:
    """While reading, rounding and taking from the cache; nothing unfinished stays of keeping."""
    checkpoint, folder = Checkpoint.open(make_llama(tmp_path / "m")), tmp_path / "packs"
    stored_bytes = sum(tensor.size_bytes for tensor in checkpoint.tensors.values())
    n_reports = 0
    last: float = float("inf")

    def report(done: int, total: int) -> None:
        nonlocal n_reports
        n_reports += 1
        if n_reports >= last:
            raise GivenUp

    def load_anew(name: str) -> int:
        nonlocal n_reports
        n_reports = 0
        load(checkpoint, report, Quantization.INT8, PackCache(folder, name, "m", Quantization.INT8))
        return n_reports

    n_first, n_again = load_anew("one"), load_anew("one")
    packed_bytes = sum(path.stat().st_size for path in folder.rglob("*.packed"))
    assert n_again > packed_bytes // PIECE
    assert n_first > stored_bytes // (16 * 4 * checkpoint.config.intermediate_size)
    for name, n_in_all in (("", n_first), ("one", n_again)):
        for last in (1, n_in_all // 4, n_in_all // 2, n_in_all - 1):
            with pytest.raises(GivenUp):
                load_anew(name or f"not yet {last}")
            assert n_reports == last
            assert not list(folder.rglob(".*"))


def test_the_disk_is_asked_ahead_for_what_is_read_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(make_llama(tmp_path / "m"))
    events: list[tuple[str, str]] = []
    read, prefetch, sources_of = Checkpoint.read, Checkpoint.prefetch, Checkpoint.sources_of

    def watch_read(checkpoint: Checkpoint, name: str, *rest: Any) -> torch.Tensor:
        events.append(("read", name))
        return read(checkpoint, name, *rest)

    def watch_prefetch(checkpoint: Checkpoint, name: str, n_bytes: int) -> None:
        events.append(("asked", name))
        prefetch(checkpoint, name, n_bytes)

    def watch_sources(checkpoint: Checkpoint, name: str) -> object:
        events.append(("read", name))
        return sources_of(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", watch_read)
    monkeypatch.setattr(Checkpoint, "sources_of", watch_sources)
    monkeypatch.setattr(Checkpoint, "prefetch", watch_prefetch)
    monkeypatch.setattr(tensor_reader, "_READ_AHEAD_BYTES", 40_000)  # about a layer
    load_range(checkpoint, LayerRange(1, 3))
    read_names = [name for what, name in events if what == "read"]
    asked = [name for what, name in events if what == "asked"]
    assert len(asked) == len({*asked}) > 10
    assert {*asked} < {*read_names}
    assert all(events.index(("asked", name)) < events.index(("read", name)) for name in asked)
    events.clear()
    packs = tmp_path / "packs"
    for _ in range(2):
        cache = PackCache(packs, "one", "m", Quantization.INT8)
        load(checkpoint, lambda done, total: None, Quantization.INT8, cache)
        last, events = events, []
    assert "asked" not in {what for what, _ in last}, "what is kept packed need not be read"


def test_where_the_system_cannot_be_asked_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(make_llama(tmp_path / "m"))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("os.posix_fadvise", raising=False)  # asked all the same, it would fail
    load(checkpoint, lambda done, total: None)


@needs_vectors
@pytest.mark.parametrize("kind", [None, Quantization.INT4])
def test_products_that_are_exact_by_how_they_compute_are_not_tried(
    kind: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(make_llama(tmp_path, dtype=torch.bfloat16))
    choice = probe(CPU, DType.FLOAT32, DType.BFLOAT16, kind)

    def fail(*_: object) -> None:
        raise AssertionError("multiplied while loading")

    monkeypatch.setattr(NativeMatmul, "__call__", fail)
    model = load_range(checkpoint, LayerRange(0, 4), choice)
    assert model.exact_rows == ANY_ROWS
