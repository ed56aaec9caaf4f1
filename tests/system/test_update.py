"""`shardnet update`: nodes get another version one after the other, and no stream loses a word.

Each node runs from an environment of its own, and nothing of it is a copy. In the short form there
are two, of which only the head is to be updated; in the long one three, all of them, ten times.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.soak import is_soak
from support.system.environments import TAG, make_environment, make_wheel
from support.system.nodes import Command, Machine, NodeProcess, open_machine

from shardnet import __version__
from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.transport.identity import Identity
from shardnet.wire.messages.plans import ModelChoice

NAMES = ("anna", "bert", "cleo") if is_soak() else ("anna", "bert")
N_ROUNDS = 10 if is_soak() else 1
N_TOKENS = 120
PAUSE_S = 3.0 if is_soak() else 20.0
"""Where other tests have the processors, a node that loads takes them from one that computes."""
UPDATE_S = 600.0
OWN_HOST = "127.0.0.8" if sys.platform == "linux" else "127.0.0.1"
"""An address that nobody else asks for ports at: one that was given back there stays free."""
PROMPTS = (
    ("A story about a dog", SamplingParams(temperature=0.9, top_p=0.95, seed=3)),
    ("Once upon a time", SamplingParams()),
    ("The cat and the", SamplingParams(temperature=0.7, seed=5)),
    ("She had never", SamplingParams()),
)[: None if is_soak() else 1]


@dataclass(kw_only=True)
class Town:
    """Nodes that take other versions, and a machine that has the cluster key."""

    folder: Path
    machine: Machine
    nodes: list[NodeProcess]
    key: Path

    @property
    def identity(self) -> Identity:
        identity = load_identity(str(self.key))
        assert identity is not None
        return identity

    def update(self, *arguments: str | Path) -> Command:
        peer = ("--peer", self.nodes[0].address, "--key-file", str(self.key))
        return self.machine.begin("update", *map(str, arguments), *peer)

    async def versions(self) -> list[str]:
        """What every node runs, by name."""
        async with connect(self.nodes[0].address, self.identity) as client:
            told = await client.status(with_peers=True)
        found = {info.name: info.version for info in (told.node, *told.peers)}
        return [found[name] for name in NAMES]


def free_ports(n_ports: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for one in bound:
            one.bind((OWN_HOST, 0))
        return [one.getsockname()[1] for one in bound]


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(open_machine(tmp_path / "machine"))
        key, old = tmp_path / "cluster.key", make_wheel(tmp_path, __version__)
        new = make_wheel(tmp_path, "9.0.0")
        assert machine.call("key", "new", "--key-file", str(key)).code == 0
        ports, nodes = free_ports(len(NAMES)), []
        for name, port in zip(NAMES, ports, strict=True):
            python = make_environment(
                tmp_path / "environments" / name, old if is_soak() or name == NAMES[0] else new
            )
            own = stack.enter_context(open_machine(tmp_path / name, python=str(python)))
            own.environment["PIP_NO_COMPILE"] = "1"
            others = [word for p in ports if p != port for word in ("--peer", f"{OWN_HOST}:{p}")]
            place = ["--host", OWN_HOST, "--port", str(port), "--key-file", str(key)]
            nodes += own.start_nodes(name, arguments=[*place, "--allow-update", *others])
        yield Town(folder=tmp_path, machine=machine, nodes=nodes, key=key)


@dataclass(kw_only=True)
class Stream:
    """A client that asks for one text again and again; what came, and its longest pause."""

    prompt: str
    sampling: SamplingParams
    texts: list[tuple[int, ...]] = field(default_factory=list)
    pause_s: float = 0.0

    async def run(self, client: Client, choice: ModelChoice, until: asyncio.Event) -> None:
        """Ask until it is over. Each answer comes whole."""
        while not until.is_set():
            await self.ask(client, choice)

    async def ask(self, client: Client, choice: ModelChoice) -> None:
        ids: list[int] = []
        at_s = time.monotonic()
        async for event in client.generate(
            self.prompt,
            self.sampling,
            model=choice,
            max_tokens=N_TOKENS,
            ignore_eos=True,
            key=f"{self.prompt} {len(self.texts)} {id(self)}",
        ):
            assert event.error is None, event.error
            if event.token_ids:
                self.pause_s = max(self.pause_s, time.monotonic() - at_s)
                at_s = time.monotonic()
            ids += event.token_ids
        self.texts.append(tuple(ids))


@contextlib.asynccontextmanager
async def streaming(town: Town, choice: ModelChoice) -> AsyncIterator[list[Stream]]:
    """Have clients stream while the body runs; check their texts at the end."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect(choice.nodes[0], town.identity))
            for _ in PROMPTS
        ]
        streams = [Stream(prompt=prompt, sampling=sampling) for prompt, sampling in PROMPTS]
        for stream, client in zip(streams, clients, strict=True):
            await stream.ask(client, choice)
            stream.pause_s = 0.0
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for stream, client in zip(streams, clients, strict=True):
                tasks.create_task(stream.run(client, choice, over))
            try:
                yield streams
            finally:
                over.set()
        for stream in streams:
            assert len(stream.texts) > 1
            assert len(set(stream.texts)) == 1, stream.prompt
            assert len(stream.texts[0]) == N_TOKENS


