"""Measure the host's part of a decode step on a GPU, without one: the driver's calls are recorded.

The product's own code runs a step of each model's real shape, layers and vocabulary; only weights
have no contents, and NVIDIA's driver is a library that does nothing (tests/support/recorder.c). So
what is measured is Python, torch on the CPU and ctypes; what a real driver takes of its own, and
the card, comes on top. Of the processor's time, the least of each part of all steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_steps import make_step
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.recorded_gpu import Call, RecordedDevice, hollow_stage

from shardnet.model.families.registry import parse_config
from shardnet.model.sampling.sampler import Sampler
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.stage.runs import Run
from shardnet.types import SequenceId, SlotId, WireDType

_USUAL = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "num_attention_heads": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-8B": _USUAL
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": _USUAL
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
DRIVER = ("upload", "graph", "launch", "copy", "download")


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench device-host")
    parser.add_argument("--shapes", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="sequences at once")
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        f"{name}, {n_rows} at once": measure(name, n_rows, options.tokens, options.temperature)
        for name in options.shapes
        for n_rows in options.rows
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for title, found in report.items():
        print(title)
        for what, figure in found.items():
            if figure:
                print(f"  {what:<30}{figure:>12,.{int('µs' in what)}f}")


def measure(name: str, n_rows: int, n_tokens: int, temperature: float) -> dict[str, float]:
    """Return microseconds, calls and bytes of a decode step: of each the least of all tokens'."""
    config = parse_config(SHAPES[name], name)
    device = RecordedDevice()
    stage, calls = hollow_stage(config, device, 8192), device.driver.calls
    compute = TorchCompute(stage, Sampler(config.vocab_size), WireDType.FLOAT32)
    params = SamplingParams(temperature=temperature, top_k=40)
    for slot in range(n_rows):
        of = SequenceId(slot), SlotId(slot)
        compute.operate(OpenSequence(sequence_id=of[0], slot=of[1], sampling=params))
    run_alone, marks = stage.run_alone, []

    def run_marked(run: Run) -> Tensor:
        rows = run_alone(run)
        marks.append((time.thread_time(), len(calls)))
        return rows

    stage.run_alone = run_marked  # type: ignore[method-assign]

    def decode(position: int) -> dict[str, float]:
        step = make_step((slot, position, [7]) for slot in range(n_rows))
        calls.clear()
        marks[:] = [(time.thread_time(), 0)]
        compute.compute(step, None)
        marks.append((time.thread_time(), len(calls)))
        found = _of_driver(calls)
        for part, (began, end) in zip(("layers", "tokens"), pairwise(marks), strict=True):
            of_driver_s = sum(call.took_s for call in calls[began[1] : end[1]])
            found[f"µs of Python, {part}"] = (end[0] - began[0] - of_driver_s) * 1e6
        return found

    compute.compute(make_step(((s, 0, [5] * 256) for s in range(n_rows)), n_sampled=0), None)
    steps = [decode(position) for position in range(256, 256 + n_tokens)]
    steps = [step for step in steps if step["graph calls"] and not step["copy calls"]]
    least = {what: min(step[what] for step in steps) for what in steps[-1]}
    return least | {"µs in all": sum(took for what, took in least.items() if what[:2] == "µs")}


def _of_driver(calls: Sequence[Call]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in DRIVER:
        own = [call for call in calls if call.kind == kind and not call.is_in_graph]
        found[f"µs of {kind} calls"] = sum(call.took_s for call in own) * 1e6
        found[f"{kind} calls"] = len(own)
        found[f"bytes of {kind} calls"] = sum(call.n_bytes for call in own)
    return found


if __name__ == "__main__":
    main()
