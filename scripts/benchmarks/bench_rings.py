"""Measure what several rings behind one head give together, against one ring.

Each ring is one node process on loopback with one thread, on a core of its own where the system
lets a process be put there. Three take turns in one run: the first node alone; the same nodes as
rings apart, each asked directly, which is what the cores allow; and all of them behind the first,
as `--optimise throughput` plans. Texts are compared: where one is made changes none of it.
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
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

from bench_losses import nodes_on_loopback
from bench_ring import random_1b

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fred", "gina", "hugo")
GREEDY = SamplingParams()
FIGURES = ("tok_s", "ttft_s")


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
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(nodes_on_loopback(folder, NAMES[: asked.rings]))
        where = _put_on_cores([node.pid for node in nodes])
        addresses = [node.address for node in nodes]
        clients = [await stack.enter_async_context(connect(at)) for at in addresses]
        await clients[0].plan(ModelChoice(model=asked.checkpoint, nodes=addresses))  # links them
        many = ModelChoice(model=asked.checkpoint, optimise="throughput")
        plan = await clients[0].plan(many)
        if len(plan.rings) != asked.rings:
            print(f"no {asked.rings} rings: {plan.why}")
            return 1
        print(f"{asked.checkpoint}: {asked.streams} streams, {where}")
        print(f"plan: {plan.why}")
        alone = [ModelChoice(model=asked.checkpoint, nodes=[at]) for at in addresses]
        contestants = {
            "one ring": [(clients[0], alone[0])],
            "rings apart, no head before them": [*zip(clients, alone, strict=True)],
            f"{asked.rings} rings behind one head": [(clients[0], many)],
        }
        turns: dict[str, list[Turn]] = {name: [] for name in contestants}
        for _ in range(asked.rounds):
            for name, rings in contestants.items():
                turns[name].append(await take_turn(rings, asked))
                for client, _ in rings:
                    await client.unload()
    for name, of in turns.items():
        rate, ttft_s = (statistics.median(getattr(t, of_what) for t in of) for of_what in FIGURES)
        each = ", ".join(f"{turn.tok_s:.1f}" for turn in of)
        print(f"{name}: {rate:.1f} tokens/s ({each}), first tokens after {ttft_s:.2f} s")
    one, apart, several = turns.values()
    for words, than in (("one ring", one), ("what these cores allow", apart)):
        ratios = [b.tok_s / a.tok_s for a, b in zip(than, several, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"to {words}: {statistics.median(ratios):.2f} ({each})")
    is_same = all(turn.texts == one[0].texts for of in turns.values() for turn in of)
    print("texts: all the same" if is_same else "texts: DIFFERENT")
    return 0 if is_same else 1


async def take_turn(rings: Sequence[tuple[Client, ModelChoice]], asked: argparse.Namespace) -> Turn:
    """Load, warm up, and run all streams at once, an equal part of them on each of the rings."""
    await _run(rings, asked.streams, asked.prompt, 2)
    return await _run(rings, asked.streams, asked.prompt, asked.tokens, seed=1)


async def _run(
    rings: Sequence[tuple[Client, ModelChoice]],
    n_streams: int,
    n_prompt: int,
    n_tokens: int,
    seed: int = 0,
) -> Turn:
    prompts = [
        [(place * 31 + stream * 7 + seed) % 400 + 3 for place in range(n_prompt)]
        for stream in range(n_streams)
    ]
    n_each, began_s = -(-n_streams // len(rings)), time.perf_counter()
    parts = await asyncio.gather(
        *(
            _streams(client, choice, prompts[place * n_each : (place + 1) * n_each], n_tokens)
            for place, (client, choice) in enumerate(rings)
        )
    )
    took_s = time.perf_counter() - began_s
    texts = [text for part, _ in parts for text in part]
    first_s = [at_s - began_s for _, part in parts for at_s in part]
    return Turn(tok_s=sum(map(len, texts)) / took_s, ttft_s=statistics.median(first_s), texts=texts)


async def _streams(
    client: Client, choice: ModelChoice, prompts: list[list[int]], n_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Return the texts, and when the first token of each came."""
    texts: list[list[int]] = [[] for _ in prompts]
    first_s = [0.0] * len(prompts)
    events = client.generate(prompts, GREEDY, model=choice, max_tokens=n_tokens, ignore_eos=True)
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            if event.token_ids:
                first_s[event.index] = first_s[event.index] or time.perf_counter()
                texts[event.index] += event.token_ids
    return texts, first_s


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
