"""Measure a stage that streams its layers from disk: one sequence against 16, beside resident.

    python scripts/make_checkpoint.py /tmp/tiny-llama
    python scripts/benchmarks/bench_streaming.py /tmp/tiny-llama --streamed 22 --quant int8

All in one run and one process, decode steps taking turns: the disk alone (the limit), one sequence,
and 16 sequences in one step and in 16 steps that wait together. With `--cold` the files' pages are
dropped before every step, where the system lets us (Linux): that is a model larger than the
machine's memory; without, it is one larger than the node's `--memory`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench_steps import make_step

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.linear import probe
from shardnet.runtime.loading.measuring import measure_disk
from shardnet.stage.estimate.memory_estimate import (
    layer_stream_bytes,
    stage_weight_bytes,
)
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.runs import Run
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    LayerRange,
    blocks_for,
)

CPU = torch.device("cpu")
N_SEQUENCES = 16


def main() -> None:
    """Measure and print one line per contestant."""
    options = _parse_options()
    torch.set_num_threads(options.threads)
    checkpoint = Checkpoint.open(options.checkpoint)
    config, kind = checkpoint.config, Quantization.named(options.quant)
    choice = probe(CPU, "auto", config.checkpoint_dtype, kind)
    layers = LayerRange(0, config.n_layers)
    n_streamed = min(options.streamed or config.n_layers, config.n_layers)
    packs = None
    if kind is not None:
        folder = options.packs or options.checkpoint / "packs"
        packs = PackCache(folder, str(options.checkpoint), "bench", kind)

    def load(n_streamed: int) -> StageModel:
        return load_stage(
            checkpoint,
            layers,
            choice=choice,
            device=CPU,
            room_blocks=(N_SEQUENCES + 1) * blocks_for(options.steps + 1),
            progress=lambda done, total: None,
            packs=packs,
            n_streamed=n_streamed,
        )

    files = [
        path for path in (options.checkpoint, *options.checkpoint.rglob("*")) if path.is_file()
    ]
    files += list((options.packs or options.checkpoint).rglob("*.packed"))
    streamed = load(n_streamed)
    contestants: dict[str, Callable[[int], int]] = {
        "1 sequence, streamed": lambda position: _step(streamed, position, [[16]]),
        f"{N_SEQUENCES} sequences in one step, streamed": lambda position: _step(
            streamed, position, [list(range(N_SEQUENCES))]
        ),
        f"{N_SEQUENCES} steps that wait together, streamed": lambda position: _step(
            streamed, position, [[slot] for slot in range(N_SEQUENCES)]
        ),
    }
    if options.resident:
        resident = load(0)
        contestants["1 sequence, resident"] = lambda position: _step(resident, position, [[16]])
    form = weight_form(checkpoint, choice)
    read_bytes = n_streamed * layer_stream_bytes(config, form)
    memory = stage_weight_bytes(config, layers, form, n_streamed)
    print(
        f"{choice.name}, {n_streamed} of {config.n_layers} layers streamed: "
        f"{read_bytes / 2**30:.2f} GiB a step, weights in memory {memory / 2**30:.2f} GiB"
    )
    disk = measure_disk(options.checkpoint)
    if disk:
        print(f"disk: {disk / 1e6:.0f} MB/s, {read_bytes / disk * 1e3:.0f} ms for these layers")
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for position in range(options.steps):
        for name, step in contestants.items():
            if options.cold:
                drop_pages(files)
            began = time.perf_counter()
            n_tokens = step(position)
            took_s = time.perf_counter() - began
            if position:  # the first one only warms up
                times[name].append(took_s / n_tokens)
    for name, per_token in times.items():
        median_s = statistics.median(per_token)
        print(f"{name}: {1 / median_s:.2f} tokens/s ({median_s * 1e3:.1f} ms a token)")
    print(f"layers fetched: {streamed.n_fetched}")
    if streamed.experts is not None and (n_used := streamed.experts.n_used):
        n_read = streamed.experts.n_read
        print(f"experts: {n_used} used, {n_read} read, {1 - n_read / n_used:.0%} were in memory")


def _step(model: StageModel, position: int, batches: Sequence[Sequence[int]]) -> int:
    """Decode one token of each slot; every list of slots is a step. Returns the tokens.

    They differ, so that rows visit different experts.
    """
    steps = [
        make_step((slot, position, [(977 * slot + 7919 * position) % 30000]) for slot in slots)
        for slots in batches
    ]
    runs = [Run(batch=step, hidden=None) for step in steps]
    for run, rows in zip(runs, model.run_together(runs), strict=True):
        if isinstance(rows, Exception):
            raise rows
        model.logits(rows)[: run.batch.n_rows].argmax(-1)
    return sum(len(slots) for slots in batches)


def drop_pages(files: Sequence[Path]) -> None:
    """Have the system forget what it keeps in memory of files. Ends the program elsewhere."""
    if sys.platform != "linux":
        raise SystemExit("--cold works on Linux only")
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--streamed", type=int, default=0, help="layers; all by default")
    parser.add_argument("--quant", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--packs", type=Path, help="where rounded weights are kept")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="drop the files' pages before each")
    parser.add_argument("--resident", action="store_true", help="measure all in memory beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
