"""Check and measure on a machine with CUDA what is tested elsewhere without, in one command.

    python scripts/cuda/check_cuda.py
    python scripts/cuda/check_cuda.py --layers 8
    python scripts/cuda/check_cuda.py --device cpu --small      # tries the script, measures nothing

First logits: of a small random model against plain formulas, of graphs against eager steps, of
streamed layers against resident ones. Then times and memory of Llama-3-8B's shape in noise. One
table each; a part that fails says so and the next one begins. It needs torch, numpy, psutil and
tokenizers, and of shardnet the sources: `PYTHONPATH=. python scripts/cuda/check_cuda.py` will do.

Exits 1 where logits differ or a part failed, 2 where torch finds no CUDA device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the steps that benchmarks run
from cuda_device import FULL, SMALL, Gpu
from cuda_logits import SHORT_TRIAL, WHOLE_TRIAL, small_model
from cuda_speed import decoding, limits, loading, overhead, products

from shardnet.model.families.registry import parse_config

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
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
Part = tuple[str, Callable[[], Iterable[Sequence[str]]]]


def main() -> None:
    """Run all parts and exit with what came of them."""
    options = _parse_options()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("check_cuda: torch finds no CUDA device here, nothing was checked", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device(options.device)
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, to try the script"
    )
    print(f"{name}, torch {torch.__version__}")
    if device.type == "cpu":
        torch.set_num_threads(1)
    gpu = Gpu(device, SMALL if options.small else FULL)
    with small_model(device, SHORT_TRIAL if options.small else WHOLE_TRIAL) as model:
        logits: list[Part] = [
            ("logits against plain formulas", model.against_plain),
            ("logits of graphs against eager steps", model.graphs_against_eager),
            ("logits of streamed layers against resident ones", model.streamed_against_resident),
        ]
        is_good = run_parts([*logits, *_speed(gpu, options)], options.seconds)
    raise SystemExit(0 if is_good else 1)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="check_cuda.py")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="tiny shapes and times")
    parser.add_argument("--layers", type=int, default=32, help="of Llama-3-8B's")
    parser.add_argument("--seconds", type=float, default=420, help="no part begins after so many")
    return parser.parse_args()


def _speed(gpu: Gpu, options: argparse.Namespace) -> list[Part]:
    raw = LLAMA_3_8B | (TINY if options.small else {}) | {"num_hidden_layers": options.layers}
    config = parse_config(raw, "Llama-3-8B")
    what = f"{options.layers} layers of Llama-3-8B: rows, time, share"
    return [
        ("limits", partial(limits, gpu)),
        (what, partial(decoding, gpu, config)),
        ("one product: rows, time, share of reading", partial(products, gpu, config)),
        ("what a tiny layer costs: rows, time", partial(overhead, gpu, config)),
        ("loading and streaming", partial(loading, gpu)),
    ]


def run_parts(
    parts: Sequence[Part], limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> bool:
    """Run parts and print a table of each; say whether none failed and no row is WRONG.

    A part that raises ends, and the next one begins; none begins after `limit_s`.
    """
    began, is_good = clock(), True
    for title, run in parts:
        if clock() - began > limit_s:
            print(f"\n{title}: left out, {limit_s:.0f} s are over", flush=True)
            continue
        print(f"\n{title}", flush=True)
        started = clock()
        try:
            for cells in run():
                first, *rest = cells
                line = f"  {first:<44}" + " ".join(f"{cell:<22}" for cell in rest)
                print(line.rstrip(), flush=True)
                is_good = is_good and "WRONG" not in cells
        except Exception as error:  # whatever it is, the other parts can still be had
            is_good = False
            print(f"  failed: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        print(f"  ({clock() - started:.0f} s)", flush=True)
    return is_good


if __name__ == "__main__":
    main()
