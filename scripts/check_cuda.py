"""Check on a machine with CUDA what is tested elsewhere without: graphs, and layers that stream.

    python scripts/check_cuda.py
    python scripts/check_cuda.py --layers 8 --steps 50

First the logits of a small random model, replayed against eager and streamed against resident, for
every number of rows up to 33; then decode steps of a stage of Llama-3-8B's shape in noise, at one
row in bfloat16, with graphs and without. Exits 1 where logits differ, 2 where torch finds no CUDA
device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from bench_steps import make_step

from shardnet.model.checkpoint import Checkpoint
from shardnet.model.codec import torch_dtype
from shardnet.model.config import ModelConfig
from shardnet.model.decode_graphs import GRAPHS_VARIABLE
from shardnet.model.families import parse_config
from shardnet.model.footprint import graph_bytes, read_bytes_per_step
from shardnet.model.kernels import probe
from shardnet.model.sample_model import CONTEXT, SampleModel
from shardnet.model.stage_model import StageModel, load_stage
from shardnet.types import (
    DType,
    LayerRange,
    MicroBatch,
)

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
MAX_ROWS = 33
TOLERANCES = {DType.FLOAT32: 1e-3, DType.BFLOAT16: 0.1}
"""How far logits may lie apart, as a share of their largest: rows are filled up, and products of
other row counts may be summed in another order."""
Made = TypeVar("Made", StageModel, SampleModel)
READ_BYTES = 4 << 30
N_READS = 10


def main() -> None:
    """Check, then measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/check_cuda.py")
    parser.add_argument("--layers", type=int, default=32, help="of Llama-3-8B's")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_cuda: torch finds no CUDA device here, nothing was checked", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    is_good = _check_logits(device)
    _measure(device, options.layers, options.steps)
    raise SystemExit(0 if is_good else 1)


def _without_graphs(make: Callable[[], Made]) -> Made:
    os.environ[GRAPHS_VARIABLE] = "off"
    try:
        return make()
    finally:
        del os.environ[GRAPHS_VARIABLE]


def _check_logits(device: torch.device) -> bool:
    with tempfile.TemporaryDirectory() as name:
        script, folder = Path(__file__).with_name("make_checkpoint.py"), Path(name)
        shape = ["--hidden=512", "--layers=6", "--intermediate=1408", "--heads=8", "--kv-heads=2"]
        subprocess.run([sys.executable, str(script), name, *shape, "--vocab=4000"], check=True)

        def load(dtype: DType, n_streamed: int = 0) -> StageModel:
            return _load(folder, dtype, device, n_streamed)

        agree = []
        for dtype in TOLERANCES:
            pair = load(dtype), _without_graphs(lambda dtype=dtype: load(dtype))
            agree.append(_logits_agree(f"{dtype.value}, graphs against eager", dtype, *pair))
        own = DType.BFLOAT16
        for n_streamed in (2, 5):
            pair = load(own, n_streamed), load(own)
            agree.append(_logits_agree(f"{n_streamed} of 6 layers streamed", own, *pair))
    return all(agree)


def _load(folder: Path, dtype: DType, device: torch.device, n_streamed: int) -> StageModel:
    checkpoint = Checkpoint.open(folder)
    return load_stage(
        checkpoint,
        LayerRange(0, checkpoint.config.n_layers),
        choice=probe(device, dtype, dtype),
        device=device,
        room_blocks=MAX_ROWS,
        progress=lambda done, total: None,
        n_streamed=n_streamed,
    )


def _logits_agree(what: str, dtype: DType, one: StageModel, other: StageModel) -> bool:
    """Hold steps of one row of each of 33 to 1 sequences against each other."""
    ends = [0] * MAX_ROWS
    apart, n_equal = [], 0
    counts = [*range(MAX_ROWS, 0, -1), 1, 5, 32, 2]
    for n_rows in counts:
        batch = _batch(ends[:n_rows])
        got, want = one.forward(batch, None), other.forward(batch, None)
        apart.append((got - want).abs().max() / want.abs().max())
        n_equal += torch.equal(got, want)
        ends[:n_rows] = [end + 1 for end in ends[:n_rows]]
    worst = float(torch.stack(apart).max())  # of NaN: NaN
    is_good = worst <= TOLERANCES[dtype]
    print(
        f"{what}: logits differ by at most {worst:.2g} of the largest, {n_equal} of {len(counts)} "
        f"steps have the same bits: {'ok' if is_good else 'WRONG'}"
    )
    return is_good


def _batch(positions: list[int]) -> MicroBatch:
    """One row of each of so many sequences."""
    return make_step(
        (slot, position, [(7 * slot + 31 * position) % 4000])
        for slot, position in enumerate(positions)
    )


def _measure(device: torch.device, n_layers: int, n_steps: int) -> None:
    config = parse_config(LLAMA_3_8B | {"num_hidden_layers": n_layers}, "Llama-3-8B")
    config = replace(config, max_positions=CONTEXT)
    limit = _read_bandwidth(device)
    print(f"reading memory: {limit / 1e9:.0f} GB/s")
    read_bytes = read_bytes_per_step(config, LayerRange(0, n_layers), DType.BFLOAT16)
    for name, wrapped in (("with graphs", lambda make: make()), ("without", _without_graphs)):
        model = wrapped(lambda: _sample(config, device))
        before = torch.cuda.mem_get_info()[0]
        step_s = _step_s(model, n_steps)
        taken = (before - torch.cuda.mem_get_info()[0]) / 2**20
        print(
            f"{n_layers} layers of Llama-3-8B, bfloat16, 1 row, {name}: {step_s * 1e3:.2f} ms a "
            f"step, {read_bytes / step_s / 1e9:.0f} GB/s, {read_bytes / step_s / limit:.2f} of "
            f"the limit; memory taken since loading {taken:.0f} MiB"
        )
        del model
        torch.cuda.empty_cache()
    reserved = graph_bytes(config, DType.BFLOAT16) / 2**20
    print(f"plans keep {reserved:.0f} MiB free for graphs of 6 buckets; 1 was captured")


def _sample(config: ModelConfig, device: torch.device) -> SampleModel:
    choice = probe(device, DType.BFLOAT16, DType.BFLOAT16)
    return SampleModel(config, choice, device, lambda: None)


def _step_s(model: SampleModel, n_steps: int) -> float:
    """The median over steps: embedding, layers, head and greedy sampling."""
    for _ in range(5):
        model.step(1)
    times = []
    for _ in range(n_steps):
        began = time.perf_counter()
        model.step(1)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _read_bandwidth(device: torch.device) -> float:
    """Bytes per second of the best of some sums over memory."""
    memory = torch.ones(READ_BYTES // 4, dtype=torch_dtype(DType.FLOAT32), device=device)
    best = float("inf")
    for _ in range(N_READS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        memory.sum()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return READ_BYTES / best


if __name__ == "__main__":
    main()