@pytest.mark.timeout(7200 if is_soak() else 600)
def test_all_nodes_are_updated_while_streams_go_on(town: Town) -> None:
    choice = ModelChoice(
        model=DEFAULT_MODEL_NAME, nodes=[node.address for node in town.nodes], context=512
    )
    n_due = len(NAMES) if is_soak() else 1

    async def main() -> None:
        for number in range(N_ROUNDS):
            version = f"9.0.{number}"
            wheel = town.folder / f"shardnet-{version}-{TAG}.whl"
            if not wheel.exists():
                make_wheel(town.folder, version)
            async with streaming(town, choice) as streams:
                result = await asyncio.to_thread(town.update(wheel).wait, UPDATE_S)
            pauses = [stream.pause_s for stream in streams]
            print(f"{version}: longest pauses {[round(pause_s, 2) for pause_s in pauses]} s")
            assert result.code == 0, result.stderr
            n_back = len(re.findall("back(?: in its ring|, and the plan)", result.stderr))
            assert n_back == n_due, result.stderr
            assert await town.versions() == [version] * len(NAMES)
            assert max(pauses) < PAUSE_S

    asyncio.run(main())
    if is_soak():
        check_broken(town, f"9.0.{N_ROUNDS - 1}")


def check_broken(town: Town, version: str) -> None:
    """Send a version that ends at once: the first node goes back, and nothing happens to others."""
    before = {"shardnet/cluster/node/__init__.py": "raise SystemExit(1)\n"}
    result = town.update(make_wheel(town.folder, "9.9.9", before)).wait(UPDATE_S)
    assert re.search(
        r"does not run 9.9.9: it ended with status 1; it runs 9.0.\d again", result.error
    )
    assert "0 nodes updated; not begun:" in result.stderr
    assert asyncio.run(town.versions()) == [version] * len(NAMES)
    assert sum("has sent shardnet-9.9.9" in node.log for node in town.nodes) == len(NAMES)
    assert sum("is taken back" in node.log for node in town.nodes) == 1


def test_what_stands_in_the_way_is_said_before_anything_is_done(machine: Machine) -> None:
    """Nodes that take no version; no key; no wheel."""
    wheel = make_wheel(machine.folder, "9.0.0", main="pass")
    assert "there is no key in" in machine.call("update", str(wheel)).error
    assert machine.call("key", "new").code == 0
    [anna] = machine.start_nodes("anna", arguments=["--host", "127.0.0.1"])
    [told] = machine.call("update", "--dry-run", "--json", str(wheel)).json
    assert (told["does"], told["to"], told["done"]) == ("by hand", None, False)
    assert "--allow-update" in told["refusal"]
    error = machine.call("update", str(wheel)).error
    assert error.startswith(f"1 node not updated: anna ({anna.address}): its owner has not")
    assert "pip install WHEEL" in error
    assert "no wheel of shardnet" in machine.call("update", anna.address).error
