"""What check_cuda.py measures: a model of a given shape in noise, against the device's own limits.

Weights are made on the device, every product its own copy, since what is read twice would come out
of the device's cache.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_steps import make_step
from cuda_logits import make_checkpoint, without_graphs
from torch import Tensor

from shardnet.model.checkpoint import Checkpoint
from shardnet.model.codec import torch_dtype
from shardnet.model.config import ModelConfig
from shardnet.model.footprint import (
    WeightForm,
    activation_peak_bytes,
    graph_bytes,
    kv_block_bytes,
    layer_stream_bytes,
    read_bytes_per_step,
    stage_weight_bytes,
)
from shardnet.model.kernels import KernelChoice, Linear, make_linear, make_quantized, probe
from shardnet.model.kv_cache import KvCache
from shardnet.model.layers import Norm
from shardnet.model.layout import stage_tensors
from shardnet.model.pack_writer import PackWriter
from shardnet.model.quantization import Quantization
from shardnet.model.quantized import pack
from shardnet.model.sampler import Sampler, SampleRow
from shardnet.model.stage_model import StageModel, load_stage, make_family
from shardnet.model.streaming import LayerStream
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    DType,
    LayerRange,
    SamplingParams,
    SlotId,
)

Cells = tuple[str, ...]

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 4 * BLOCK_POSITIONS
POSITION = BLOCK_POSITIONS
"""Where rows of decode steps stand: each looks at so many keys."""
PREFILLED = 2 * PREFILL_CHUNK_ROWS
DTYPE = DType.BFLOAT16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: of a GPU much, of a CPU, to try the script, next to nothing."""

    read_bytes: int
    figure_s: float
    streamed_shape: dict[str, int]


FULL = Scale(
    read_bytes=4 << 30,
    figure_s=1.0,
    streamed_shape={
        "hidden": 4096,
        "layers": 4,
        "intermediate": 14336,
        "heads": 32,
        "kv-heads": 8,
        "vocab": 8000,
    },
)
SMALL = Scale(
    read_bytes=1 << 24,
    figure_s=0.01,
    streamed_shape={
        "hidden": 64,
        "layers": 4,
        "intermediate": 128,
        "heads": 4,
        "kv-heads": 2,
        "vocab": 300,
    },
)


