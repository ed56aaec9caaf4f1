"""Layers streamed to a device with memory of its own: who waits for whom, and where they lie.

The device is played by the CPU. Its copies are as late as they may be, and what is copied to is
poison from when the copy is launched: who computes too early computes with that.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2
from support.rings import streamed_stage
from support.rings.stage_chain import CPU
from support.rings.streamed_stage import said, same
from support.soak import cases
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.model.kernels.linear import Kernel, KernelChoice, probe
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.stage import weights
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.stage.streaming.buffers import Buffers, DeviceBuffers, HostBuffers, find_buffers
from shardnet.stage.streaming.streamed_linear import StreamedLinear
from shardnet.stage.weights import StageWeights
from shardnet.types import DType, LayerRange

PLAIN = KernelChoice(dtype=DType.FLOAT32, kernel=Kernel.PLAIN, exact_rows=1, min_rows=1)
"""As on CUDA."""
POISON = 0xFF  # of float32: NaN
MUCH, LITTLE = 1 << 30, 1000
"""Memory of the host for layers to stay in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """When it was made, and how many copies had been launched by then if it ends one."""

    at: int
    n_copies: int = 0


class LateTransfers:
    """Transfers that are done when somebody waits for them, and no sooner."""

    def __init__(self, failing: Container[int] = ()) -> None:
        """`failing` are the numbers of requests for pinned memory that fail."""
        self.n_pinned = 0
        self.n_copies = 0
        self.too_early: list[str] = []
        self._failing = failing
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._used_at: dict[int, int] = {}
        self._copied_from: dict[int, tuple[int, Tensor]] = {}
        self._n_known = 0  # copies that the host knows to be done
        self._now = 0
        self._lock = threading.RLock()

    def pinned(self, size_bytes: int) -> Tensor:
        self.n_pinned += 1
        if self.n_pinned in self._failing:
            raise RuntimeError("CUDA error: out of memory")
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def on_device(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def mark(self) -> Mark:
        with self._lock:
            return Mark(at=self._tick())

    def use(self, memory: Tensor) -> None:
        """Note that something computes with it now."""
        with self._lock:
            self._used_at[memory.data_ptr()] = self._tick()

    @torch.inference_mode()  # as where the memory was made
    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        with self._lock:
            if after.at < self._used_at.get(target.data_ptr(), 0):
                self.too_early.append(f"copy {self.n_copies} to what is computed with")
            number, before = self._copied_from.get(source.data_ptr(), (0, source))
            if number > self._n_known and not torch.equal(before, source):
                self.too_early.append(f"reading over what copy {number} is made of")
            target.fill_(POISON)
            self.n_copies += 1
            self._copied_from[source.data_ptr()] = (self.n_copies, source.clone())
            self._waiting.append((target, source))
            return Mark(at=self._tick(), n_copies=self.n_copies)

    @torch.inference_mode()
    def wait(self, mark: Mark) -> None:
        with self._lock:
            n_done = self.n_copies - len(self._waiting)
            for target, source in self._waiting[: mark.n_copies - n_done]:
                target.copy_(source)
            del self._waiting[: max(0, mark.n_copies - n_done)]

    def block(self, mark: Mark) -> None:
        self.wait(mark)
        with self._lock:
            self._n_known = max(self._n_known, mark.n_copies)

    def _tick(self) -> int:
        self._now += 1
        return self._now


@pytest.fixture(params=[MUCH, LITTLE], ids=["kept", "passing"])
def spare_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch, spare_bytes: int) -> LateTransfers:
    """A device that stages stream to from now on."""
    device = LateTransfers()
    use_device(monkeypatch, device, spare_bytes)
    return device


def use_device(monkeypatch: pytest.MonkeyPatch, device: LateTransfers, spare_bytes: int) -> None:
    multiply = StreamedLinear.__call__

    def noted(linear: StreamedLinear, rows: Tensor) -> Tensor:
        product = multiply(linear, rows)
        stream, layer = linear.place
        device.use(stream.weights(0, 1, stream.buffer_of(layer)))
        return product

    def find(_: torch.device) -> Buffers:
        return DeviceBuffers(device, spare_bytes)

    monkeypatch.setattr(weights, "find_buffers", find)
    monkeypatch.setattr(StreamedLinear, "__call__", noted)


load = partial(streamed_stage.load, choice=PLAIN)


