"""Show what narrower wires cost and save: the logits' error and the time, side by side.

For each wire dtype: bytes of a row, the time to pack and unpack rows, what a hop of one row takes
on links of given rates, how far the logits move, and what a ring over node processes on loopback
makes with it. The ring's turns alternate, so that ratios hold on a machine whose speed drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.model.kernels.codec import pack_rows, torch_dtype, unpack_rows
from shardnet.runtime.loading.model_facts import ModelFacts, identify
from shardnet.runtime.loading.wire_loss import measure_wire_loss
from shardnet.transport.loop import run
from shardnet.types import DType, WireDType
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.finding.target import local_processes
from shardnet_cli.flags.options import Access

PROMPT = (1, 2, 3, 4)
ROWS = (1, 256)
REPEATS = 50
RATES_MBIT = (100, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    checkpoint: Path
    stages: int
    n_tokens: int
    rounds: int


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_MODEL_PATH)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="tokens the ring decodes a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the ring; 0 for none")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(
        checkpoint=arguments.checkpoint.absolute(),
        stages=arguments.stages,
        n_tokens=arguments.tokens,
        rounds=arguments.rounds,
    )
    report = _measure(settings)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


def _measure(settings: Settings) -> dict[str, dict[str, object]]:
    facts = identify(settings.checkpoint)
    dtype = facts.config.checkpoint_dtype or DType.FLOAT32
    wires = [WireDType.own(dtype)]
    wires += [w for w in (WireDType.FLOAT16, WireDType.BFLOAT16, WireDType.INT8) if w not in wires]
    ring = run(_ring_tok_s(settings, dtype, wires)) if settings.rounds else {}
    return {
        wire.value: _figures(facts, dtype, wire, settings.stages)
        | ({"ring_tok_s": round(ring[wire], 1)} if ring else {})
        for wire in wires
    }


def _figures(facts: ModelFacts, dtype: DType, wire: WireDType, n_stages: int) -> dict[str, object]:
    config = facts.config
    row_bytes = wire.row_bytes(config.hidden_size)
    borders = {config.n_layers * stage // n_stages: wire for stage in range(1, n_stages)}
    error = measure_wire_loss(facts, dtype, borders, lambda done, total: None)
    packing = {rows: _packing_us(config.hidden_size, dtype, wire, rows) for rows in ROWS}
    return {
        "row_bytes": row_bytes,
        "pack_and_unpack_us": {
            f"{rows} rows": f"{pack:.0f} + {unpack:.0f}" for rows, (pack, unpack) in packing.items()
        },
        "send_and_round_us": {
            f"{rate} Mbit/s": round(row_bytes * 8 / rate + sum(packing[1])) for rate in RATES_MBIT
        },
        "error": {name: float(f"{value:.3g}") for name, value in asdict(error).items()},
    }


def _packing_us(width: int, dtype: DType, wire: WireDType, n_rows: int) -> tuple[float, float]:
    """Best times to pack and to unpack so many rows, in microseconds."""
    rows = torch.randn(n_rows, width).to(torch_dtype(dtype))
    payload = pack_rows(rows, wire)
    pack_us = _best_us(lambda: pack_rows(rows, wire))
    unpack_us = _best_us(
        lambda: unpack_rows(payload, wire, n_rows, width, rows.device).to(rows.dtype)
    )
    return pack_us, unpack_us


def _best_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


async def _ring_tok_s(
    settings: Settings, dtype: DType, wires: Sequence[WireDType]
) -> dict[WireDType, float]:
    """Median tokens per second of the ring with each wire, the wires taking turns."""
    turns: dict[WireDType, list[float]] = {wire: [] for wire in wires}
    access = Access(key_file="", insecure=True)
    async with (
        local_processes(settings.stages, 1, access) as addresses,
        connect(addresses[0]) as client,
    ):
        for _ in range(settings.rounds):
            for wire in wires:
                choice = ModelChoice(
                    model=str(settings.checkpoint),
                    nodes=addresses,
                    dtype=dtype.value,
                    wire_dtype="" if wire is WireDType.own(dtype) else wire.value,
                )
                [result] = await client.complete(
                    PROMPT, model=choice, max_tokens=settings.n_tokens, ignore_eos=True
                )
                turns[wire].append(result.timing.decode_tok_s)
    return {wire: statistics.median(times) for wire, times in turns.items()}


def _as_text(report: dict[str, dict[str, object]]) -> str:
    return "\n".join(
        f"{wire}: " + "; ".join(f"{name} {value}" for name, value in figures.items())
        for wire, figures in report.items()
    )


if __name__ == "__main__":
    main()
