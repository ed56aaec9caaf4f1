"""NVIDIA's driver without a card: what the product asks of it is recorded, with the time it takes.

Its functions are of a small library in C, so that calls cost what ctypes makes them cost. Memory is
addresses without bytes: weights of any size fit.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import FLOAT32, GGUF_FORMS, PanelForm
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_layers import Device
from shardnet.model.drivers import gpu
from shardnet.model.drivers.driver import Argument, Array, Buffer, Kernel
from shardnet.model.drivers.gpu import CUDA, GpuDriver
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.model.fused.decoder import DecoderStage, StageInputs
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import probe
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import PanelTable, RowsOf, StoredTable
from shardnet.model.shards.cut import Axis
from shardnet.stage.packs.pack_writer import PackWriter
from shardnet.stage.stage_model import StageModel
from shardnet.stage.streaming.layer_stream import LayerStream
from shardnet.stage.synthetic_model import SomeRows
from shardnet.types import Arith, DType, LayerRange, blocks_for

CPU = torch.device("cpu")


@cache
def recorder() -> ctypes.CDLL:
    """Return a library with the functions of NVIDIA's driver that the product calls."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "recorder.so")
        source = Path(__file__).with_name("recorder.c")
        command = ["gcc", "-O2", "-w", "-shared", "-fPIC", "-o", str(made), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(made))


class Call(NamedTuple):
    """What was asked of the driver: `kind` is a method of Driver, or graph.

    It took `took_s` of the processor, and `n_bytes` were copied. A launch has its kernel, groups
    and arguments; one that was recorded `is_in_graph`.
    """

    kind: str
    took_s: float
    n_bytes: int = 0
    kernel: Kernel = None
    groups: tuple[int, int] = (0, 0)
    arguments: Sequence[Argument] = ()
    is_in_graph: bool = False


class RecordedGpu(GpuDriver):
    """A GPU of NVIDIA's that is not here. See GpuDriver."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        library = recorder()
        library.set_capability(*capability)
        with patch.object(gpu, "_library", lambda _: library):
            super().__init__(CUDA, 0, keep=lambda key, make: b"")
        self.calls: list[Call] = []
        self.sizes: dict[int, int] = {}
        """Bytes of memory by its address."""
        self.texts: dict[int, tuple[str, str]] = {}
        """The text and the name of each kernel."""
        self._is_recording = False

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """See Driver."""
        found = super().compile(text, names)
        self.texts |= {kernel.value: (text, name) for name, kernel in found.items()}
        return found

    def empty(self, n_bytes: int) -> Buffer:
        """See Driver."""
        made = super().empty(n_bytes)
        self.sizes[made.address.value] = n_bytes
        return made

    def upload(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        began = time.thread_time()
        super().upload(buffer, array, offset)
        self.calls.append(Call("upload", time.thread_time() - began, array.nbytes))

    def download(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        began = time.thread_time()
        super().download(buffer, array, offset)
        self.calls.append(Call("download", time.thread_time() - began, array.nbytes))

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """See Driver."""
        began = time.thread_time()
        super().copy(source, target, n_bytes, at)
        self.calls.append(Call("copy", time.thread_time() - began, n_bytes))

    def launch(
        self, kernel: Kernel, groups: tuple[int, int], arguments: Sequence[Argument]
    ) -> None:
        """See Driver."""
        began = time.thread_time()
        super().launch(kernel, groups, arguments)
        of = kernel, groups, arguments, self._is_recording
        self.calls.append(Call("launch", time.thread_time() - began, 0, *of))

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See Driver."""
        self._is_recording = True
        try:
            return super().record(run)
        finally:
            self._is_recording = False

    def launch_graph(self, graph: ctypes.c_void_p, n_launches: int) -> None:
        """See GpuDriver."""
        began = time.thread_time()
        super().launch_graph(graph, n_launches)
        self.calls.append(Call("graph", time.thread_time() - began))


class RecordedDevice(Device):
    """A device of a RecordedGpu, whose products nobody can check."""

    driver: RecordedGpu

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__(RecordedGpu(capability))

    def _check(self, part: Panels) -> None:
        """See Device."""


class HollowWeights:
    """A WeightSource of memory that nobody has written, in Q4_K and, of the LM head, in Q6_K."""

    def __init__(self, config: ModelConfig) -> None:
        tensors = stage_tensors(config, LayerRange(0, config.n_layers))
        self._shapes, self._head = tensors.all, tensors.head.keys()

    def linear(self, *names: str, **how: object) -> PanelLinear:
        """See WeightSource."""
        form = GGUF_FORMS["Q6_K" if f"{names[0]}.weight" in self._head else "Q4_K"]
        form = FLOAT32 if how.get("wide") or how.get("precise") else form
        n_out = sum(self._shapes[f"{name}.weight"][0] for name in names)
        return PanelLinear([self._panels(form, n_out, self._shapes[f"{names[0]}.weight"][1])], None)

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """See WeightSource."""
        return Norm(weight=torch.ones(*self._shapes[f"{name}.weight"]), bias=None, eps=eps)

    def table(self, name: str) -> PanelTable:
        """See WeightSource."""
        panels = self._panels(GGUF_FORMS["Q4_K"], *self._shapes[f"{name}.weight"])
        return PanelTable(panels, torch.float32)

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """See WeightSource."""
        return SomeRows(self.table(names[0]), rows_of)

    def token_classes(self) -> Tensor:
        """See WeightSource: all tokens are of one."""
        return torch.zeros(1 << 18, dtype=torch.int64)

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        return torch.empty(*self._shapes[f"{name}.weight"])

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        return torch.empty(*self._shapes[name])

    def _panels(self, form: PanelForm, n_out: int, n_in: int) -> Panels:
        packed = torch.empty(form.packed_shape(n_out, n_in), dtype=torch.uint8)
        return Panels(packed=packed, form=form, shape=(n_out, n_in))


@torch.inference_mode()
def hollow_stage(config: ModelConfig, on: Device, context: int) -> StageModel:
    """Return a whole model on a device, by the product's code but for what loads weights."""
    choice = probe(CPU, DType.FLOAT32, None, arith=Arith.PORTABLE)
    layers, dtype = LayerRange(0, config.n_layers), torch_dtype(choice.dtype)
    inputs = StageInputs(config, layers, HollowWeights(config), context, dtype, CPU)
    family = family_of(config).load_stage(inputs)
    usual = config.usual_heads
    kv = DeviceKvCache(
        config.n_layers, usual.n_kv_heads, usual.key_size, dtype, CPU, blocks_for(context)
    )
    assert isinstance(family, DecoderStage)
    assert not family.compute_on(on, kv)
    return StageModel(
        family,
        config,
        layers,
        replace(choice, by_text=on.driver.description),
        kv,
        context=context,
        exact_rows=choice.exact_rows,
        weight_bytes=0,
        stream=LayerStream(),
        writer=PackWriter(None),
    )
