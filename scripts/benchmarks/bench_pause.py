"""Measure how long texts pause when a node of a ring on loopback is killed (SIGKILL).

With a node that stands by for it, and without. The pause is the longest time between two tokens of
any of the texts, once the node was killed; each text is compared with that of an undisturbed run.
The parts are by the head's own account.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from bench_ring import random_1b
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

SAMPLED = SamplingParams(temperature=0.8, seed=3)
READY_S = 5.0
"""How long nodes that stand by may take until they do: they load what they lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The texts of one run, and the longest time between two tokens of each."""

    texts: list[list[int]]
    pauses_s: list[float]
    median_s: float


@asynccontextmanager
async def nodes_on_loopback(folder: Path, names: Sequence[str]) -> AsyncIterator[list[NodeProcess]]:
    """Start a node process for each name."""
    machine = Machine(folder, environment={"SHARDNET_NO_MDNS": "1"}, makes_copies=False)
    try:
        arguments = ["--insecure", "--host", "127.0.0.1", "--threads", "1"]
        yield [*machine.start_nodes(*names, arguments=arguments)]
    finally:
        for process in machine.processes():
            process.kill()


async def run(
    client: Client, choice: ModelChoice, asked: argparse.Namespace, victim: NodeProcess | None
) -> Run:
    """Generate all texts; kill `victim` when half of each is there."""
    prompts = [[5 + number, 6, 7, 8] * (asked.prompt // 4) for number in range(asked.streams)]
    times: list[list[float]] = [[] for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    events = client.generate(
        prompts, SAMPLED, model=choice, max_tokens=asked.tokens, ignore_eos=True
    )
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise SystemExit(f"a text ended: {event.error}")
            if event.token_ids:
                times[event.index].append(time.perf_counter())
                texts[event.index] += event.token_ids
            if victim is not None and min(map(len, texts)) >= asked.tokens // 2:
                victim.signal(signal.SIGKILL)
                victim = None
    gaps = [[later - before for before, later in itertools.pairwise(each)] for each in times]
    medians = statistics.median(gap for each in gaps for gap in each)
    return Run(texts=texts, pauses_s=[max(each) for each in gaps], median_s=medians)


async def measure(asked: argparse.Namespace, standby: str, folder: Path) -> None:
    """Print the pause of one ring, and its parts."""
    checkpoint = str(random_1b()) if asked.random_1b else asked.checkpoint
    names = ["anna", "bert", "cleo", "dora", "emil", "fred"][: asked.nodes]
    async with nodes_on_loopback(folder, names) as nodes:
        async with connect(nodes[0].address) as client:
            choice = ModelChoice(
                model=checkpoint or DEFAULT_MODEL_NAME,
                nodes=[node.address for node in nodes],
                standby="auto" if standby == "auto" else "",
            )
            whole = await run(client, choice, asked, None)
            await asyncio.sleep(READY_S if standby == "auto" else 0.0)
            cut = await run(client, choice, asked, nodes[asked.nodes // 2])
        n_equal = sum(a == b for a, b in zip(whole.texts, cut.texts, strict=True))
        told = [line for line in nodes[0].log.splitlines() if "recovered in" in line]
    print(
        f"standby {standby:5} pause {max(cut.pauses_s):6.3f} s (a token takes {cut.median_s:.3f} s "
        f"else), {n_equal} of {asked.streams} texts equal; {told[-1] if told else 'not recovered'}",
        flush=True,
    )


def main() -> None:
    """Measure with and without nodes that stand by."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="", help="default: the bundled model")
    parser.add_argument(
        "--random-1b",
        action="store_true",
        help="make and use a random checkpoint of the TinyLlama-1.1B shape in bfloat16 (2.2 GB)",
    )
    parser.add_argument("--nodes", type=int, default=4, choices=range(2, 7))
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=40, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--standby", nargs="*", default=["auto", "off"], choices=["auto", "off"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for standby in asked.standby:
            for number in range(asked.rounds):
                asyncio.run(measure(asked, standby, Path(place) / f"{standby}-{number}"))


if __name__ == "__main__":
    main()
