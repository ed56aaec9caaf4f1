"""`shardnet key rotate` on real nodes, each with a key file of its own, while texts stream."""

from __future__ import annotations

import asyncio
import contextlib
import string
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import pytest
from support.system.nodes import Machine, NodeProcess
from support.system.parrot import make_parrot
from support.waiting import until

from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.cluster.machine.folders import ClusterKey, load_key, store_key
from shardnet.wire.messages.plans import ModelChoice

NAMES = ("anna", "bert", "cleo")
LETTERS = string.ascii_lowercase
N_TOKENS = 40
N_LONG = 8000


def said(n: int) -> str:
    """What follows an `a`."""
    return "".join(islice(cycle(LETTERS), 1, n + 1))


@dataclass
class Cluster:
    """Machines that hold one key, each in a file of its own, and their nodes by name."""

    machines: dict[str, Machine]
    nodes: dict[str, NodeProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start the node of a machine, or start it again."""
        peers = [arg for node in self.nodes.values() for arg in ("--peer", node.address)]
        [self.nodes[name]] = self.machines[name].start_nodes(name, arguments=peers)

    def file(self, name: str) -> Path:
        return self.machines[name].config_path.with_name("cluster.key")

    def keys(self, *names: str) -> set[tuple[bytes, bytes]]:
        """What the key files of machines hold: the key, and the one before."""
        found = [load_key(self.file(name)) for name in names or NAMES]
        return {(key.secret, key.old) for key in found if key is not None}

    async def rotate(self, *arguments: str, killed_at: str = "") -> str:
        """Run the command on anna's machine to its end, or until it has said so much."""
        command = self.machines["anna"].begin_copy("key", "rotate", *arguments)
        if killed_at:
            await asyncio.to_thread(command.stderr.wait_for, killed_at)
            command.kill()
            return ""
        result = await asyncio.to_thread(command.wait)
        assert result.code == 0, result.stderr
        return result.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three machines with one key and a node each."""
    key = ClusterKey.make()
    with contextlib.ExitStack() as stack:
        cluster = Cluster({name: Machine(tmp_path / name) for name in NAMES})
        for name, machine in cluster.machines.items():
            stack.callback(machine.close)
            store_key(key, cluster.file(name))
            cluster.start(name)
        yield cluster


@dataclass
class Streams:
    """Texts that are asked for one after the other, and one that goes on all the time."""

    client: Client
    choice: ModelChoice
    n_texts: int = 0
    long: str = ""

    async def ask_again_and_again(self) -> None:
        while True:
            [result] = await self.client.complete("a", model=self.choice, max_tokens=N_TOKENS)
            assert result.text == said(N_TOKENS)
            self.n_texts += 1

    async def go_on(self) -> None:
        async for event in self.client.generate("a", model=self.choice, max_tokens=N_LONG):
            assert event.error is None
            self.long += event.text

    async def more(self) -> None:
        """Wait for a further text, and a further token of the long one."""
        n_texts, n_long = self.n_texts + 1, len(self.long) + 1
        await until(lambda: self.n_texts >= n_texts and len(self.long) >= n_long)


@contextlib.asynccontextmanager
async def streaming(choice: ModelChoice, key_file: Path) -> AsyncIterator[Streams]:
    """Have a client stream texts meanwhile, by a key file of its own; all must be right."""
    async with connect(choice.nodes[0], load_identity(str(key_file))) as client:
        streams = Streams(client, choice)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(work())
                for work in (
                    streams.ask_again_and_again,
                    streams.ask_again_and_again,
                    streams.go_on,
                )
            ]
            await streams.more()
            yield streams
            await streams.more()
            ring = await client.activity()
            for task in running:
                task.cancel()
    assert streams.long == said(len(streams.long))
    assert ring.recoveries == []


def test_texts_go_on_while_nodes_take_a_new_key(cluster: Cluster, tmp_path: Path) -> None:
    """The command is killed amid both phases; one node is off meanwhile, and follows."""
    [(old, _)] = cluster.keys()
    laptop, stolen = tmp_path / "laptop.key", tmp_path / "stolen.key"
    for path in (laptop, stolen):
        store_key(ClusterKey(old), path)
    model = make_parrot(tmp_path / "alphabet", LETTERS, ends=False)
    addresses = [cluster.nodes[name].address for name in ("anna", "bert")]
    choice = ModelChoice(model=str(model), nodes=addresses, layers=[(0, 2), (2, 4)])

    async def main() -> None:
        async with streaming(choice, laptop) as streams:
            cluster.nodes.pop("cleo").kill()
            await cluster.rotate(killed_at="anna has the new key (1 of 2)")
            [(new, _)] = cluster.keys("anna")
            await until(lambda: cluster.keys("anna", "bert") == {(new, old)})
            assert cluster.keys("cleo") == {(old, b"")}
            await asyncio.to_thread(cluster.start, "cleo")
            await until(lambda: cluster.keys() == {(new, old)})
            await streams.more()
            await cluster.rotate("--finish", killed_at="has forgotten the old key (1 of 3)")
            await streams.more()
            assert "(3 of 3)" in await cluster.rotate("--finish")
            assert cluster.keys() == {(new, b"")} != {(old, b"")}
        followed = load_key(laptop)
        assert followed is not None
        assert followed.secret == new

    asyncio.run(main())
    refused = cluster.machines["bert"].run("nodes", "--key-file", str(stolen)).stderr
    assert "it holds another cluster key" in refused
    for name in ("anna", "bert"):
        gone = [line for line in cluster.nodes[name].log.splitlines() if "is gone" in line]
        assert all(line.startswith("node cleo") for line in gone), gone