class Gpu:
    """A device, its clock and its memory. A CPU, which has no counters, may stand for it."""

    def __init__(self, device: torch.device, scale: Scale) -> None:
        self.device = device
        self.scale = scale
        self._is_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Wait until all is done that was launched."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def taken_bytes(self) -> int:
        """Say what the driver has given away, after what torch keeps for nothing was given back."""
        if not self._is_cuda:
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Say how much more is allocated while something runs than before."""
        if not self._is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of `run`, which has run before, over about a second."""
        self.wait()
        times: list[float] = []
        while len(times) < 3 or sum(times) < self.scale.figure_s:
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def seconds_each(self, run: Callable[[], object], n_times: int) -> float:
        """Return the time of `run` where many follow each other and nobody waits between them."""
        run()

        def several() -> None:
            for _ in range(n_times):
                run()

        return self.seconds(several) / n_times

    @cached_property
    def read_rate(self) -> float:
        """Bytes per second of a sum over memory that no cache holds."""
        memory = torch.ones(self.scale.read_bytes // 4, device=self.device)
        memory.sum()
        return memory.nbytes / self.seconds(memory.sum)

    @cached_property
    def pinned_rate(self) -> float:
        """Bytes per second from pinned memory of the host."""
        n_bytes = self.scale.read_bytes // 4
        source = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return n_bytes / self.seconds(lambda: target.copy_(source, non_blocking=True))


class NoiseWeights:
    """A WeightSource of small random numbers, made on the device; norms are ones."""

    def __init__(self, config: ModelConfig, choice: KernelChoice, device: torch.device) -> None:
        tensors = stage_tensors(config, LayerRange(0, config.n_layers))
        self._shapes, self._head = tensors.all, tensors.head.keys()
        self._choice = choice
        self._device = device
        self._packed: dict[tuple[tuple[int, int], Quantization], Tensor] = {}

    def linear(
        self, *names: str, transposed: bool = False, precise: bool = False, wide: bool = False
    ) -> Linear:
        """Make a product of the shape that the parameters have together."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        shape = (sum(one[0] for one in shapes), shapes[0][1])
        kind = self._choice.rounding(is_head=f"{names[0]}.weight" in self._head)
        if kind is None:
            return make_linear(self._choice, [self._noise(*shape)], [], self._device)
        if (shape, kind) not in self._packed:
            self._packed[shape, kind] = pack(self._noise(*shape), kind)
        return make_quantized(self._packed[shape, kind].clone(), shape, [], self._device, kind)

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of ones."""
        ones = torch.ones(*self._shapes[f"{name}.weight"], device=self._device)
        return Norm(weight=ones.to(torch_dtype(self._choice.dtype)), bias=None, eps=eps)

    def table(self, name: str) -> Tensor:
        """Make a table."""
        return self._noise(*self._shapes[f"{name}.weight"])

    def parameter(self, name: str) -> Tensor:
        """Make a parameter."""
        return self._noise(*self._shapes[name]).float()

    def _noise(self, *shape: int) -> Tensor:
        dtype = torch_dtype(self._choice.dtype)
        return torch.randn(*shape, dtype=dtype, device=self._device).mul_(0.02)


class Decoder:
    """A whole model in noise that decodes: layers, head and greedy sampling."""

    @torch.inference_mode()
    def __init__(self, gpu: Gpu, config: ModelConfig, kind: Quantization | None = None) -> None:
        self.config = config = replace(config, max_positions=CONTEXT)
        self.layers = LayerRange(0, config.n_layers)
        self.choice = choice = probe(gpu.device, DTYPE, DTYPE, kind)
        self.form = WeightForm(dtype=choice.dtype, rounded=kind)
        dtype = torch_dtype(choice.dtype)
        weights = NoiseWeights(config, choice, gpu.device)
        family = make_family(config, self.layers, weights, CONTEXT, dtype, gpu.device)
        room = ROWS[-1] * CONTEXT // BLOCK_POSITIONS
        heads = (config.n_layers, config.n_kv_heads, config.key_size)
        kv = KvCache(*heads, dtype, gpu.device, room)
        self.stage = StageModel(
            family,
            config,
            self.layers,
            choice,
            kv,
            context=CONTEXT,
            exact_rows=choice.exact_rows,
            weight_bytes=self.weight_bytes,
            stream=LayerStream(),
            writer=PackWriter(None),
        )
        self._sampler = Sampler(config.vocab_size)
        for slot in range(ROWS[-1]):
            kv.ensure(SlotId(slot), POSITION + 1)
            for layer in self.layers:
                for cached in kv.layer(SlotId(slot), layer):
                    cached.zero_()  # what nobody has written may be no number

    @property
    def weight_bytes(self) -> int:
        """What the planner thinks that the weights take."""
        return stage_weight_bytes(self.config, self.layers, self.form)

    @property
    def activation_bytes(self) -> int:
        """What the planner thinks that a prompt's chunk takes besides."""
        sizes = (PREFILL_CHUNK_ROWS, self.choice.dtype, CONTEXT)
        return activation_peak_bytes(self.config, self.layers, *sizes)

    def step(self, n_rows: int) -> None:
        """Decode one token of each of so many sequences."""
        batch = make_step((slot, POSITION, [slot]) for slot in range(n_rows))
        row = SampleRow(params=SamplingParams(), position=POSITION)
        self._sampler.sample(self.stage.forward(batch, None), [row] * n_rows)

    def prefill(self) -> None:
        """Run a prompt of 512 tokens in its chunks."""
        for place in range(0, PREFILLED, PREFILL_CHUNK_ROWS):
            ids = range(place, place + PREFILL_CHUNK_ROWS)
            step = make_step(
                [(0, place, [id_ % self.config.vocab_size for id_ in ids])], n_sampled=0
            )
            self.stage.run(step, None)


def limits(gpu: Gpu) -> Iterator[Cells]:
    """Measure what nothing can be faster than."""
    yield "reading the device's memory", f"{gpu.read_rate / 1e9:.0f} GB/s"
    yield "copying from pinned memory", f"{gpu.pinned_rate / 1e9:.1f} GB/s"


@torch.inference_mode()
def products(gpu: Gpu, config: ModelConfig) -> Iterator[Cells]:
    """Measure the largest product of a layer, in each format and with torch's own int4."""
    shape = (2 * config.intermediate_size, config.hidden_size)
    weight = torch.randn(shape, dtype=torch_dtype(DTYPE), device=gpu.device)
    for name, multiply, n_bytes in _products(weight):
        for n_rows in (1, 32):
            rows = torch.randn(n_rows, shape[1], dtype=weight.dtype, device=gpu.device)
            took_s = gpu.seconds_each(partial(multiply, rows), 20)
            share = n_bytes / took_s / gpu.read_rate
            yield name, str(n_rows), f"{took_s * 1e6:.0f} µs", f"{share:.2f}"


def _products(weight: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor], int]]:
    yield "bfloat16", lambda rows: F.linear(rows, weight), weight.nbytes
    for kind in Quantization:
        packed = pack(weight, kind)
        shape = (weight.shape[0], weight.shape[1])
        yield kind.value, make_quantized(packed, shape, [], weight.device, kind), packed.nbytes
    if weight.device.type == "cuda":
        low = torch.randint(0, 255, (weight.shape[0], weight.shape[1] // 2), device=weight.device)
        tiles = torch.ops.aten._convert_weight_to_int4pack(low.to(torch.uint8), 8)
        scales = weight.new_ones(weight.shape[1] // 32, weight.shape[0], 2)

        def tinygemm(rows: Tensor) -> Tensor:
            product: Tensor = torch.ops.aten._weight_int4pack_mm(rows, tiles, 32, scales)
            return product

        yield "torch's int4pack", tinygemm, tiles.nbytes + scales.nbytes


def decoding(gpu: Gpu, config: ModelConfig, kind: Quantization | None) -> Iterator[Cells]:
    """Measure decode steps by rows, with graphs and without, and a prompt of 512 tokens."""
    before = gpu.taken_bytes()
    model = Decoder(gpu, config, kind)
    gpu.wait()
    loaded = gpu.taken_bytes() - before
    read_bytes = read_bytes_per_step(model.config, model.layers, model.form)
    for n_rows in ROWS:
        began = time.perf_counter()
        model.step(n_rows)
        first_s = time.perf_counter() - began
        took_s = gpu.seconds(partial(model.step, n_rows))
        yield _decoded("graphs", n_rows, took_s, read_bytes, gpu, f"first {first_s:.2f} s")
    after = gpu.taken_bytes() - before
    kv_bytes = model.stage.kv.blocks_used * kv_block_bytes(
        model.config, model.layers, model.choice.dtype
    )
    graphs = graph_bytes(model.config, model.choice.dtype, kind)
    model.prefill()
    peak = gpu.peak_bytes(model.prefill)
    took_s = gpu.seconds(model.prefill)
    flops = 2 * PREFILLED * config.n_layers * _layer_weights(config)
    yield (
        "prefill",
        str(PREFILLED),
        f"{took_s * 1e3:.1f} ms",
        f"{flops / took_s / 1e12:.0f} TFLOP/s",
        "",
    )
    del model
    model = without_graphs(lambda: Decoder(gpu, config, kind))
    for n_rows in (1, 8, 32):
        model.step(n_rows)
        took_s = gpu.seconds(partial(model.step, n_rows))
        yield _decoded("no graphs", n_rows, took_s, read_bytes, gpu, "")
    yield _memory("weights", model.weight_bytes, loaded)
    yield _memory("activations", model.activation_bytes, peak)
    yield _memory("keys, values and graphs", kv_bytes + graphs, after - loaded)


def _decoded(what: str, n_rows: int, took_s: float, read_bytes: int, gpu: Gpu, more: str) -> Cells:
    share = read_bytes / took_s / gpu.read_rate
    return what, str(n_rows), f"{took_s * 1e3:.2f} ms", f"{share:.2f} of reading", more


def _memory(what: str, predicted: int, taken: int) -> Cells:
    return what, "", f"predicted {predicted / 2**20:.0f} MiB", f"taken {taken / 2**20:.0f} MiB", ""


def _layer_weights(config: ModelConfig) -> int:
    heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_size
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def overhead(gpu: Gpu, config: ModelConfig) -> Iterator[Cells]:
    """Measure what a layer costs besides its weights: tiny ones, many less few."""
    tiny = replace(config, hidden_size=256, intermediate_size=512, n_heads=4, n_kv_heads=2)
    tiny = replace(tiny, head_size=64, vocab_size=512)
    few, many = 2, 22
    for name, wrapped in (("graphs", lambda make: make()), ("no graphs", without_graphs)):
        times: dict[int, list[float]] = {1: [], 8: []}
        for n_layers in (few, many):
            model = wrapped(partial(Decoder, gpu, replace(tiny, n_layers=n_layers)))
            for n_rows, found in times.items():
                model.step(n_rows)
                found.append(gpu.seconds(partial(model.step, n_rows)))
        for n_rows, (least, most) in times.items():
            yield name, str(n_rows), f"{(most - least) / (many - few) * 1e6:.0f} µs a layer"


def loading(gpu: Gpu) -> Iterator[Cells]:
    """Measure loading from a warm page cache, and layers that are streamed."""
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), gpu.scale.streamed_shape)
        n_bytes = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
        for kind in (None, *Quantization):
            began = time.perf_counter()
            stage = _load(gpu, Path(name), kind, 0)
            gpu.wait()
            took_s = time.perf_counter() - began
            what = f"load {DTYPE.value if kind is None else kind.value}"
            yield what, f"{took_s:.2f} s", f"{n_bytes / took_s / 1e9:.2f} GB/s of the file"
            del stage
        resident = _load(gpu, Path(name), None, 0)
        yield "step, all layers in memory", f"{_step_s(gpu, resident, 1) * 1e3:.2f} ms", ""
        del resident
        config = Checkpoint.open(Path(name)).config
        read_bytes = config.n_layers * layer_stream_bytes(config, WeightForm(dtype=DTYPE))
        streamed = _load(gpu, Path(name), None, config.n_layers)
        for n_rows in (1, 16):
            took_s = _step_s(gpu, streamed, n_rows)
            share = read_bytes / took_s / gpu.pinned_rate
            yield (
                f"step, all streamed, {n_rows} rows",
                f"{took_s * 1e3:.2f} ms",
                f"{share:.2f} of copying",
            )


def _load(gpu: Gpu, folder: Path, kind: Quantization | None, n_streamed: int) -> StageModel:
    checkpoint = Checkpoint.open(folder)
    return load_stage(
        checkpoint,
        LayerRange(0, checkpoint.config.n_layers),
        choice=probe(gpu.device, DTYPE, DTYPE, kind),
        device=gpu.device,
        room_blocks=ROWS[-1],
        progress=lambda done, total: None,
        n_streamed=n_streamed,
    )


def _step_s(gpu: Gpu, stage: StageModel, n_rows: int) -> float:
    step = make_step((slot, 0, [slot]) for slot in range(n_rows))
    for _ in range(3):
        stage.forward(step, None)
    took_s = gpu.seconds(lambda: stage.forward(step, None))
    for slot in range(n_rows):
        stage.kv.free(SlotId(slot))
    return took_s
