"""What a plan predicts beside what a run is: one process, and a ring of two, on this machine.

For the bundled model and a random one of the TinyLlama-1.1B shape (2.2 GB), or for the checkpoints
that are named. Each round starts node processes afresh, measures anew, plans, and generates
greedily; the medians of the rounds are shown.

    python scripts/benchmarks/bench_plan.py
    python scripts/benchmarks/bench_plan.py --checkpoint /tmp/tiny-llama --stages 1 2 3 --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_ring import random_1b

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.transport.loop import run
from shardnet.wire.messages.generation import LastRun
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.finding.target import local_processes
from shardnet_cli.flags.options import Access

PROMPT = tuple(range(2, 34))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint over so many stages."""

    checkpoint: Path
    n_stages: int
    threads: int
    n_tokens: int


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, action="append", help="may be given again")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1, help="compute threads per stage")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        _row(
            Case(
                checkpoint=checkpoint.absolute(),
                n_stages=n_stages,
                threads=options.threads,
                n_tokens=options.tokens,
            ),
            options.rounds,
        )
        for checkpoint in options.checkpoint or [DEFAULT_MODEL_PATH, random_1b()]
        for n_stages in options.stages
    ]
    print(json.dumps(rows, indent=2) if options.json else _as_text(rows))


def _row(case: Case, n_rounds: int) -> dict[str, object]:
    runs = [run(_one_round(case)) for _ in range(n_rounds)]
    ranks = range(case.n_stages)
    predicted_tok_s = [told.plan.predicted_tok_s or 0.0 for told in runs]
    tok_s = [told.timing.decode_tok_s for told in runs]
    return {
        "checkpoint": case.checkpoint.name,
        "stages": case.n_stages,
        "predicted_compute_ms": [_median(_planned(runs, rank)) for rank in ranks],
        "compute_ms": [
            _median([told.timing.per_stage[rank].compute_ms for told in runs]) for rank in ranks
        ],
        "predicted_hop_ms": _median([told.plan.stages[0].hop_ms or 0.0 for told in runs]),
        "hop_ms": _median([told.timing.per_stage[0].wire_ms for told in runs]),
        "queue_ms": _median([told.timing.per_stage[-1].queue_ms for told in runs]),
        "predicted_tok_s": _median(predicted_tok_s),
        "tok_s": _median(tok_s),
        "predicted_to_measured": [
            round(a / b, 3) for a, b in zip(predicted_tok_s, tok_s, strict=True)
        ],
        "compute_to_predicted": [
            round(_compute_ms(told) / sum(_planned([told], rank)[0] for rank in ranks), 3)
            for told in runs
        ],
        "measured_undisturbed": [all(each.is_steady for each in told.plan.nodes) for told in runs],
    }


async def _one_round(case: Case) -> LastRun:
    access = Access(key_file="", insecure=True)
    async with contextlib.AsyncExitStack() as stack:
        local = local_processes(case.n_stages, case.threads, access)
        addresses = await stack.enter_async_context(local)
        client = await stack.enter_async_context(connect(addresses[0]))
        choice = ModelChoice(model=str(case.checkpoint), nodes=addresses)
        await client.plan(choice, again=True)
        await client.complete(PROMPT, model=choice, max_tokens=case.n_tokens, ignore_eos=True)
        return await client.last_run()


def _planned(runs: Sequence[LastRun], rank: int) -> list[float]:
    return [told.plan.stages[rank].compute_ms or 0.0 for told in runs]


def _compute_ms(told: LastRun) -> float:
    return sum(stage.compute_ms for stage in told.timing.per_stage)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _as_text(rows: Sequence[dict[str, object]]) -> str:
    return "\n\n".join("\n".join(f"{key}: {value}" for key, value in row.items()) for row in rows)


if __name__ == "__main__":
    main()
