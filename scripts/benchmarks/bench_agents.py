"""Benchmark what coding agents wait for: the first token after a beginning that was seen before.

Real nodes over loopback, one compute thread each, with random checkpoints of small models. One
conversation of a shared beginning and its own goes on, parts within its last answer, makes room for
two sub-agents that have only the shared beginning, and goes on after all nodes were ended and
started again. Each cell is told in seconds, as a share of the first prompt's, and by how many
positions were computed; kinds beside the dense one by how much larger their share is.

--long: one long prompt, its next turn, and that after a restart. --conversations N: N conversations
in turns; which positions were computed again, and what the nodes' memory grew by beside the plan.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import msgspec
import psutil
from agent_shapes import END_ID, KINDS, VOCAB, write_kind
from bench_rig import make_prompt
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.types import BLOCK_POSITIONS
from shardnet.wire.messages.plans import ModelChoice, PlanReply

CELLS = (
    *("first", "next turn", "parts in the answer", "sub-agent", "main again"),
    *("another sub-agent", "after a restart"),
)
LONG_CELLS = ("first", "next turn", "after a restart")
MOST_OVER_DENSE = 1.5
"""How much larger a cell's share of the first prompt may be than in the dense model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt that was answered: after how many seconds, and how much of it was kept."""

    prompt: list[int]
    answer: list[int]
    first_s: float
    n_kept: int

    @property
    def so_far(self) -> list[int]:
        """The prompt and its answer, which the next one begins with."""
        return [*self.prompt, *self.answer, END_ID]

    @property
    def n_computed(self) -> int:
        """Positions of the prompt that were computed."""
        return len(self.prompt) - self.n_kept


