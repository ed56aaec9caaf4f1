"""Measure a stage that spans nodes on this machine against the same model on one node.

Decoding is one sequence; a prompt is read in chunks of 256 rows. The nodes are on loopback, or as
on a network with a delay and a rate of its own (tests/support/system/delayed_node.py). A gather is
what the compute thread of the slowest node waits for in the median, from its own part to all
others. No ratio can exceed the limit: nodes that each compute the whole model by themselves at the
same time give so many times the tokens of one alone, since they share the machine's memory. The
texts of both are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from bench_losses import ON_LOOPBACK
from bench_ring import random_1b
from support.system import delayed_node
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

N_IDS = 250
"""Prompts are of ids below this, which every vocabulary has."""
NAMES = ("anna", "bert", "cleo", "dora")
HEAD = (
    f"{'model':24}{'delay us':>9}{'Mbit/s':>8}{'one tok/s':>11}{'n nodes':>9}{'decode':>8}"
    f"{'limit':>7}{'one prompt':>12}{'n nodes':>9}{'prompt':>8}{'limit':>7}{'gather us':>11}  texts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One generation: seconds to its first token, medians between the others, and its tokens.

    `gather_us` is the median of the node whose gathers take longest.
    """

    first_s: float
    token_s: float
    tokens: tuple[int, ...]
    gather_us: float = 0.0


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


@asynccontextmanager
async def nodes_with(
    folder: Path, threads: Sequence[int], delay_us: float, rate_mbit: float
) -> AsyncIterator[list[NodeProcess]]:
    """Start a node process for each number of threads, on such a network; they report at the end.

    They leave by themselves then, so that their reports are in `folder`.
    """
    about = {"delay_us": delay_us, "rate_mbit": rate_mbit, "report": str(folder)}
    environment = {
        "SHARDNET_NO_MDNS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2] / "tests"),
        delayed_node.VARIABLE: json.dumps(about),
    }
    machine = Machine(folder / "machine", makes_copies=False, environment=environment)
    try:
        nodes = []
        for name, n_threads in zip(NAMES, threads, strict=False):
            arguments = [*ON_LOOPBACK, "--threads", str(n_threads)]
            nodes += machine.start_nodes(name, arguments=arguments, module=delayed_node.__name__)
        yield nodes
        machine.close()
    finally:
        for process in machine.processes():
            process.kill()


async def measured(
    asked: argparse.Namespace, model: str, threads: Sequence[int], delay_us: float, rate: float
) -> Run:
    """Return the best figures over the rounds, on a stage that spans as many nodes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        async with nodes_with(folder, threads, delay_us, rate) as nodes:
            choice = ModelChoice(
                model=model,
                nodes=[node.address for node in nodes],
                nodes_per_stage=len(nodes),
                wire_dtype=f"gather={asked.gather_dtype}" if asked.gather_dtype else "",
                dtype=asked.dtype,
                context=asked.prompt + asked.tokens + 64,
            )
            async with connect(nodes[0].address) as client:
                await generated(client, choice, range(4), 4)  # loads the model
                runs = []
                for number in range(asked.rounds):  # no prompt begins as another did
                    prompt = [(number + 7 * place) % N_IDS for place in range(asked.prompt)]
                    runs.append(await generated(client, choice, prompt, asked.tokens))
        gathers_us = delayed_node.reports(folder)
    return Run(
        first_s=min(run.first_s for run in runs),
        token_s=min(run.token_s for run in runs),
        tokens=runs[0].tokens,
        gather_us=max(gathers_us, default=0.0),
    )


async def at_once(asked: argparse.Namespace, model: str) -> tuple[float, float]:
    """Return tokens a second of all nodes, each alone with the whole model, at the same time:
    while they decode, and while they read a prompt.
    """
    with tempfile.TemporaryDirectory() as place:
        async with nodes_with(Path(place), asked.threads, 0, 0) as nodes:

            async def alone(node: NodeProcess) -> list[Run]:
                choice = ModelChoice(
                    model=model,
                    nodes=[node.address],
                    dtype=asked.dtype,
                    context=asked.prompt + asked.tokens + 64,
                )
                async with connect(node.address) as client:
                    await generated(client, choice, range(4), 4)
                    runs = []
                    for number in range(asked.rounds):
                        await together.wait()
                        prompt = [(number + 7 * place) % N_IDS for place in range(asked.prompt)]
                        runs.append(await generated(client, choice, prompt, asked.tokens))
                    return runs

            together = asyncio.Barrier(len(nodes))
            runs = await asyncio.gather(*map(alone, nodes))
    each = [[*round_] for round_ in zip(*runs, strict=True)]
    return (
        max(sum(1 / run.token_s for run in round_) for round_ in each),
        max(sum(asked.prompt / run.first_s for run in round_) for round_ in each),
    )


async def compare(asked: argparse.Namespace, path: Path) -> bool:
    """Print a row for each network; return whether all texts are those of one node."""
    is_bundled = path == DEFAULT_MODEL_PATH
    model = DEFAULT_MODEL_NAME if is_bundled else str(path)
    alone = await measured(asked, model, asked.threads[:1], 0, 0)
    tok_s, prompt_tok_s = await at_once(asked, model)
    limit, prompt_limit = tok_s * alone.token_s, prompt_tok_s * alone.first_s / asked.prompt
    all_equal = True
    for delay_us, rate in product(asked.delay_us, asked.rate_mbit):
        span = await measured(asked, model, asked.threads, delay_us, rate)
        is_equal = alone.tokens == span.tokens
        all_equal = all_equal and is_equal
        print(
            f"{path.name:24}{delay_us:9g}{rate or '-':>8}{1 / alone.token_s:11.2f}"
            f"{1 / span.token_s:9.2f}{alone.token_s / span.token_s:8.2f}{limit:7.2f}"
            f"{asked.prompt / alone.first_s:12.1f}{asked.prompt / span.first_s:9.1f}"
            f"{alone.first_s / span.first_s:8.2f}{prompt_limit:7.2f}{span.gather_us:11.1f}  "
            f"{'equal' if is_equal else 'DIFFERENT'}",
            flush=True,
        )
    return all_equal


def main() -> None:
    """Measure one node, then the nodes of one stage; return 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench shards")
    parser.add_argument("--lan", action="store_true", help="as scripts/bench has it")
    parser.add_argument("--checkpoint", type=Path, nargs="+", default=[DEFAULT_MODEL_PATH])
    parser.add_argument("--random-1b", action="store_true", help="1.1B parameters of noise")
    parser.add_argument("--nodes", type=int, default=2, choices=range(2, 5))
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        help="of each node, in order; the one node has the first one's (default 1 each)",
    )
    parser.add_argument(
        "--delay-us", type=float, nargs="+", default=[0.0], help="of the network, one way"
    )
    parser.add_argument(
        "--rate-mbit",
        type=float,
        nargs="+",
        default=[0.0],
        help="what each node may send; 0: what this machine can",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gather-dtype", default="", choices=["", "bfloat16", "int8"])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    asked.threads = asked.threads or [1] * asked.nodes
    if len(asked.threads) != asked.nodes:
        parser.error(f"--threads has {len(asked.threads)} numbers for {asked.nodes} nodes")
    paths = [random_1b()] if asked.random_1b else asked.checkpoint
    print(HEAD, flush=True)
    are_equal = [asyncio.run(compare(asked, path)) for path in paths]
    sys.exit(not all(are_equal))


if __name__ == "__main__":
    main()