@pytest.mark.parametrize("n_streamed", cases([1, 3], [2, 4]))
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "qwen3_moe"])
def test_every_use_waits_for_its_copy_and_every_copy_for_its_use(
    family: str, n_streamed: int, transfers: LateTransfers, spare_bytes: int, tmp_path: Path
) -> None:
    """The bits of resident layers; two layers or less stay on the device."""
    if family == "gpt2":
        folder = make_gpt2(tmp_path, with_tokenizer=False)
    else:
        folder = make_decoder(tmp_path, family, with_tokenizer=False)
    streamed = load(folder, n_streamed)
    assert same(said(streamed), said(load(folder, 0)))
    for fetch in streamed.stream._fetches:  # what is read ahead has been copied, too
        fetch.done.result()
    assert not transfers.too_early
    n_passes = 5
    assert transfers.n_copies == min(n_streamed, 2) + n_passes * n_streamed * (n_streamed > 2)
    assert transfers.n_pinned == (n_streamed if spare_bytes == MUCH else min(n_streamed, 2))


def test_rounded_layers_come_as_they_are_packed(transfers: LateTransfers, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model", "llama", with_tokenizer=False)
    choice = probe(CPU, DType.FLOAT32, None, Quantization.INT4)
    streamed = load(folder, 4, choice=choice, packs=tmp_path / "packs")
    assert same(said(streamed), said(load(folder, 0, choice=choice)))
    assert not transfers.too_early


@pytest.mark.parametrize("kind", Quantization)
@pytest.mark.usefixtures("transfers")
def test_rounded_layers_on_a_device_are_not_the_compiled_librarys(
    kind: Quantization, tmp_path: Path
) -> None:
    """It reads memory of the CPU alone, whether layers stream or not."""
    checkpoint = Checkpoint.open(make_decoder(tmp_path / "model", "llama", with_tokenizer=False))
    device = torch.device("meta")
    for streamed in ((), (0, 1)):
        own = StageWeights(
            checkpoint,
            stage_tensors(checkpoint.config, LayerRange(0, 4)),
            replace(PLAIN, quant=kind),
            device,
            lambda done, total: None,
            PackCache(tmp_path / "packs", str(tmp_path), "model", kind),
            streamed,
        )
        linear = own.linear("model.layers.1.mlp.down_proj")
        assert isinstance(linear, StreamedLinear if streamed else PanelLinear)
        assert not linear.is_native


def test_what_stays_on_the_host_is_read_once(
    transfers: LateTransfers, spare_bytes: int, tmp_path: Path
) -> None:
    folder = make_decoder(tmp_path, "llama", with_tokenizer=False)
    file, away = folder / "model.safetensors", tmp_path / "away"
    model = load(folder, 3)
    want = said(model)
    model.kv.clear()
    file.rename(away)
    if spare_bytes == LITTLE:
        with pytest.raises(CheckpointError, match="layers are streamed from it"):
            said(model)
        model.kv.clear()
        away.rename(file)
    assert same(said(model), want)
    assert not transfers.too_early


def test_a_pass_that_was_given_up_leaves_nothing_half_done(
    transfers: LateTransfers, tmp_path: Path
) -> None:
    """The next one begins again, and its copies wait for what the last one has launched."""
    folder = make_decoder(tmp_path, "llama", with_tokenizer=False)
    model = load(folder, 4)
    want = said(model)
    model.kv.clear()
    hidden = torch.zeros(1, 48)
    for layer in (0, 1):
        model.stream.need(layer)
        linear = next(iter(_products(model, layer)))
        linear(hidden)
        if layer == 0:
            model.stream.done(layer)
    assert same(said(model), want)
    assert not transfers.too_early


def _products(model: StageModel, layer: int) -> list[StreamedLinear]:
    half = model.family._layers[layer][0].attention  # type: ignore[attr-defined]
    return [half.self_attn.qkv_proj]


def test_memory_that_cannot_be_pinned_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_decoder(tmp_path, "llama", with_tokenizer=False)
    for failing in ((3,), (3, 5)):
        device = LateTransfers(failing)
        use_device(monkeypatch, device, MUCH)
        if len(failing) == 1:
            assert same(said(load(folder, 4)), said(load(folder, 0)))
            continue
        with pytest.raises(CapacityError, match="no memory for 2 layers"):
            load(folder, 4)


def test_only_a_gpu_has_memory_of_its_own() -> None:
    assert isinstance(find_buffers(CPU), HostBuffers)
