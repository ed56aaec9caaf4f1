"""Nodes in this process that know each other, and can lose all their links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from support.cluster.small_node import small_settings
from support.waiting import until

from shardnet.cluster.node.node import Node, running
from shardnet.errors import LinkError
from shardnet.transport.link import Link
from shardnet.transport.listener import Listener
from shardnet.types import NodeId


@dataclass
class Machine:
    """A node that can lose all its links, and be out of reach."""

    node: Node
    listener: Listener
    lines: list[str] = field(default_factory=list)
    out_of_reach: set[str] = field(default_factory=set)
    """The addresses to which it can open no link."""
    is_unplugged: bool = False

    def __post_init__(self) -> None:
        peers = self.node.links.peers
        dial = peers.dial

        async def dial_there(address: str) -> Link:
            if self.is_unplugged or address in self.out_of_reach:
                raise LinkError("it is unplugged")
            return await dial(address)

        peers.dial = dial_there

    async def unplug(self, *, with_clients: bool = True) -> None:
        """End its links, as when its process is killed; it cannot be reached any more.

        Those of its clients stay unless they are meant too, as when it stands still for a while.
        """
        node, links = self.node, self.node.links.peers.links
        self.is_unplugged = True
        await self.listener.close()
        clients = [one.link for one in node.dispatcher.clients] if with_clients else []
        controls = [one.control.link for peer in links._peers.values() for one in peer.links]
        membership = node.stage.host.membership
        data = [] if membership is None else [*membership._links]
        for link in (*clients, *controls, *data):
            link.abort("unplugged")

    async def plug_in(self) -> None:
        """Let it reach others again, and be reached where it was."""
        self.is_unplugged = False
        port = int(self.listener.address.rpartition(":")[2])
        self.listener = await self.node.listen("127.0.0.1", port)

    async def close(self) -> None:
        """Listen no more."""
        await self.listener.close()


@asynccontextmanager
async def machines(folder: Path, *names: str, **changes: Any) -> AsyncIterator[list[Machine]]:
    """Nodes that know each other, of little memory but for `changes` of their settings."""
    async with AsyncExitStack() as stack:
        found: list[Machine] = []
        for name in names:
            lines: list[str] = []
            settings = replace(
                small_settings(folder / name),
                node=NodeId(name[0] * 32),
                name=name,
                log=lines.append,
                peers=tuple(one.node.address for one in found),
                **changes,
            )
            node = await stack.enter_async_context(running(settings))
            listener = await node.listen("127.0.0.1", 0)
            found.append(Machine(node=node, listener=listener, lines=lines))
            stack.push_async_callback(found[-1].close)
        for one in found:
            await until(partial(_knows, one, len(found) - 1))
        yield found


def _knows(machine: Machine, n_others: int) -> bool:
    return len(machine.node.links.peers.links.linked()) == n_others
