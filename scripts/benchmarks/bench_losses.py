"""Measure what a lost node costs: how long texts pause behind prompts of several lengths.

Real nodes on loopback, a thread each. Once an answer has some tokens a node is killed (SIGKILL),
the tail or the head's neighbour, or the tail is drained (--drain). The pause is the longest time
between two tokens from then on; its parts are by the head's own account, and `again` is how many
tokens were read again before the text went on. `prompt` is how long the first token took, and
`ratio` that as a share of what it took with the first value of --standby. Each run has a ring that
has seen no prompt before, and each answer is compared with that of a ring that lost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import typer
from agent_shapes import KINDS, write_kind
from bench_rig import make_prompt
from bench_ring import random_1b
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.sampling_params import SamplingParams
from shardnet.types import BLOCK_POSITIONS
from shardnet.wire.messages.activity import RingActivity
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.flags.ring_options import RingOptions

SAMPLED = SamplingParams(temperature=0.8, seed=3)
N_IDS = 4096
"""Tokens that every model has which is asked here."""
ON_LOOPBACK = ("--insecure", "--host", "127.0.0.1")
READY_S = 60.0
"""How long nodes that stand by may take until they do: they load what they lack."""
LOOK_S = 0.1
DRAIN_S = 600.0
"""After how long a node that is drained ends in any case."""
VICTIMS = {"tail": -1, "middle": 1, "drained": -1}
"""Which stage of the ring is lost, or drained."""


@contextmanager
def machine_in(folder: Path) -> Iterator[Machine]:
    """Give a machine whose processes end with the context."""
    machine = Machine(folder, makes_copies=False)
    try:
        yield machine
    finally:
        for process in machine.processes():
            process.kill()


@asynccontextmanager
async def nodes_on_loopback(folder: Path, names: Sequence[str]) -> AsyncIterator[list[NodeProcess]]:
    """Start a node process for each name."""
    with machine_in(folder) as machine:
        yield machine.start_nodes(*names, arguments=ON_LOOPBACK)


@dataclass(slots=True, kw_only=True)
class Answer:
    """The tokens of all streams, and when each came. `lost_s` is when a node was lost, if any."""

    began_s: float
    tokens: list[list[int]]
    at_s: list[list[float]]
    lost_s: float | None = None

    @property
    def prompt_s(self) -> float:
        """How long the last first token took."""
        return max(each[0] for each in self.at_s) - self.began_s

    @property
    def pause_s(self) -> float:
        """The longest time between two tokens that was not over when the node was lost."""
        assert self.lost_s is not None
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.at_s))
        return max(later - before for before, later in pairs if later > self.lost_s)

    @property
    def token_s(self) -> float:
        """The median time between two tokens."""
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.at_s))
        return statistics.median(later - before for before, later in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A row of the table. `again` is how many tokens were read again."""

    model: str
    prompt: int
    standby: str
    lost: str
    prompt_s: float
    pause_s: float
    notice_s: float
    plan_s: float
    load_s: float
    replay_s: float
    again: int
    token_s: float
    is_equal: bool
    ratio: float = 1.0