class Ring:
    """Nodes with one model, which can be started again. `plan` is how they run it."""

    def __init__(self, folder: Path, asked: argparse.Namespace, model: Path, context: int) -> None:
        self._machine = Machine(folder, makes_copies=False)
        self._model, self._context, self._asked = model, context, asked
        self._seed = 0
        self._client: Client | None = None
        self.nodes: list[NodeProcess] = []
        self.idle_bytes: list[int] = []
        self.plan: PlanReply | None = None

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start the nodes, load the model; end the nodes as Ctrl-C does."""
        names = [f"node-{number}" for number in range(self._asked.nodes)]
        arguments = ["--insecure", "--host", "127.0.0.1", "--prefix-cache", "20GiB"]
        if self._asked.memory:
            arguments += ["--memory", self._asked.memory]
        self.nodes = [*self._machine.start_nodes(*names, arguments=arguments)]
        self.idle_bytes = self.rss_bytes()
        try:
            async with connect(self.nodes[0].address) as client:
                self._client = client
                await self.ask(self.words(8), 2)  # loads, and warms caches
                yield
        finally:
            for node in self.nodes:
                node.tell_to_leave()
            for node in self.nodes:
                node.wait()

    def close(self) -> None:
        """End what still runs."""
        for process in self._machine.processes():
            process.kill()

    def words(self, n_tokens: int) -> list[int]:
        """Make a message that begins as no other does."""
        self._seed += 1
        return [*make_prompt(self._seed, n_tokens - 1, VOCAB), END_ID]

    def rss_bytes(self) -> list[int]:
        """The resident memory of each node."""
        return [psutil.Process(node.pid).memory_info().rss for node in self.nodes]

    async def ask(self, prompt: Sequence[int], n_tokens: int) -> Turn:
        """Have an answer of `n_tokens` made."""
        assert self._client is not None
        choice = ModelChoice(
            model=str(self._model),
            nodes=[node.address for node in self.nodes],
            context=self._context,
        )
        first_s, began_s = 0.0, time.perf_counter()
        events = self._client.generate(
            *([*prompt],), model=choice, max_tokens=n_tokens, ignore_eos=True, on_plan=self._note
        )
        async with aclosing(events):
            async for event in events:
                if event.token_ids and not first_s:
                    first_s = time.perf_counter() - began_s
                if event.result is not None:
                    return Turn(
                        prompt=[*prompt],
                        answer=[*event.result.token_ids],
                        first_s=first_s,
                        n_kept=event.result.usage.n_reused,
                    )
        raise AssertionError("a request without an end")

    async def reused(self) -> dict[str, int]:
        """Return how many positions were not computed since the ring was built, by their tier."""
        assert self._client is not None
        async with aclosing(self._client.report()) as replies:
            async for reply in replies:
                if reply.report is not None and reply.report.ring is not None:
                    return reply.report.ring.reused
        raise AssertionError("the first node leads no ring")

    def _note(self, plan: PlanReply) -> None:
        self.plan = plan


async def agents(ring: Ring, asked: argparse.Namespace) -> dict[str, list[Turn]]:
    """Measure the cells of the table, in this order, `rounds` times."""
    turns: dict[str, list[Turn]] = {name: [] for name in CELLS}
    own, n_tokens = asked.own, asked.answer
    for _ in range(asked.rounds):
        async with ring.started():
            shared = ring.words(asked.shared)

            async def ask(name: str, prompt: Sequence[int]) -> Turn:
                turn = await ring.ask(prompt, n_tokens)
                turns[name].append(turn)
                return turn

            main = await ask("first", [*shared, *ring.words(own)])
            main = await ask("next turn", [*main.so_far, *ring.words(own)])
            cut = [*main.prompt, *main.answer[: n_tokens // 2]]
            main = await ask("parts in the answer", [*cut, *ring.words(own)])
            await ask("sub-agent", [*shared, *ring.words(own)])
            main = await ask("main again", [*main.so_far, *ring.words(own)])
            await ask("another sub-agent", [*shared, *ring.words(own)])
        async with ring.started():
            await ask("after a restart", [*main.so_far, *ring.words(own)])
    return turns


async def long(ring: Ring, asked: argparse.Namespace) -> dict[str, list[Turn]]:
    """Measure a long prompt, its next turn, and that after a restart."""
    turns: dict[str, list[Turn]] = {name: [] for name in LONG_CELLS}
    for _ in range(asked.rounds):
        async with ring.started():
            turn = await ring.ask(ring.words(asked.long), asked.answer)
            turns["first"].append(turn)
            turn = await ring.ask([*turn.so_far, *ring.words(asked.own)], asked.answer)
            turns["next turn"].append(turn)
        async with ring.started():
            turn = await ring.ask([*turn.so_far, *ring.words(asked.own)], asked.answer)
            turns["after a restart"].append(turn)
    return turns


async def conversations(ring: Ring, asked: argparse.Namespace) -> dict[str, Any]:
    """Let conversations go on in turns; count what is computed again, and what memory they take.

    Of a prompt its predecessor and the answer to it need not be computed, but for the last token
    of the answer, which no step has had, and its end.
    """
    async with ring.started():
        loaded = ring.rss_bytes()
        turns = [
            await ring.ask(ring.words(asked.conversation), asked.answer)
            for _ in range(asked.conversations)
        ]
        n_again = n_known = 0
        for _ in range(asked.turns):
            for number, turn in enumerate(turns):
                known = len(turn.prompt) + len(turn.answer) - 1
                now = await ring.ask([*turn.so_far, *ring.words(asked.turn)], asked.answer)
                n_known += known
                n_again += max(0, known - now.n_kept)
                turns[number] = now
        assert ring.plan is not None
        limits = {node.node: node.memory_bytes for node in ring.plan.nodes}
        return {
            "conversations": asked.conversations,
            "positions": sum(len(turn.prompt) + len(turn.answer) for turn in turns),
            "known": n_known,
            "computed_again": n_again,
            "reused": await ring.reused(),
            "planned": msgspec.to_builtins(ring.plan.kept),
            "nodes": [
                {
                    "name": stage.name,
                    "idle_bytes": idle,
                    "loaded_bytes": after,
                    "full_bytes": now,
                    "planned_bytes": stage.weight_bytes + stage.kv_bytes,
                    "memory_bytes": limits.get(stage.node),
                }
                for stage, idle, after, now in zip(
                    ring.plan.stages, ring.idle_bytes, loaded, ring.rss_bytes(), strict=True
                )
            ],
        }


def cells(turns: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """Sum up each cell: the median of its rounds, and its share of the first prompt's."""
    seconds = {
        name: statistics.median(turn.first_s for turn in each) for name, each in turns.items()
    }
    return {
        name: {
            "seconds": round(seconds[name], 3),
            "of_first": round(seconds[name] / seconds["first"], 4),
            "prompt": len(each[-1].prompt),
            "computed": max(turn.n_computed for turn in each),
        }
        for name, each in turns.items()
    }


def compare(report: dict[str, Any]) -> None:
    """Add to each kind's cells how much larger their shares are than the dense model's."""
    dense = report.get("dense", {}).get("cells")
    for kind, told in report.items():
        if dense is None or kind == "dense" or "cells" not in told:
            continue
        for name, cell in told["cells"].items():
            cell["over_dense"] = round(cell["of_first"] / dense[name]["of_first"], 2)


