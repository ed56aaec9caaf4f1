"""Benchmark a checkpoint and a split against the same weights without any wire.

Everything is measured in one run, the contestants taking turns, so that ratios hold on a machine
whose speed drifts: plain streaming reads (the limit), one process that calls the layers directly
(no wire), and the ring over node processes on loopback.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from bench_steps import make_step

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationTiming
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.profile import available_cores
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.runtime.stage.executor import Executor
from shardnet.sampling_params import SamplingParams
from shardnet.stage.estimate.memory_estimate import WeightForm, read_bytes_per_step
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.transport.loop import run
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    LayerRange,
    SlotId,
    parse_layers,
)
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.finding.target import local_processes
from shardnet_cli.flags.options import Access

READ_BYTES = 1536 * 2**20
CHUNKS_TO_TRY = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    checkpoint: Path
    stages: int
    layers: str
    threads: int
    n_prompt: int
    n_tokens: int
    rounds: int
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRound:
    """One turn of everything."""

    alone_prefill_s: dict[int, float]
    alone_step_s: float
    ring: GenerationTiming


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench")
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_MODEL_PATH)
    parser.add_argument(
        "--random-1b",
        action="store_true",
        help="make and use a random checkpoint of the TinyLlama-1.1B shape in bfloat16 (2.2 GB)",
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", default="", help="for example 0-11,11-22")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per stage")
    parser.add_argument("--prompt", type=int, default=512, help="tokens to prefill")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--key-file", default="", help="a cluster key: links are TLS; without it they are not"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    settings = Settings(
        checkpoint=random_1b() if arguments.random_1b else arguments.checkpoint.absolute(),
        stages=arguments.stages,
        layers=arguments.layers,
        threads=arguments.threads,
        n_prompt=arguments.prompt,
        n_tokens=arguments.tokens,
        rounds=arguments.rounds,
        access=Access(key_file=arguments.key_file, insecure=not arguments.key_file),
    )
    report = run(_measure(settings))
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


async def _measure(settings: Settings) -> dict[str, object]:
    torch.set_num_threads(settings.threads)
    limit_gb_s = max(read_bandwidth() for _ in range(3)) / 1e9
    checkpoint = Checkpoint.open(settings.checkpoint)
    config = checkpoint.config
    choice = probe(torch.device("cpu"), "auto", config.checkpoint_dtype)
    whole = LayerRange(0, config.n_layers)
    step_bytes = read_bytes_per_step(config, whole, WeightForm(dtype=choice.dtype))
    started = time.perf_counter()
    model = _load(checkpoint, whole, choice, settings)
    alone_load_s = time.perf_counter() - started
    alone = Executor("bench", set_up=lambda: torch.set_num_threads(settings.threads))
    access = settings.access
    async with local_processes(settings.stages, settings.threads, access) as addresses:
        message = _message(settings, addresses, choice, config.vocab_size)
        async with connect(addresses[0], access.identity()) as client:
            first = await _ring_turn(client, message)
            rounds = [
                await _turn(
                    client, _other_prompt(message, turn), alone, model, settings, config.vocab_size
                )
                for turn in range(1, settings.rounds + 1)
            ]
    alone.close()
    return _report(settings, choice, limit_gb_s, step_bytes, alone_load_s, first, rounds)


async def _turn(
    client: Client,
    message: Generate,
    alone: Executor,
    model: StageModel,
    settings: Settings,
    vocab_size: int,
) -> OneRound:
    prefill, step_s = await alone.run(lambda: _turn_alone(model, settings, vocab_size))
    return OneRound(
        alone_prefill_s=prefill, alone_step_s=step_s, ring=await _ring_turn(client, message)
    )


def _turn_alone(
    model: StageModel, settings: Settings, vocab_size: int
) -> tuple[dict[int, float], float]:
    """Seconds of a prefill by chunk rows, and of a decode step, without any wire."""
    prompt = _prompt(settings, vocab_size)
    chunks = [rows for rows in CHUNKS_TO_TRY if rows <= max(settings.n_prompt, CHUNKS_TO_TRY[0])]
    prefill = {rows: _prefill_alone(model, prompt, rows) for rows in chunks}
    return prefill, _decode_alone(model, len(prompt), settings.n_tokens)


async def _ring_turn(client: Client, message: Generate) -> GenerationTiming:
    assert message.token_ids is not None
    [result] = await client.complete(
        message.token_ids, model=message.choice, max_tokens=message.max_tokens, ignore_eos=True
    )
    if result.usage.n_generated != message.max_tokens:
        raise SystemExit(f"the ring made {result.usage.n_generated} of {message.max_tokens} tokens")
    return result.timing


def read_bandwidth(memory: torch.Tensor | None = None) -> float:
    """Bytes per second of the best of three streaming reads, with the threads of one stage.

    `memory` is float32 of READ_BYTES, allocated and filled if it is None, which takes seconds.
    """
    memory = torch.ones(READ_BYTES // 4) if memory is None else memory
    best_s = math.inf
    for _ in range(3):
        started = time.perf_counter()
        memory.sum()
        best_s = min(best_s, time.perf_counter() - started)
    return READ_BYTES / best_s


def _load(
    checkpoint: Checkpoint, layers: LayerRange, choice: KernelChoice, settings: Settings
) -> StageModel:
    positions = settings.n_prompt + settings.n_tokens + 1
    return load_stage(
        checkpoint,
        layers,
        choice=choice,
        device=torch.device("cpu"),
        room_blocks=2 * (positions // BLOCK_POSITIONS + 1),
        progress=lambda done, total: None,
    )


def _prefill_alone(model: StageModel, prompt: Sequence[int], chunk_rows: int) -> float:
    model.kv.free(SlotId(0))
    started = time.perf_counter()
    for start in range(0, len(prompt), chunk_rows):
        rows = prompt[start : start + chunk_rows]
        is_last = start + len(rows) == len(prompt)
        model.forward(make_step([(0, start, rows)], n_sampled=int(is_last)), None)
    return time.perf_counter() - started


def _decode_alone(model: StageModel, start: int, n_tokens: int) -> float:
    """Mean seconds of a greedy decode step, behind a prefill of `start` positions."""
    token, steps = 1, []
    for position in range(start, start + n_tokens):
        started = time.perf_counter()
        logits = model.forward(make_step([(0, position, [token])]), None)
        token = int(logits[0].argmax())
        steps.append(time.perf_counter() - started)
    return statistics.fmean(steps)


def _prompt(settings: Settings, vocab_size: int) -> list[int]:
    return [(place * 7919 + 13) % vocab_size for place in range(settings.n_prompt)]


def _other_prompt(message: Generate, turn: int) -> Generate:
    """Begin the prompt with another token: a ring would not compute one again that it has seen."""
    assert message.token_ids is not None
    return msgspec.structs.replace(message, token_ids=[turn, *message.token_ids[1:]])


def _message(
    settings: Settings, addresses: list[str], choice: KernelChoice, vocab_size: int
) -> Generate:
    layers = parse_layers(settings.layers) if settings.layers else ()
    return Generate(
        request=0,
        choice=ModelChoice(
            model=str(settings.checkpoint),
            nodes=addresses,
            layers=[(part.start, part.end) for part in layers],
            dtype=choice.dtype.value,
        ),
        sampling=SamplingParams(),
        token_ids=_prompt(settings, vocab_size),
        max_tokens=settings.n_tokens,
        ignore_eos=True,
    )


def _report(
    settings: Settings,
    choice: KernelChoice,
    limit_gb_s: float,
    step_bytes: int,
    alone_load_s: float,
    first: GenerationTiming,
    rounds: Sequence[OneRound],
) -> dict[str, object]:
    limit_tok_s = limit_gb_s * 1e9 / step_bytes
    alone_tok_s = statistics.median(1 / turn.alone_step_s for turn in rounds)
    ring_tok_s = statistics.median(turn.ring.decode_tok_s for turn in rounds)
    chunk_s = {
        rows: statistics.median(turn.alone_prefill_s[rows] for turn in rounds)
        for rows in rounds[0].alone_prefill_s
    }
    best_rows = min(chunk_s, key=chunk_s.__getitem__)
    ring_prefill_s = statistics.median(turn.ring.ttft_s for turn in rounds)
    return {
        "machine": f"{platform.machine()}, {available_cores()} cores, torch {torch.__version__}",
        "checkpoint": settings.checkpoint.name,
        "kernel": choice.name,
        "stages": settings.stages,
        "threads_per_stage": settings.threads,
        "read_gb_s": round(limit_gb_s, 2),
        "weight_bytes_per_token": step_bytes,
        "limit_tok_s": round(limit_tok_s, 3),
        "load_s": {"one_process": round(alone_load_s, 2), "ring": round(first.load_s, 2)},
        "decode_tok_s": {
            "one_process": round(alone_tok_s, 3),
            "ring": round(ring_tok_s, 3),
            "ring_to_one_process": round(
                statistics.median(t.ring.decode_tok_s * t.alone_step_s for t in rounds), 3
            ),
            "one_process_to_limit": round(alone_tok_s / limit_tok_s, 3),
            "ring_to_limit": round(ring_tok_s / limit_tok_s, 3),
        },
        "prefill_tok_s": {
            "rows": settings.n_prompt,
            "one_process_by_chunk_rows": {
                str(rows): round(settings.n_prompt / s, 1) for rows, s in chunk_s.items()
            },
            "one_process_best_chunk_rows": best_rows,
            "ring_chunk_rows": PREFILL_CHUNK_ROWS,
            "ring": round(settings.n_prompt / ring_prefill_s, 1),
            "ring_to_best_one_process": round(
                statistics.median(min(t.alone_prefill_s.values()) / t.ring.ttft_s for t in rounds),
                3,
            ),
        },
        "hop_us": {
            "median": round(statistics.median(_hop_us(turn.ring) for turn in rounds), 1),
            "each_round": [round(_hop_us(turn.ring), 1) for turn in rounds],
        },
        "stage_compute_ms": [round(stage.compute_ms, 3) for stage in rounds[-1].ring.per_stage],
    }


def _hop_us(timing: GenerationTiming) -> float:
    """What a hop costs beyond compute: its share of the wire, and the queueing before a stage."""
    stages = timing.per_stage
    if len(stages) < 2:
        return 0.0
    return 1000 * sum(stage.wire_ms + stage.queue_ms for stage in stages) / len(stages)


def random_1b() -> Path:
    """Make the random checkpoint once, beside the system's other temporary files."""
    folder = Path(tempfile.gettempdir()) / "shardnet-bench-tinyllama-1.1b"
    if not (folder / "config.json").exists():
        script = Path(__file__).parents[1] / "make_checkpoint.py"
        if os.spawnv(os.P_WAIT, sys.executable, [sys.executable, str(script), str(folder)]):
            raise SystemExit(f"{script} failed")
    return folder


def _as_text(report: dict[str, object]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in report.items())


if __name__ == "__main__":
    main()
