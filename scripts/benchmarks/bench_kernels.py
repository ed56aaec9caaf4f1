"""Benchmark the matrix products of one model shape: bf16, int8, int4, alone and in a stage.

Everything is measured in one run, the formats taking turns: plain streaming reads (the limit), all
products of a step one after the other, and whole decode steps of a stage in random weights. A
format's share of the limit is the time to read its bytes once, divided by what a step takes: the
middle of the rounds' shares, each with the best read just before and after its products. "In
cache" is what a step would take if its weights need not come from memory: the time of a small
product, again and again, scaled to the step's weights. Where that is longer than reading, the
format's arithmetic is what limits so many rows.

With --llama-cpp a prompt of 512 tokens is computed by turns with llama.cpp, as Q8_0 and Q4_0, whose
products are those of int8 and int4. With --isa everything is measured anew, in a process of its
own, with each of these instruction sets forced. With --recurrence the recurrences of known models
are measured instead: a chunk of a prompt, and decode steps whose states lie in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from bench_llama_cpp import compare_prefill
from bench_ring import READ_BYTES, random_1b, read_bandwidth

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.stage_tensors import is_quantizable, stage_tensors
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import ISA_VARIABLE, native_kernels
from shardnet.model.kernels.linear import Kernel, KernelChoice, Linear, make_linear, probe
from shardnet.model.kernels.recurrence import NativeRecurrence, RecurrenceParameters
from shardnet.stage.estimate.memory_estimate import WeightForm, read_bytes_per_step
from shardnet.stage.synthetic_model import SyntheticModel, synthetic_config
from shardnet.types import DType, LayerRange

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
BARS = {"native": 0.85, "packed": 0.85, "int8": 0.85, "int4": 0.75}
"""The share of the limit that each format should reach."""
EIGHT_ROWS_BAR = 1.1
"""The most that eight rows in bfloat16 should take to one row."""
PREFILL_BARS = {"avx512": 3.0}
"""How many times llama.cpp's prefill ours should be, by instruction set; 2 with others."""
CPU = torch.device("cpu")
PLAIN = DeltaNet(
    n_key_heads=16, n_value_heads=32, key_size=128, value_size=128, n_taps=4, layers=(0,)
)
MAMBA = replace(PLAIN, n_key_heads=8, n_value_heads=64, value_size=64, is_mamba=True)
RECURRENCES = {
    "Qwen3-Next, Qwen 3.6 (DeltaNet)": PLAIN,
    "Kimi Linear (KDA)": replace(PLAIN, n_key_heads=32, has_key_decays=True),
    "Nemotron 3 Nano (Mamba-2)": MAMBA,
    "Nemotron-H 8B (Mamba-2)": replace(MAMBA, n_value_heads=128),
}
CHUNK = 256
STATES_BYTES = 128 << 20
"""Of states that decode steps take by turns, more than caches hold."""
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
    parser.add_argument(
        "--llama-cpp", action="store_true", help="prefill beside llama.cpp (llama-cpp-python)"
    )
    parser.add_argument("--recurrence", action="store_true", help="of known models, alone")
    parser.add_argument("--isa", nargs="*", default=[], help="avx512, avx2, portable, ...")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.isa:
        _measure_each(arguments.isa)
        return
    torch.set_num_threads(arguments.threads)
    if arguments.recurrence:
        _print_recurrences(arguments.threads, arguments.rounds)
        return
    config = Checkpoint.open(arguments.checkpoint or random_1b()).config
    report = _measure(config, arguments)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


def _measure_each(isas: list[str]) -> None:
    """Run this script once with each instruction set, in the library and in torch."""
    began = sys.argv.index("--isa")
    ours = [*sys.argv[:began], *sys.argv[began + 1 + len(isas) :]]
    for isa in isas:
        forced = {ISA_VARIABLE: isa}
        if isa == "avx2":
            forced |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        subprocess.run([sys.executable, *ours], env=os.environ | forced, check=True)


