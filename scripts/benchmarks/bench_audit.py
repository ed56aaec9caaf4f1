"""Measure what audits of a ring cost, and how long a flipped bit in a weight goes unnoticed.

Two nodes in this process, of one thread each, and a text that goes on. Cost: the time of tokens
with audits and without, by turns, and the share of the time for which audits kept a stage from
steps, by the head's own account. Notice: a bit of the second node's weights is flipped, at random;
how long until that is found, beside what is expected (docs/reliability.md).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from bench_ring import random_1b
from support.cluster.machines import machines
from support.waiting import until

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.machine.profile import MemoryBudget, find_devices
from shardnet.cluster.node.node import Node
from shardnet.cluster.recovery import audits
from shardnet.stage.stage_audit import StageAudit
from shardnet.wire.messages.diagnostics import AuditFinding
from shardnet.wire.messages.plans import ModelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A ring of two nodes, the client of its head, and what it is asked for."""

    nodes: list[Node]
    client: Client
    choice: ModelChoice
    n_tokens: int

    async def text(self) -> list[float]:
        """Generate one text; return when its tokens came, in seconds."""
        times: list[float] = []
        events = self.client.generate(
            [[5, 6, 7, 8]], model=self.choice, max_tokens=self.n_tokens, ignore_eos=True
        )
        async with aclosing(events):
            async for event in events:
                if event.error is not None:
                    raise SystemExit(f"a text ended: {event.error}")
                times += [time.perf_counter()] * len(event.token_ids)
        return times

    def audit_of(self, node: Node) -> StageAudit:
        """Return what audits the stage of a node."""
        loaded = node.stage.host.loaded
        assert loaded is not None
        assert loaded.audit is not None
        return loaded.audit

    async def audit_for(self, share: float, first_s: float) -> None:
        """Audit for a share of the time, until cancelled, as the head would; the first later."""
        pause_s = first_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = max(audits.LOOK_S, await self.nodes[0].audits.audit() / share)


@asynccontextmanager
async def open_bench(asked: argparse.Namespace, folder: Path) -> AsyncIterator[Bench]:
    """Start both nodes, and load the model."""
    checkpoint = str(random_1b()) if asked.random_1b else asked.checkpoint or DEFAULT_MODEL_NAME
    budget = MemoryBudget(device=find_devices("cpu")[0], asked_bytes=asked.memory << 30)
    async with (
        machines(folder, "anna", "bert", budget=budget) as found,
        connect(found[0].node.address) as client,
    ):
        nodes = [each.node for each in found]
        addresses = [node.address for node in nodes]
        choice = ModelChoice(model=checkpoint, nodes=addresses, context=asked.tokens + 8)
        bench = Bench(nodes=nodes, client=client, choice=choice, n_tokens=asked.tokens)
        await bench.text()
        yield bench


async def measure_cost(bench: Bench, asked: argparse.Namespace) -> None:
    """Print how long tokens take with audits and without, by turns.

    The first audit of a text comes at a random moment of an interval.
    """
    share, drawn = asked.percent / 100, random.Random(asked.seed)
    every_s = max(audits.LOOK_S, await bench.nodes[0].audits.audit() / share)
    tok_s: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(asked.rounds):
        for is_audited in (False, True):
            first_s = drawn.random() * every_s
            auditing = asyncio.create_task(bench.audit_for(share, first_s))
            if not is_audited:
                auditing.cancel()
            times = await bench.text()
            auditing.cancel()
            await asyncio.wait([auditing])
            tok_s[is_audited].append((len(times) - 1) / (times[-1] - times[0]))
    plain, audited = (statistics.median(tok_s[is_audited]) for is_audited in (False, True))
    state = bench.nodes[0].audits.state
    assert state is not None
    took_s = state.busy_s / state.n_audits
    print(f"without audits {plain:.2f} tokens/s, with {audited:.2f}: {audited / plain - 1:+.2%}")
    print(f"an audit keeps a stage from steps for {took_s:.4f} s, one comes every {every_s:.1f} s")
    print(f"weights: {state.looked_bytes / state.n_audits / 2**20:.0f} MiB an audit", flush=True)


async def measure_notice(bench: Bench, asked: argparse.Namespace) -> None:
    """Print how long a flipped bit goes unnoticed."""
    drawn, took_s = random.Random(asked.seed), list[float]()
    head = bench.nodes[0]
    auditing = asyncio.create_task(bench.audit_for(asked.percent / 100, 0.0))
    for _ in range(asked.flips):
        text = asyncio.create_task(keep_on(bench))
        audit = bench.audit_of(bench.nodes[1])
        await until(partial(has_looked, audit))
        await asyncio.sleep(10 * drawn.random())
        n_found, began_s = len(findings(head)), time.perf_counter()
        what = flip(audit, drawn)
        await until(partial(has_more, head, n_found))
        took_s.append(time.perf_counter() - began_s)
        print(f"{what}: noticed after {took_s[-1]:.1f} s: {findings(head)[-1].what}", flush=True)
        text.cancel()
        await asyncio.wait([text])
        await head.head.unload()
        await bench.text()  # over both nodes again
    auditing.cancel()
    await asyncio.wait([auditing])
    print(f"noticed after {statistics.mean(took_s):.1f} s in the mean, {max(took_s):.1f} at most")


async def keep_on(bench: Bench) -> None:
    """Generate one text after the other, until cancelled."""
    while True:
        await bench.text()


def findings(head: Node) -> Sequence[AuditFinding]:
    """Return what audits have found."""
    return [] if head.audits.state is None else head.audits.state.findings


def has_more(head: Node, n_found: int) -> bool:
    """Say whether more was found than so much."""
    return len(findings(head)) > n_found


def has_looked(audit: StageAudit) -> bool:
    """Say whether all weights of a stage were looked at once."""
    digests = audit._model.digests
    assert digests is not None
    return all(piece.digest is not None or piece.tensor() is None for piece in digests._pieces)


def flip(audit: StageAudit, drawn: random.Random) -> str:
    """Flip one bit of the weights of a stage; say where."""
    digests = audit._model.digests
    assert digests is not None
    pieces = [piece for piece in digests._pieces if piece.tensor() is not None]
    [piece] = drawn.choices(pieces, [piece.end - piece.begin for piece in pieces])
    tensor = piece.tensor()
    assert tensor is not None
    place, bit = drawn.randrange(piece.begin, piece.end), drawn.randrange(8)
    tensor.view(-1).view(torch.uint8)[place] ^= 1 << bit
    return f"bit {bit} of byte {place} of {piece.name}"


async def run(asked: argparse.Namespace) -> None:
    """Measure both, each over a ring of its own."""
    with tempfile.TemporaryDirectory() as place:
        async with open_bench(asked, Path(place)) as bench:
            if asked.rounds:
                await measure_cost(bench, asked)
            if asked.flips:
                await measure_notice(bench, asked)


def main() -> None:
    """Measure what audits cost, and how long a flipped bit goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="", help="default: the bundled model")
    parser.add_argument(
        "--random-1b",
        action="store_true",
        help="make and use a random checkpoint of the TinyLlama-1.1B shape in bfloat16 (2.2 GB)",
    )
    parser.add_argument("--percent", type=float, default=0.5, help="as --audit of a node")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each text")
    parser.add_argument("--rounds", type=int, default=5, help="texts of each kind")
    parser.add_argument("--flips", type=int, default=5)
    parser.add_argument("--memory", type=int, default=4, help="GiB of each node")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
