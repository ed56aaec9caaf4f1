"""Measure what several rings behind one head give together, against one ring.

Each ring is one node process on loopback with one thread, on a core of its own where the system
lets a process be put there. Both take turns in one run: the first node alone, then all of them
behind it, as `--optimise throughput` plans. Texts are compared: where one is made changes none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from bench_pause import nodes_on_loopback
from bench_ring import random_1b

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fred", "gina", "hugo")
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What 16 streams took together: tokens per second, first tokens, and their texts."""

    tok_s: float
    ttft_s: float
    texts: list[list[int]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench rings")
    parser.add_argument("--checkpoint", default=DEFAULT_MODEL_NAME)
    parser.add_argument("--random-1b", action="store_true", help="the TinyLlama-1.1B shape")
    parser.add_argument("--rings", type=int, default=2, choices=range(2, len(NAMES) + 1))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.random_1b:
        asked.checkpoint = str(random_1b())
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), asked)))


async def measure(folder: Path, asked: argparse.Namespace) -> int:
    """Take turns, print the medians; return 1 if a text differs."""
    async with nodes_on_loopback(folder, NAMES[: asked.rings]) as nodes:
        where = _put_on_cores([node.pid for node in nodes])
        async with connect(nodes[0].address) as client:
            named = [node.address for node in nodes]
            await client.plan(ModelChoice(model=asked.checkpoint, nodes=named))  # links them
            alone = ModelChoice(model=asked.checkpoint, nodes=named[:1])
            many = ModelChoice(model=asked.checkpoint, optimise="throughput")
            plan = await client.plan(many)
            if len(plan.rings) != asked.rings:
                print(f"no {asked.rings} rings: {plan.why}")
                return 1
            print(f"{asked.checkpoint}: {asked.streams} streams, {where}")
            print(f"plan: {plan.why}")
            turns: dict[str, list[Turn]] = {"one ring": [], f"{asked.rings} rings": []}
            for _ in range(asked.rounds):
                for name, choice in zip(turns, (alone, many), strict=True):
                    turns[name].append(await take_turn(client, choice, asked))
                    await client.unload()
    rates = {name: statistics.median(turn.tok_s for turn in of) for name, of in turns.items()}
    for name, of in turns.items():
        ttft_s = statistics.median(turn.ttft_s for turn in of)
        each = ", ".join(f"{turn.tok_s:.1f}" for turn in of)
        print(f"{name}: {rates[name]:.1f} tokens/s ({each}), first tokens after {ttft_s:.2f} s")
    one, several = turns.values()
    ratios = [b.tok_s / a.tok_s for a, b in zip(one, several, strict=True)]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"ratio: {statistics.median(ratios):.2f} ({each})")
    is_same = all(turn.texts == one[0].texts for turn in (*one, *several))
    print("texts: all the same" if is_same else "texts: DIFFERENT")
    return 0 if is_same else 1


async def take_turn(client: Client, choice: ModelChoice, asked: argparse.Namespace) -> Turn:
    """Load, warm up, and run all streams at once."""
    await _streams(client, choice, asked.streams, asked.prompt, 2)
    return await _streams(client, choice, asked.streams, asked.prompt, asked.tokens, seed=1)


async def _streams(
    client: Client, choice: ModelChoice, n_streams: int, n_prompt: int, n_tokens: int, seed: int = 0
) -> Turn:
    prompts = [
        [(place * 31 + stream * 7 + seed) % 400 + 3 for place in range(n_prompt)]
        for stream in range(n_streams)
    ]
    texts: list[list[int]] = [[] for _ in prompts]
    began_s, first_s = time.perf_counter(), [0.0] * n_streams
    events = client.generate(prompts, GREEDY, model=choice, max_tokens=n_tokens, ignore_eos=True)
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            if event.token_ids:
                first_s[event.index] = first_s[event.index] or time.perf_counter() - began_s
                texts[event.index] += event.token_ids
    took_s = time.perf_counter() - began_s
    return Turn(tok_s=sum(map(len, texts)) / took_s, ttft_s=statistics.median(first_s), texts=texts)


def _put_on_cores(pids: list[int]) -> str:
    """Give each process a core of its own, where the system can; say what was done."""
    if not hasattr(os, "sched_setaffinity"):
        return "one thread a node"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(pids):
        return f"one thread a node, {len(cores)} cores for all"
    for pid, core in zip(pids, cores, strict=False):
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
    return "one core a node"


if __name__ == "__main__":
    main()