async def measure(kind: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one kind of model: the table, or what was asked for instead."""
    n_parameters = write_kind(kind, folder / "model", asked.layers, asked.hidden)
    one_turn = asked.answer + 1
    if asked.conversations:
        n_most = asked.conversation + asked.turns * (asked.turn + one_turn)
    else:
        n_most = (asked.long or asked.shared + asked.own) + 4 * (asked.own + one_turn)
    context = -(-(n_most + one_turn) // BLOCK_POSITIONS) * BLOCK_POSITIONS
    ring = Ring(folder / "machine", asked, folder / "model", context)
    told: dict[str, Any] = {"parameters": n_parameters, "context": context, "nodes": asked.nodes}
    try:
        if asked.conversations:
            return told | {"conversations": await conversations(ring, asked)}
        turns = await (long if asked.long else agents)(ring, asked)
        first = turns["first"][0]
        rate = len(first.prompt) / statistics.median(turn.first_s for turn in turns["first"])
        return told | {"first_tok_s": round(rate, 1), "cells": cells(turns)}
    finally:
        ring.close()


def as_text(kind: str, told: dict[str, Any]) -> str:
    """Write what was measured of one kind as a table."""
    about = f"{kind} ({KINDS[kind][0]}), {told['parameters'] / 1e9:.2f} B, {told['nodes']} nodes"
    if "conversations" in told:
        return f"{about}: {_conversations_words(told['conversations'])}"
    rows = [["", "seconds", "of first", "over dense", "prompt", "computed"]]
    for name, cell in told["cells"].items():
        over = cell.get("over_dense")
        words = "" if over is None else f"{over:.2f}{' !' * (over > MOST_OVER_DENSE)}"
        figures = [f"{cell['seconds']:.2f}", f"{cell['of_first']:.3f}", words]
        rows.append([name, *figures, f"{cell['prompt']}", f"{cell['computed']}"])
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [f"{row[0]:{wide[0]}}", *(f"{a:>{n}}" for a, n in zip(row[1:], wide[1:], strict=True))]
        )
        for row in rows
    ]
    about += f": the first prompt at {told['first_tok_s']:.0f} tokens/s"
    return "\n".join([about, *lines])


def _conversations_words(told: dict[str, Any]) -> str:
    def mb(n_bytes: int) -> str:
        return f"{n_bytes / 1e6:.0f}"

    kept, reused = told["planned"], told["reused"]
    planned = (
        ""
        if kept is None
        else (
            f"\n  planned for all nodes: {kept['positions']} positions ({mb(kept['kv_bytes'])} MB) "
            f"and {kept['states']} states ({mb(kept['state_bytes'])} MB)"
        )
    )
    nodes = "".join(
        f"\n  {node['name']}: {mb(node['full_bytes'])} MB ({mb(node['idle_bytes'])} without a "
        f"model, {mb(node['loaded_bytes'])} once it was loaded); "
        f"planned {mb(node['planned_bytes'])} MB"
        + (f" of {mb(node['memory_bytes'])}" if node["memory_bytes"] else "")
        for node in told["nodes"]
    )
    return (
        f"{told['conversations']} conversations with {told['positions']} positions, "
        f"{told['computed_again']} of {told['known']} known ones computed again, "
        f"{reused['memory']} from memory, {reused['disk']} from disk{planned}{nodes}"
    )


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench agents")
    parser.add_argument(
        "--kind", default="dense,hybrid", help=f"kinds of models, of {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--shared", type=int, default=6000, help="tokens that all agents begin with"
    )
    parser.add_argument("--own", type=int, default=700, help="tokens of each further message")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--long", type=int, default=0, metavar="TOKENS", help="as 30000: see above")
    parser.add_argument("--conversations", type=int, default=0, metavar="N", help="see above")
    parser.add_argument("--conversation", type=int, default=4000, help="tokens of each at first")
    parser.add_argument("--turns", type=int, default=3, help="further turns of each conversation")
    parser.add_argument("--turn", type=int, default=100, help="tokens of each of them")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--memory", default="", help="that of each node, as 2GiB")
    parser.add_argument("--layers", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 128")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    kinds = asked.kind.split(",")
    if unknown := sorted({*kinds} - {*KINDS}):
        parser.error(f"--kind {','.join(unknown)}: expected some of {', '.join(KINDS)}")
    report: dict[str, Any] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            report[kind] = asyncio.run(measure(kind, asked, Path(folder)))
        compare(report)
        if not asked.json:
            print(as_text(kind, report[kind]), flush=True)
    if asked.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
