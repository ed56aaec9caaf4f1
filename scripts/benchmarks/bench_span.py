"""Measure a stage that spans nodes on loopback against the same model on one node.

Every node computes with one thread. Decoding is one sequence; a prompt is read in chunks of 256
rows. What the gathers cost is what a token takes beyond its share of one node's time. The texts of
both are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench_losses import nodes_on_loopback
from bench_ring import random_1b

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

N_IDS = 250
"""Prompts are of ids below this, which every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One generation: seconds to its first token, medians between the others, and its tokens."""

    first_s: float
    token_s: float
    tokens: tuple[int, ...]


async def generated(client: Client, choice: ModelChoice, prompt: Sequence[int], n: int) -> Run:
    """Generate `n` tokens of one sequence."""
    began_s, times_s, tokens = time.perf_counter(), list[float](), list[int]()
    events = client.generate(
        [[*prompt]], SamplingParams(), model=choice, max_tokens=n, ignore_eos=True
    )
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise SystemExit(f"a text ended: {event.error}")
            if event.token_ids:
                times_s.append(time.perf_counter())
                tokens += event.token_ids
    gaps_s = [after - before for before, after in pairwise(times_s)]
    return Run(
        first_s=times_s[0] - began_s,
        token_s=statistics.median(gaps_s),
        tokens=tuple(tokens),
    )


async def measured(asked: argparse.Namespace, model: str, folder: Path, n_nodes: int) -> Run:
    """Return the best figures over the rounds, on a stage that spans `n_nodes`."""
    names = ["anna", "bert", "cleo", "dora"][:n_nodes]
    async with nodes_on_loopback(folder, names) as nodes, connect(nodes[0].address) as client:
        choice = ModelChoice(
            model=model,
            nodes=[node.address for node in nodes],
            nodes_per_stage=n_nodes,
            wire_dtype=f"gather={asked.gather_dtype}" if asked.gather_dtype else "",
            dtype=asked.dtype,
            context=asked.prompt + asked.tokens + 64,
        )
        await generated(client, choice, range(4), 4)  # loads the model
        runs = []
        for number in range(asked.rounds):  # no prompt begins as another did
            prompt = [(number + 7 * place) % N_IDS for place in range(asked.prompt)]
            runs.append(await generated(client, choice, prompt, asked.tokens))
    return Run(
        first_s=min(run.first_s for run in runs),
        token_s=min(run.token_s for run in runs),
        tokens=runs[0].tokens,
    )


async def compare(asked: argparse.Namespace, path: Path, model: str, folder: Path) -> None:
    """Print both, and what a gather costs."""
    n = asked.nodes
    n_gathers = 4 * Checkpoint.open(path).config.n_layers + 2
    alone = await measured(asked, model, folder / "alone", 1)
    span = await measured(asked, model, folder / "span", n)
    for name, run in (("one node", alone), (f"{n} nodes", span)):
        print(
            f"{name:9} decode {1 / run.token_s:8.2f} tokens/s ({run.token_s * 1e3:.2f} ms each), "
            f"prompt of {asked.prompt}: {asked.prompt / run.first_s:8.1f} tokens/s"
        )
    gather_ms = (span.token_s - alone.token_s / n) / n_gathers * 1e3
    print(
        f"{n} nodes against one: decode {alone.token_s / span.token_s:.2f} x, prompt "
        f"{alone.first_s / span.first_s:.2f} x; a gather takes about {gather_ms:.3f} ms "
        f"({n_gathers} for each token); texts are {'' if alone.tokens == span.tokens else 'NOT '}"
        "equal"
    )


def main() -> None:
    """Measure one node, then the nodes of one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lan", action="store_true", help="as scripts/bench has it")
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_MODEL_PATH)
    parser.add_argument("--random-1b", action="store_true", help="1.1B parameters of noise")
    parser.add_argument("--nodes", type=int, default=2, choices=range(2, 5))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gather-dtype", default="", choices=["", "bfloat16", "int8"])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    path = random_1b() if asked.random_1b else asked.checkpoint
    with tempfile.TemporaryDirectory() as place:
        is_bundled = path == DEFAULT_MODEL_PATH
        model = DEFAULT_MODEL_NAME if is_bundled else str(path)
        asyncio.run(compare(asked, path, model, Path(place)))


if __name__ == "__main__":
    main()
