"""Benchmark speculation by the model's own layer: off, ngram and mtp, by turns, on one ring.

Figures are medians over rounds of one run, in which the contestants take turns. Accepted are the
drafts that became tokens, per step of a sequence: without drafts a step gives one token.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench_rig import Stream, follow, open_ring, request

from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.scheduling.drafting import NgramDrafts
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.transport.loop import run

OPENINGS = (
    "It is a truth universally acknowledged",
    "She was the youngest of the two daughters of a most",
    "The evening was fine, and the gentlemen",
    '"My dear Miss Bennet," said he,',
)
KINDS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8, seed=7),
}


def contestants(draft_tokens: int) -> dict[str, Speculation | None]:
    """What drafts, by its name."""
    return {
        "off": None,
        "ngram": Speculation(make_draft_source=lambda wake: NgramDrafts()),
        "mtp": Speculation(make_draft_source=None, most_by_ring=draft_tokens),
    }


async def main() -> None:
    """Measure and print one JSON object."""
    options = _parse_options()
    tokenizer = Tokenizer.load(options.checkpoint)
    prompts = [tokenizer.encode(text, bos="auto") for text in OPENINGS]
    tokenizer.close()
    report: dict[str, Any] = {}
    ring = open_ring(options.checkpoint, options.stages, options.threads, mtp=True)
    async with ring as engine:
        await _measure(engine, prompts, options, SamplingParams())  # caches, and the cost of rows
        for kind, sampling in KINDS.items():
            report[kind] = await _measure(engine, prompts, options, sampling)
    print(json.dumps(report, indent=2))


async def _measure(
    engine: Engine, prompts: list[list[int]], options: argparse.Namespace, sampling: SamplingParams
) -> dict[str, Any]:
    streams: dict[str, list[Stream]] = {}
    for _ in range(options.rounds):
        for name, speculation in contestants(options.draft_tokens).items():
            for prompt in prompts:
                asked = request(prompt, options.tokens, speculation=speculation, sampling=sampling)
                streams.setdefault(name, []).append(await follow(engine, asked))
    texts = {name: [stream.tokens for stream in some] for name, some in streams.items()}
    plain = [stream.tok_s for stream in streams["off"]]
    return {
        name: {
            "tok_s": round(statistics.median(stream.tok_s for stream in some), 1),
            "speedup": round(
                statistics.median(s.tok_s / p for s, p in zip(some, plain, strict=True)), 3
            ),
            "accepted": sum(s.n_accepted for s in some) / max(1, sum(s.n_drafted for s in some)),
            "accepted_per_step": round(
                sum(s.n_accepted for s in some) / sum(len(s.tokens) - s.n_accepted for s in some),
                3,
            ),
            "same_tokens": texts[name] == texts["off"],
        }
        for name, some in streams.items()
    }


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="such as scripts/train_drafters.py mtp writes",
    )
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--draft-tokens", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    run(main())
