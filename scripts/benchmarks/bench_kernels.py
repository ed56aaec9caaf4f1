"""Benchmark the matrix products of one model shape: bf16, int8, int4, alone and in a stage.

Everything is measured in one run, the formats taking turns: plain streaming reads (the limit), all
products of a step one after the other, and whole decode steps of a stage in random weights. A
format's share of the limit is the time to read its bytes once, divided by what a step takes. "In
cache" is what a step would take if its weights need not come from memory: the time of a small
product, again and again, scaled to the step's weights. Where that is longer than reading, the
format's arithmetic is what limits so many rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bench_ring import random_1b, read_bandwidth

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.quantization import Quantization
from shardnet.model.families.stage_tensors import is_quantizable, stage_tensors
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Kernel, KernelChoice, Linear, make_linear, probe
from shardnet.stage.estimate.memory_estimate import WeightForm, read_bytes_per_step
from shardnet.stage.synthetic_model import SyntheticModel, synthetic_config
from shardnet.types import DType, LayerRange

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
CPU = torch.device("cpu")
SMALL = (768, 512)
"""Outputs and inputs of a product whose weights fit into a core's own cache in every format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to hold weights, and its products of one step."""

    name: str
    products: list[Linear]
    small: Linear
    """A product whose weights stay in the caches."""
    rows_dtype: torch.dtype
    read_bytes: int


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench kernels")
    parser.add_argument("--checkpoint", type=Path, help="default: the TinyLlama-1.1B shape")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument(
        "--formats",
        nargs="*",
        default=["native", "packed", "int8", "int4"],
        help="native, packed: bfloat16 by the compiled library, by oneDNN; float32; int8; int4",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = Checkpoint.open(arguments.checkpoint or random_1b()).config
    report = _measure(config, arguments)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


@torch.inference_mode()
def _measure(config: ModelConfig, arguments: argparse.Namespace) -> dict[str, object]:
    choices = [_choice(name, config) for name in arguments.formats]
    formats = [_format(config, choice) for choice in choices]
    limits = []
    times: dict[tuple[str, int], list[float]] = {}
    cached: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        limits.append(read_bandwidth())
        for kind in formats:
            for rows in arguments.rows:
                seconds = _products_s(kind, rows)
                times.setdefault((kind.name, rows), []).append(seconds)
                cached.setdefault((kind.name, rows), []).append(_in_cache_s(kind, rows))
    limit = max(limits)
    native = native_kernels()
    return {
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "isa": native.isa.name.lower() if native else "torch",
        "limit_gb_s": limit / 1e9,
        "formats": {
            kind.name: {
                "read_mib": kind.read_bytes / 2**20,
                "share_of_limit": kind.read_bytes / limit / min(times[kind.name, 1])
                if 1 in arguments.rows
                else None,
                "ms_by_rows": {
                    rows: statistics.median(times[kind.name, rows]) * 1e3 for rows in arguments.rows
                },
                "in_cache_ms_by_rows": {
                    rows: statistics.median(cached[kind.name, rows]) * 1e3
                    for rows in arguments.rows
                },
                "stage_layer_ms": _layer_ms(config, choice, arguments.rounds),
            }
            for kind, choice in zip(formats, choices, strict=True)
        },
    }


def _choice(name: str, config: ModelConfig) -> KernelChoice:
    if name == "float32":
        return probe(CPU, DType.FLOAT32, DType.FLOAT32)
    if name in ("native", "packed"):
        return replace(probe(CPU, "auto", config.checkpoint_dtype), kernel=Kernel(name))
    return probe(CPU, "auto", config.checkpoint_dtype, Quantization.named(name))


def _format(config: ModelConfig, choice: KernelChoice) -> Format:
    """Make every product of a step in random weights, each with memory of its own."""
    tensors = stage_tensors(config, LayerRange(0, config.n_layers))
    kind = choice.quantization
    is_native = choice.kernel is Kernel.NATIVE
    stored = torch.bfloat16 if is_native else torch_dtype(choice.dtype)
    products = []
    for part in (*tensors.layers.values(), tensors.head):
        rounded_to = choice.weight_quantization(is_head=part is tensors.head)
        for name, shape in part.items():
            if is_quantizable(name, shape):
                weight = torch.randn(shape).mul_(0.02).to(stored)
                products.append(make_linear(choice, [weight], [], CPU, rounded_to))
    whole = LayerRange(0, config.n_layers)
    small = torch.randn(SMALL).mul_(0.02).to(stored)
    return Format(
        name=choice.name,
        rows_dtype=torch_dtype(choice.dtype),
        products=products,
        small=make_linear(choice, [small], [], CPU, kind),
        read_bytes=read_bytes_per_step(
            config,
            whole,
            WeightForm(dtype=DType.BFLOAT16 if is_native else choice.dtype, quantization=kind),
        ),
    )


def _products_s(kind: Format, n_rows: int) -> float:
    widths = {product.shape[1] for product in kind.products}
    rows = {width: torch.randn(n_rows, width).to(kind.rows_dtype) for width in widths}

    def step() -> None:
        for product in kind.products:
            product(rows[product.shape[1]])

    step()  # memory that lay idle comes back slowly
    return _timed(step)


def _in_cache_s(kind: Format, n_rows: int) -> float:
    n_weights = sum(product.shape[0] * product.shape[1] for product in kind.products)
    n_times = 40
    rows = torch.randn(n_rows, SMALL[1]).to(kind.rows_dtype)
    kind.small(rows)
    seconds = _timed(lambda: [kind.small(rows) for _ in range(n_times)])
    return seconds / n_times * n_weights / (SMALL[0] * SMALL[1])


def _layer_ms(config: ModelConfig, choice: KernelChoice, rounds: int) -> float:
    """Milliseconds of one layer of a decode step: products, attention over 256 keys, norms."""
    sample = synthetic_config(
        config, WeightForm(dtype=choice.dtype, quantization=choice.quantization), 8 << 30
    )
    assert sample is not None
    model = SyntheticModel(sample, choice, CPU, lambda: None)
    model.step(1)
    return min(model.step(1).layers_s for _ in range(4 * rounds)) / sample.n_layers * 1e3


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _as_text(report: dict) -> str:  # type: ignore[type-arg]
    lines = [f"limit {report['limit_gb_s']:.1f} GB/s, threads {report['threads']}, {report['isa']}"]
    for name, figures in report["formats"].items():
        share = figures["share_of_limit"]
        lines.append(
            f"{name}: {figures['read_mib']:.0f} MiB a row"
            + (f", {share:.2f} of the limit" if share else "")
            + f", a layer of a stage {figures['stage_layer_ms']:.2f} ms"
        )
        in_cache = figures["in_cache_ms_by_rows"]
        lines += [
            f"  {rows:4} rows {ms:9.1f} ms, in cache {in_cache[rows]:9.1f} ms"
            for rows, ms in figures["ms_by_rows"].items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
