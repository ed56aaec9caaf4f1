"""What check_cuda.py measures: a model of a given shape, against the device's own limits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_steps import make_step
from cuda_decoder import DTYPE, PREFILLED, ROWS, Decoder
from cuda_device import Gpu
from cuda_logits import make_checkpoint, without_graphs
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import probe
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    graph_bytes,
    kv_block_bytes,
    layer_stream_bytes,
    read_bytes_per_step,
)
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import LayerRange, SlotId

Cells = tuple[str, ...]


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
    if weight.device.type == "cuda":
        low = torch.randint(0, 255, (weight.shape[0], weight.shape[1] // 2), device=weight.device)
        tiles = torch.ops.aten._convert_weight_to_int4pack(low.to(torch.uint8), 8)
        scales = weight.new_ones(weight.shape[1] // 32, weight.shape[0], 2)

        def tinygemm(rows: Tensor) -> Tensor:
            product: Tensor = torch.ops.aten._weight_int4pack_mm(rows, tiles, 32, scales)
            return product

        yield "torch's int4pack", tinygemm, tiles.nbytes + scales.nbytes


def decoding(gpu: Gpu, config: ModelConfig) -> Iterator[Cells]:
    """Measure decode steps by rows, with graphs and without, and a prompt of 512 tokens."""
    before = gpu.taken_bytes()
    model = Decoder(gpu, config)
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
    graphs = graph_bytes(model.config, model.choice.dtype)
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
    model = without_graphs(lambda: Decoder(gpu, config))
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
