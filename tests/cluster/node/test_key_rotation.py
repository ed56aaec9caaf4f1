"""Cluster keys that change on running nodes: who follows, who is refused, and what a crash leaves.

The nodes are in this process, over real sockets; tests/system has processes and streams.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.cluster.small_node import small_settings
from support.full_disk import full_disk
from support.waiting import until

from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.cluster.machine.folders import ClusterKey, load_key, store_key
from shardnet.cluster.node.node import Node, listening
from shardnet.errors import AuthenticationError, ConfigurationError, ShardnetError
from shardnet.transport.loop import run
from shardnet.types import NodeId

OLD, NEW, THIRD = (ClusterKey(bytes([n]) * 16) for n in (1, 2, 3))
DAY_S = 86_400


@dataclass
class Cluster:
    """Nodes by name, each with a folder and a key file of its own."""

    folder: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        return self.folder / name / "cluster.key"

    def key(self, name: str) -> ClusterKey | None:
        return load_key(self.file(name))

    @asynccontextmanager
    async def node(self, name: str, key: ClusterKey | None = None) -> AsyncIterator[Node]:
        """Run a node with the key of its file, `key` if there is none yet; it knows all others."""
        if key is not None:
            store_key(key, self.file(name))
        log = self.logs.setdefault(name, [])
        settings = replace(
            small_settings(self.folder / name, load_identity(str(self.file(name)))),
            node=NodeId(name[0] * 32),
            name=name,
            peers=tuple(node.address for node in self.nodes.values()),
            log=log.append,
        )
        async with listening(settings, "127.0.0.1", 0) as node:
            self.nodes[name] = node
            try:
                yield node
            finally:
                del self.nodes[name]

    @asynccontextmanager
    async def client(self, name: str, key: ClusterKey | None = None) -> AsyncIterator[Client]:
        """Ask a node as a program on a machine of its own that holds `key`."""
        path = self.file("laptop")
        if key is not None:
            store_key(key, path, replace=True)
        async with connect(self.nodes[name].address, load_identity(str(path))) as client:
            yield client

    async def linked(self, one: str, other: str) -> None:
        """Wait until a node has a link to another that was opened with the key of both."""
        identity, links = self.nodes[one].settings.identity, self.nodes[one].links.peers.links
        assert identity is not None

        def are_linked() -> bool:
            control = links.link_of(self.nodes[other].node)
            return control is not None and identity.is_present(control.link)

        await until(are_linked)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """No node yet."""
    return Cluster(tmp_path)


def old_of(key: ClusterKey | None) -> tuple[bytes, bytes] | None:
    return (key.secret, key.old) if key is not None else None


BOTH, NEW_ALONE = (NEW.secret, OLD.secret), (NEW.secret, b"")


def test_who_was_off_gets_the_key_from_whom_it_meets(cluster: Cluster) -> None:
    """One file has the new key, as when `key rotate` is killed at once: all others get it."""

    async def main() -> None:
        until_s = time.time() + DAY_S
        async with cluster.node("bert", OLD), cluster.node("cleo", OLD):
            await cluster.linked("bert", "cleo")
            async with cluster.node("anna", ClusterKey(NEW.secret, OLD.secret, until_s)):
                await cluster.linked("anna", "bert")
                await cluster.linked("bert", "cleo")
                async with cluster.client("cleo", OLD) as client:
                    await until(lambda: old_of(cluster.key("laptop")) == BOTH)
                    await client.status()
                names = ("anna", "bert", "cleo", "laptop")
                assert {old_of(cluster.key(name)) for name in names} == {BOTH}
                kept = cluster.key("cleo")
                assert kept is not None
                assert abs(kept.until_s - until_s) < 60
        async with cluster.node("cleo"), cluster.node("bert"):  # started again, from their files
            await cluster.linked("bert", "cleo")

    run(main())


def test_who_missed_the_end_of_the_old_key_is_handed_the_one_after(cluster: Cluster) -> None:
    """A third key is no news to wait with where it comes after the one that is held; another is."""
    third = ClusterKey.make()

    async def main() -> None:
        until_s = time.time() + DAY_S
        missed = ClusterKey(NEW.secret, OLD.secret, until_s)
        async with cluster.node("anna", ClusterKey(third.secret, NEW.secret, until_s)) as anna:
            async with cluster.node("cleo", missed):
                await cluster.linked("anna", "cleo")
                async with cluster.client("cleo", missed) as client:
                    await until(lambda: old_of(cluster.key("laptop")) == (third.secret, NEW.secret))
                    await client.status()
                assert old_of(cluster.key("cleo")) == (third.secret, NEW.secret)
            other = ClusterKey.make()
            async with cluster.node("dora", ClusterKey(other.secret, NEW.secret, until_s)):
                refused = "dora .* has not the new cluster key yet: .* has taken another new key"
                await until(lambda: any(re.search(refused, line) for line in cluster.logs["anna"]))
                assert old_of(cluster.key("dora")) == (other.secret, NEW.secret)
            assert old_of(cluster.key("anna")) == (third.secret, NEW.secret), anna.node

    run(main())


def test_once_the_old_key_is_over_its_holders_are_refused(cluster: Cluster) -> None:
    async def main() -> None:
        async with cluster.node("anna", OLD) as anna, cluster.node("bert", OLD) as bert:
            await cluster.linked("anna", "bert")
            async with cluster.client("anna", OLD) as client, cluster.client("anna") as idle:
                for node in (anna.node, bert.node):
                    told = await client.take_key(NEW.secret, DAY_S, node)
                    assert DAY_S - 60 < told.old_s <= DAY_S
                for node in (anna.node, bert.node):
                    assert (await client.take_key(NEW.secret, 0, node)).old_s == 0
                await cluster.linked("anna", "bert")
                await idle.status()
            assert old_of(cluster.key("anna")) == old_of(cluster.key("bert")) == NEW_ALONE
            assert not any("is gone" in line for line in cluster.logs["anna"])
            with pytest.raises(AuthenticationError, match="holds another cluster key"):
                async with cluster.client("anna", OLD):
                    pass
            async with cluster.node("cleo", OLD) as cleo:
                await until(lambda: len(cleo.links.peers.unreached) == 2)
                wrong = str(cleo.links.peers.unreached[anna.address])
                assert "shardnet key join --replace" in wrong

    run(main())


def test_a_link_under_the_old_key_alone_ends_with_it(cluster: Cluster) -> None:
    """A peer and a client of releases that take no keys: they stay until the old one is over."""

    async def main() -> None:
        async with cluster.node("anna", OLD) as anna:
            with pytest.MonkeyPatch.context() as patch:
                for module in ("shardnet.api.client", "shardnet.cluster.node.parts"):
                    patch.setattr(f"{module}.Capability", ())
                async with cluster.node("bert", OLD) as bert, cluster.client("anna", OLD) as client:
                    links = anna.links.peers.links
                    await until(lambda: bert.node in links)
                    async with cluster.client("anna") as own:
                        with pytest.raises(ShardnetError, match=r"bert runs shardnet .* update it"):
                            await own.take_key(OLD.secret, DAY_S, bert.node)
                        await own.take_key(NEW.secret, DAY_S)
                        await until(lambda: "has not the new" in cluster.logs["anna"][-1])
                        await client.status()
                        assert bert.node in links
                        await own.take_key(NEW.secret, 0)
                    with contextlib.suppress(AuthenticationError):  # or it finds the link closed
                        await client.status()
                        pytest.fail("it was answered")
                    await until(lambda: bert.node not in links)
                    await until(lambda: not anna.dispatcher.clients)

    run(main())


def test_a_key_that_cannot_be_stored_is_not_used(cluster: Cluster) -> None:
    async def main() -> None:
        async with cluster.node("anna", OLD) as anna, cluster.client("anna", OLD) as client:
            with full_disk(0), pytest.raises(ConfigurationError, match="cannot be written"):
                await client.take_key(NEW.secret, DAY_S)
            assert anna.cluster == client._identity.fingerprint
            await client.take_key(NEW.secret, DAY_S)
            with pytest.raises(ConfigurationError, match=r"another new key, of cluster .*--finish"):
                await client.take_key(THIRD.secret, DAY_S)
            store_key(THIRD, cluster.file("anna"), replace=True)  # typed there meanwhile
            with pytest.raises(ConfigurationError, match="holds another key by now"):
                await client.take_key(NEW.secret, 0)
            assert cluster.key("anna") == THIRD

    run(main())


def test_the_old_key_is_forgotten_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with cluster.node("anna", OLD) as anna, cluster.client("anna", OLD) as client:
            await client.take_key(NEW.secret, DAY_S)
            before = anna.cluster
            await until(lambda: old_of(cluster.key("laptop")) == BOTH)
            later = time.time() + 2 * DAY_S
            monkeypatch.setattr(time, "time", lambda: later)
            await until(lambda: anna.cluster != before)
            assert cluster.file("anna").read_text() == f"{NEW.text()}\n"
            await client.status()
            assert old_of(cluster.key("laptop")) == NEW_ALONE

    run(main())


def test_without_a_key_there_is_none_to_take(cluster: Cluster) -> None:
    async def main() -> None:
        settings = small_settings(cluster.folder)
        async with listening(settings, "127.0.0.1", 0) as node, connect(node.address) as client:
            with pytest.raises(ShardnetError, match="this node has no cluster key"):
                await client.take_key(NEW.secret, DAY_S)

    run(main())