@dataclass(kw_only=True)
class Bench:
    """Nodes with one model, which it is loaded on anew for each run; lost ones are replaced."""

    machine: Machine
    asked: argparse.Namespace
    name: str
    model: str
    nodes: dict[str, NodeProcess] = field(default_factory=dict)
    undisturbed: dict[int, list[list[int]]] = field(default_factory=dict)
    """The answers of a ring that loses nothing, by the length of the prompt."""

    @property
    def names(self) -> list[str]:
        """Those of all nodes, the head first."""
        return [f"node-{number}" for number in range(self.asked.nodes)]

    def start(self) -> None:
        """Start the nodes that do not run."""
        names = [name for name in self.names if name not in self.nodes]
        started = self.machine.start_nodes(*names, arguments=ON_LOOPBACK)
        self.nodes |= zip(names, started, strict=True)

    def choice(self, standby: str) -> ModelChoice:
        """Ask for a ring of all nodes, as the command does."""
        longest = max(*self.asked.prompts, self.asked.drain) + self.asked.tokens
        nodes = ",".join(self.nodes[name].address for name in self.names)
        context = -(-longest // BLOCK_POSITIONS) * BLOCK_POSITIONS
        options = ring_options(standby, model=self.model, nodes=nodes, context=context)
        choice: ModelChoice = options.choice()
        return choice

    async def lose(self, prompt: int, standby: str, lost: str) -> Loss:
        """Lose a node behind a prompt of so many tokens."""
        if prompt not in self.undisturbed:
            async with self.loaded(standby) as (client, _):
                whole = await self.answer(client, standby, prompt)
                self.undisturbed[prompt] = whole.tokens
        async with self.loaded(standby) as (client, before):
            assert before.plan is not None
            name = before.plan.stages[VICTIMS[lost]].name
            answer = await self.answer(client, standby, prompt, lost=lost, victim=name)
            after = await client.activity()
        self.nodes.pop(name).kill()
        known = {one.at_s for one in before.recoveries}
        recoveries = [one for one in after.recoveries if one.at_s not in known]
        n_read = sum(step.n_prompt_rows for step in after.steps[len(before.steps) :])
        return Loss(
            model=self.name,
            prompt=prompt,
            standby=standby,
            lost=lost,
            prompt_s=answer.prompt_s,
            pause_s=answer.pause_s,
            notice_s=sum(one.notice_s for one in recoveries),
            plan_s=sum(one.plan_s for one in recoveries),
            load_s=sum(one.load_s for one in recoveries),
            replay_s=sum(one.replay_s for one in recoveries),
            again=n_read - (prompt - 1) * self.asked.streams,
            token_s=answer.token_s,
            is_equal=answer.tokens == self.undisturbed[prompt],
        )

    @asynccontextmanager
    async def loaded(self, standby: str) -> AsyncIterator[tuple[Client, RingActivity]]:
        """Load the model on all nodes, and wait for those that stand by; free it afterwards."""
        self.start()
        head = self.nodes[self.names[0]]
        async with connect(head.address) as client:
            await client.complete([5, 6, 7, 8], model=self.choice(standby), max_tokens=2)
            ring = await client.activity()
            assert ring.plan is not None
            if len(ring.plan.stages) != len(self.nodes):
                names = ", ".join(stage.name for stage in ring.plan.stages)
                raise SystemExit(f"the ring is {names}: expected all {len(self.nodes)} nodes")
            await _until_standing_by(client, len(ring.plan.standbys))
            yield client, ring
            await client.unload()

    async def answer(
        self, client: Client, standby: str, prompt: int, *, lost: str = "", victim: str = ""
    ) -> Answer:
        """Have the answers to prompts of so many tokens; lose `victim` once each has some."""
        streams = range(self.asked.streams)
        answer = Answer(
            began_s=time.perf_counter(), tokens=[[] for _ in streams], at_s=[[] for _ in streams]
        )
        events = client.generate(
            [make_prompt(1 + number, prompt, N_IDS) for number in streams],
            SAMPLED,
            model=self.choice(standby),
            max_tokens=self.asked.tokens,
            ignore_eos=True,
        )
        async with aclosing(events), asyncio.TaskGroup() as beside:
            async for event in events:
                if event.error is not None:
                    raise SystemExit(f"a text ended: {event.error}")
                if event.token_ids:
                    answer.at_s[event.index].append(time.perf_counter())
                    answer.tokens[event.index] += event.token_ids
                if victim and min(map(len, answer.tokens)) >= self.asked.after:
                    node, victim = self.nodes[victim], ""
                    answer.lost_s = time.perf_counter()
                    if lost == "drained":
                        beside.create_task(_drain(node))
                    else:
                        node.signal(signal.SIGKILL)
        return answer


async def _drain(node: NodeProcess) -> None:
    async with connect(node.address) as client:
        await client.drain(DRAIN_S)


async def _until_standing_by(client: Client, n_nodes: int) -> None:
    """Wait until so many nodes hold another one's layers beside their own."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        async with aclosing(client.report(with_peers=True)) as replies:
            stages = [one.report.stage async for one in replies if one.report is not None]
        if sum(stage is not None and stage.standby is not None for stage in stages) >= n_nodes:
            return
        await asyncio.sleep(LOOK_S)
    raise SystemExit(f"{n_nodes} nodes were to stand by, and do not after {READY_S:g} s")


def ring_options(text: str, **more: Any) -> RingOptions:
    """Read a value of --standby, and other flags of a ring behind it: `off,kv-dtype=int8`."""
    standby, *others = text.split(",")
    pairs = [other.split("=", 1) for other in others]
    flags = {name.replace("-", "_"): value for name, value in pairs}
    return RingOptions(standby=standby, **flags, **more)


async def measure(bench: Bench) -> list[Loss]:
    """Lose nodes behind each length of prompt, the values of --standby by turns."""
    asked = bench.asked
    runs = [(prompt, lost) for prompt in asked.prompts for lost in asked.lost]
    runs += [(asked.drain, "drained")] if asked.drain else []
    losses: list[Loss] = []
    for prompt, lost in runs:
        rounds = [
            await bench.lose(prompt, standby, lost)
            for _ in range(asked.rounds)
            for standby in asked.standby
        ]
        losses += compared(rounds)
        if not asked.json:
            print(*map(as_row, losses[-len(rounds) :]), sep="\n", flush=True)
    return losses


def compared(losses: Sequence[Loss]) -> list[Loss]:
    """Hold the time of each prompt against the median of the first value of --standby."""
    first = statistics.median(one.prompt_s for one in losses if one.standby == losses[0].standby)
    return [replace(one, ratio=one.prompt_s / first) for one in losses]


HEAD = (
    f"{'model':17}{'prompt':>7}{'standby':>9}{'lost':>9}{'prompt s':>10}{'ratio':>7}{'pause s':>9}"
    f"{'notice':>8}{'plan':>7}{'load':>7}{'replay':>8}{'again':>7}{'token s':>9}  words"
)


def as_row(loss: Loss) -> str:
    """Write a row below HEAD."""
    return (
        f"{loss.model:17}{loss.prompt:7}{loss.standby:>9}{loss.lost:>9}{loss.prompt_s:10.2f}"
        f"{loss.ratio:7.3f}{loss.pause_s:9.2f}{loss.notice_s:8.2f}{loss.plan_s:7.2f}"
        f"{loss.load_s:7.2f}{loss.replay_s:8.2f}{loss.again:7}{loss.token_s:9.4f}  "
        f"{'equal' if loss.is_equal else 'DIFFERENT'}"
    )


def main() -> None:
    """Measure and print; return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench losses")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["dense", "hybrid", "mixture"],
        metavar="MODEL",
        help=f"random weights of some of {', '.join(KINDS)}; 1b, the TinyLlama-1.1B shape in "
        "bfloat16 (2.2 GB); a path or a name",
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 1000, 4000, 30000])
    parser.add_argument(
        "--standby",
        nargs="+",
        default=["off", "auto"],
        help="values of the flag, each with other flags of a ring behind it, as off,kv-dtype=int8",
    )
    parser.add_argument("--lost", nargs="+", default=["tail"], choices=["tail", "middle"])
    parser.add_argument(
        "--drain", type=int, default=0, metavar="TOKENS", help="drain the tail, too"
    )
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each answer")
    parser.add_argument("--after", type=int, default=60, help="of these before a node is lost")
    parser.add_argument("--streams", type=int, default=1, help="answers at once")
    parser.add_argument("--nodes", type=int, default=3, choices=range(2, 7))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 128")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    for text in asked.standby:
        try:
            ring_options(text).choice()
        except (typer.BadParameter, TypeError, ValueError) as error:
            parser.error(f"--standby {text}: {error}")
    losses: list[Loss] = []
    if not asked.json:
        print(HEAD, flush=True)
    for name in asked.models:
        with tempfile.TemporaryDirectory() as place, machine_in(Path(place) / "machine") as machine:
            model = str(random_1b()) if name == "1b" else name
            if name in KINDS:
                model = str(Path(place) / "model")
                write_kind(name, Path(model), asked.layers, asked.hidden)
            bench = Bench(machine=machine, asked=asked, name=name, model=model)
            losses += asyncio.run(measure(bench))
    if asked.json:
        print(json.dumps([asdict(loss) for loss in losses], indent=2))
    sys.exit(any(not loss.is_equal for loss in losses))


if __name__ == "__main__":
    main()