@torch.inference_mode()
def _measure(config: ModelConfig, arguments: argparse.Namespace) -> dict[str, object]:
    choices = [_choice(name, config) for name in arguments.formats]
    formats = [_format(config, choice) for choice in choices]
    limits: dict[str, list[float]] = {}
    memory = torch.ones(READ_BYTES // 4)
    times: dict[tuple[str, int], list[float]] = {}
    cached: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for kind in formats:
            before = read_bandwidth(memory)
            for rows in arguments.rows:
                seconds = _products_s(kind, rows)
                times.setdefault((kind.name, rows), []).append(seconds)
                cached.setdefault((kind.name, rows), []).append(_in_cache_s(kind, rows))
            limits.setdefault(kind.name, []).append(max(before, read_bandwidth(memory)))
    limit = max(max(found) for found in limits.values())
    native = native_kernels()
    prefills: dict[str, object] = {}
    if arguments.llama_cpp:
        for name in ("Q8_0", "Q4_0"):
            prefills[name] = asdict(compare_prefill(name, arguments.threads, arguments.rounds))
    return {
        "prefill_of_512": prefills,
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "isa": native.isa.name.lower() if native else "torch",
        "limit_gb_s": limit / 1e9,
        "formats": {
            asked: {
                "name": kind.name,
                "read_mib": kind.read_bytes / 2**20,
                "share_of_limit": statistics.median(
                    kind.read_bytes / read / seconds
                    for read, seconds in zip(limits[kind.name], times[kind.name, 1], strict=True)
                )
                if 1 in arguments.rows
                else None,
                "eight_to_one": statistics.median(
                    eight / one
                    for eight, one in zip(times[kind.name, 8], times[kind.name, 1], strict=True)
                )
                if {1, 8} <= {*arguments.rows}
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
            for asked, kind, choice in zip(arguments.formats, formats, choices, strict=True)
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
    kind = choice.quant
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
            WeightForm(dtype=DType.BFLOAT16 if is_native else choice.dtype, quant=kind),
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
    sample = synthetic_config(config, WeightForm(dtype=choice.dtype, quant=choice.quant), 8 << 30)
    assert sample is not None
    model = SyntheticModel(sample, choice, CPU, lambda: None)
    model.step(1)
    return min(model.step(1).layers_s for _ in range(4 * rounds)) / sample.n_layers * 1e3


@torch.inference_mode()
def _print_recurrences(threads: int, rounds: int) -> None:
    """Print microseconds a layer and position, the least of several runs by turns."""
    kernels = native_kernels()
    if kernels is None:
        raise SystemExit("the compiled library was not built here: there is nothing to measure")
    print(f"microseconds a layer and position, {kernels.isa.name.lower()}, threads {threads}")
    found: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, config in RECURRENCES.items():
            native = NativeRecurrence(config, _random_parameters(config), kernels)
            times = _recurrence_s(native, config, CHUNK, 1), _recurrence_s(native, config, 1, 64)
            best = found.get(name, times)
            found[name] = min(best[0], times[0]), min(best[1], times[1])
    for name, (chunk, single) in found.items():
        print(f"  {name:32} rows of {CHUNK} {chunk * 1e6:7.1f}   one row {single * 1e6:7.1f}")


def _recurrence_s(native: NativeRecurrence, config: DeltaNet, n_rows: int, n_times: int) -> float:
    """Return the least seconds of a row in calls of `n_rows`, each with another state."""
    n_states = min(n_times, STATES_BYTES // (4 * config.key_size * config.value_width))
    states = [torch.randn(config.state.recurrent) for _ in range(n_states)]
    rows = torch.randn(config.n_taps - 1 + n_rows, config.mixed_width).bfloat16()
    gate = torch.randn(n_rows, config.value_width).bfloat16()
    write, decay = torch.randn(n_rows, config.n_value_heads), torch.randn(n_rows, config.n_decays)
    return (
        min(
            _timed(partial(native, rows, gate, write, decay, *[states[turn % n_states]] * 2))
            for turn in range(n_times + 4)
        )
        / n_rows
    )


def _random_parameters(config: DeltaNet) -> RecurrenceParameters:
    n_heads = config.n_value_heads
    return RecurrenceParameters(
        taps=torch.randn(config.n_taps, config.mixed_width),
        decay_rate=-torch.rand(n_heads),
        decay_bias=torch.randn(config.n_decays),
        norm_weight=None if config.is_mamba else torch.ones(config.value_size),
        norm_eps=1e-6,
        taps_bias=torch.randn(config.mixed_width) if config.is_mamba else None,
        skip=torch.randn(n_heads) if config.is_mamba else None,
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _as_text(report: dict) -> str:  # type: ignore[type-arg]
    lines = [f"limit {report['limit_gb_s']:.1f} GB/s, threads {report['threads']}, {report['isa']}"]
    for name, figures in report["formats"].items():
        lines.append(
            f"{name} ({figures['name']}): {figures['read_mib']:.0f} MiB a row, "
            f"a layer of a stage {figures['stage_layer_ms']:.2f} ms"
        )
        if (share := figures["share_of_limit"]) and name in BARS:
            lines.append(f"  of the limit {share:.2f} ({_bar(share, BARS[name], is_least=True)})")
        if eight := figures["eight_to_one"]:
            bar = _bar(eight, EIGHT_ROWS_BAR, is_least=False) if name == "native" else "no bar"
            lines.append(f"  8 rows to 1 row {eight:.2f} ({bar})")
        in_cache = figures["in_cache_ms_by_rows"]
        lines += [
            f"  {rows:4} rows {ms:9.1f} ms, in cache {in_cache[rows]:9.1f} ms"
            for rows, ms in figures["ms_by_rows"].items()
        ]
    for kind, prefill in report["prefill_of_512"].items():
        bar = _bar(prefill["ratio"], PREFILL_BARS.get(report["isa"], 2.0), is_least=True)
        lines.append(
            f"prefill of 512, {kind}: {prefill['shardnet_tok_s']:.1f} tok/s, llama.cpp "
            f"{prefill['llama_cpp_tok_s']:.1f}, {prefill['ratio']:.2f} times ({bar})"
        )
    return "\n".join(lines)


def _bar(found: float, bar: float, *, is_least: bool) -> str:
    """Say whether a figure meets its bar."""
    met = found >= bar if is_least else found <= bar
    return f"bar {'≥' if is_least else '≤'} {bar}: {'met' if met else 'MISSED'}"


if __name__ == "__main__":
    main()
