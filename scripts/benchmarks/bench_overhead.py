"""Benchmark what a layer costs besides its weights: a decode step of a model with tiny layers.

The products of such a layer take next to no time, so what is left is the calls themselves: torch's
operators one by one (bfloat16 by oneDNN, float32), or the compiled library, which has a call for
each half of a layer. The time of a layer is that of a deep stage less that of a shallow one, by the
layers between them. All kinds take turns in one run; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from bench_steps import make_step

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Kernel, KernelChoice, probe
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    DType,
    LayerRange,
    MicroBatch,
)

CPU = torch.device("cpu")
SHALLOW, DEEP = 2, 22
STEPS = 200
MAKER = Path(__file__).parents[1] / "make_checkpoint.py"


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench overhead")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _checkpoint(Path(folder), arguments.hidden)
        stages = {
            name: (_stage(checkpoint, SHALLOW, choice), _stage(checkpoint, DEEP, choice))
            for name, choice in _choices().items()
        }
        report = _measure(stages, arguments.rows, arguments.rounds)
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    for name, by_rows in report.items():
        costs = ", ".join(f"{rows} rows {us:.0f} µs" for rows, us in by_rows.items())
        print(f"{name}: a layer costs with {costs}")


def _checkpoint(folder: Path, hidden: int) -> Checkpoint:
    shape = {"layers": DEEP, "hidden": hidden, "intermediate": 2 * hidden, "heads": 4}
    options = [f"--{name}={value}" for name, value in (shape | {"kv-heads": 2}).items()]
    command = [sys.executable, str(MAKER), str(folder), *options, "--vocab=512"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Checkpoint.open(folder)


def _choices() -> Mapping[str, KernelChoice]:
    def of(dtype: DType, kernel: Kernel, rounded: Quantization | None = None) -> KernelChoice:
        return KernelChoice(dtype=dtype, kernel=kernel, exact_rows=1, min_rows=1, quant=rounded)

    choices = {
        "float32, torch": of(DType.FLOAT32, Kernel.PLAIN),
        "bfloat16, torch": probe_bf16(),
    }
    if native_kernels() is not None:
        choices["bfloat16, library"] = of(DType.BFLOAT16, Kernel.NATIVE)
        choices["float32, library"] = of(DType.FLOAT32, Kernel.NATIVE)
        choices["int8, library"] = of(DType.BFLOAT16, Kernel.NATIVE, Quantization.INT8)
        choices["int4, library"] = of(DType.BFLOAT16, Kernel.NATIVE, Quantization.INT4)
    return choices


def probe_bf16() -> KernelChoice:
    """Choose torch's best products in bfloat16 on this machine."""
    kernel = probe(CPU, DType.BFLOAT16, DType.BFLOAT16).kernel
    best = Kernel.PACKED if kernel is Kernel.NATIVE else kernel
    return KernelChoice(dtype=DType.BFLOAT16, kernel=best, exact_rows=1, min_rows=1)


def _stage(checkpoint: Checkpoint, n_layers: int, choice: KernelChoice) -> StageModel:
    return load_stage(
        checkpoint,
        LayerRange(0, n_layers),
        choice=choice,
        device=CPU,
        room_blocks=64,
        progress=lambda done, total: None,
    )


def _measure(
    stages: Mapping[str, tuple[StageModel, StageModel]], row_counts: list[int], rounds: int
) -> dict[str, dict[int, float]]:
    """Return microseconds of a layer, by kind and rows."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for name, (shallow, deep) in stages.items():
            for rows in row_counts:
                between = _step_s(deep, rows) - _step_s(shallow, rows)
                times.setdefault((name, rows), []).append(between / (DEEP - SHALLOW))
    return {
        name: {rows: statistics.median(times[name, rows]) * 1e6 for rows in row_counts}
        for name in stages
    }


def _step_s(stage: StageModel, n_rows: int) -> float:
    """Seconds of a decode step with a row of each of `n_rows` sequences, at positions up to 255."""
    for number in range(256 - STEPS):
        stage.run(_step(number, n_rows), None)
    began = time.perf_counter()
    for number in range(256 - STEPS, 256):
        stage.run(_step(number, n_rows), None)
    return (time.perf_counter() - began) / STEPS


def _step(position: int, n_rows: int) -> MicroBatch:
    return make_step((slot, position, [slot]) for slot in range(n_rows))


if __name__ == "__main__":
    main()
