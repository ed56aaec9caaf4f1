#!/usr/bin/env python3
"""Measure a stage cut over groups of cores beside the same stage whole, with as many threads.

Both are loaded, and take turns: what is printed are medians, decode steps at one position and whole
prompt chunks.

    scripts/bench shards                         the bundled model, and one of 1.1B random weights
    scripts/bench shards --checkpoint DIR --shards 4 --quant int4
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch
from bench_steps import make_step

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.cores import group_cores, read_cores
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.runtime.shards.load_shard import load_leading
from shardnet.runtime.stage.executor import on_cores
from shardnet.runtime.stage.stage_order import StageDevice, StageOrder
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.stage_form import StageForm
from shardnet.types import PREFILL_CHUNK_ROWS, DType, LayerRange, Quant

CPU = torch.device("cpu")
ROOM_BLOCKS = 8
ROUNDS = 7
MEASURED_S = 30.0
"""After which no further round begins."""
DECODED = 8
"""Decode steps in a turn."""


def main() -> None:
    """Print a table for each checkpoint."""
    options = _parse_options()
    with _checkpoints(options.checkpoint) as folders:
        for folder in folders:
            _measure(folder, options)


def _measure(folder: Path, options: argparse.Namespace) -> None:
    checkpoint = Checkpoint.open(folder)
    config, n_shards = checkpoint.config, options.shards
    quantization = Quantization.named(options.quant)
    dtype = config.checkpoint_dtype or DType.FLOAT32
    choice = probe(CPU, dtype, config.checkpoint_dtype, quantization)
    groups = group_cores(read_cores(), n_shards)
    whole = load_stage(
        checkpoint,
        LayerRange(0, config.n_layers),
        choice=choice,
        device=CPU,
        room_blocks=ROOM_BLOCKS,
        progress=lambda done, total: None,
    )
    with on_cores(groups[0]):
        sharded = _load_shards(folder, checkpoint, choice, groups, options.quant)
    print(f"\n{folder.name}: {choice.name}, {n_shards} shards of {len(groups[0])} core(s)")
    n_threads = sum(len(group) for group in groups)
    turns = {"whole": (whole, n_threads, ()), "shards": (sharded, len(groups[0]), groups[0])}
    times: dict[tuple[str, str], list[float]] = {}
    began = time.monotonic()
    for done in range(ROUNDS):
        if done > 1 and time.monotonic() - began > MEASURED_S:
            break
        for name, (model, threads, cores) in turns.items():
            torch.set_num_threads(threads)
            with on_cores(cores):
                for kind, seconds in _turn(model, config.vocab_size):
                    times.setdefault((kind, name), []).append(seconds)
    for kind, n_tokens in (("decode", 1), ("prefill", PREFILL_CHUNK_ROWS)):
        speeds = {name: n_tokens / median(times[kind, name]) for name in turns}
        ratio = speeds["shards"] / speeds["whole"]
        print(
            f"  {kind:8}{speeds['whole']:9.2f} tok/s whole, {n_threads} threads"
            f"{speeds['shards']:9.2f} tok/s sharded   ratio {ratio:.2f}"
        )


def _turn(model: StageModel, vocab_size: int) -> Iterator[tuple[str, float]]:
    """Time a prompt chunk, then decode steps behind it."""
    ids = [(7 * n + 3) % vocab_size for n in range(PREFILL_CHUNK_ROWS)]
    batch = make_step([(0, 0, ids)])
    yield "prefill", _timed(partial(model.forward, batch, None))
    for step in range(DECODED):
        decode = make_step([(0, PREFILL_CHUNK_ROWS + step, [ids[step]])])
        yield "decode", _timed(partial(model.forward, decode, None))
    model.kv.trim(make_step([(0, 0, ids)]).groups[0].slot, 0)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _load_shards(
    folder: Path,
    checkpoint: Checkpoint,
    choice: KernelChoice,
    groups: Sequence[tuple[int, ...]],
    quant: Quant,
) -> StageModel:
    order = StageOrder(
        form=StageForm(
            model=str(folder),
            model_id=checkpoint.model_id,
            dtype=checkpoint.config.checkpoint_dtype or DType.FLOAT32,
            context=checkpoint.config.default_context,
            quant=quant,
        ),
        folder=folder,
        layers=LayerRange(0, checkpoint.config.n_layers),
        is_tail=True,
        devices=tuple(
            StageDevice(place=place, name=f"cpu:{place}", cores=cores)
            for place, cores in enumerate(groups)
        ),
    )
    return load_leading(
        order,
        checkpoint,
        choice,
        ROOM_BLOCKS,
        packs=None,
        files=(),
        progress=lambda done, total: None,
    )


@contextmanager
def _checkpoints(asked: Path | None) -> Iterator[list[Path]]:
    """Give the checkpoint that was asked for, or the bundled one and a random one."""
    if asked is not None:
        yield [asked]
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as made:
        script = Path(__file__).parents[1] / "make_checkpoint.py"
        subprocess.run([sys.executable, str(script), f"{made}/random-1.1b"], check=True)
        yield [DEFAULT_MODEL_PATH, Path(made) / "random-1.1b"]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="measure this one instead")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--quant", choices=["none", "int8", "int4"], default="none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
