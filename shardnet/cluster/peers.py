"""The control links of this node to others: one per peer, opened when needed, kept while they live.

Knows addresses and links. Liveness comes from these links alone. Must not know models or rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shardnet.cluster.control import ControlLink, Handler
from shardnet.errors import ShardnetError, UsageError
from shardnet.transport.link import Link
from shardnet.types import NodeId

REDIAL_S = 5.0
"""How long after losing a named peer it is dialled again."""

DialControl = Callable[[str], Awaitable[Link]]
"""Opens a control link to an address."""


def split_address(address: str) -> tuple[str, int]:
    """Read `host:port`, an IPv6 host in brackets. Raises UsageError when it is not that."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"'{address}' is not HOST:PORT")
    return host, int(port)


class Peers:
    """Control links by node id. Runs their readers in `tasks`, a group that outlives them."""

    def __init__(self, *, dial: DialControl, handler: Handler, tasks: asyncio.TaskGroup) -> None:
        self._dial = dial
        self._handler = handler
        self._tasks = tasks
        self._by_node: dict[NodeId, ControlLink] = {}
        self._node_at: dict[str, NodeId] = {}
        self._dialling: dict[str, asyncio.Lock] = {}
        self._watchers: dict[ControlLink, list[Callable[[ShardnetError], None]]] = {}

    def linked(self) -> list[ControlLink]:
        """Return the links that are up, by name of the peer."""
        return sorted(self._by_node.values(), key=lambda control: control.link.peer.name)

    async def link_to(self, address: str) -> ControlLink:
        """Return the control link to the node at `address`, dialling it if there is none.

        Raises what dialling raises.
        """
        async with self._dialling.setdefault(address, asyncio.Lock()):
            node = self._node_at.get(address)
            if node is not None and node in self._by_node:
                return self._by_node[node]
            link = await self._dial(address)
            self._node_at[address] = NodeId(link.peer.node)
            known = self._by_node.get(NodeId(link.peer.node))
            if known is not None:  # it had dialled us
                await link.close()
                return known
            return self.adopt(link)

    def adopt(self, link: Link) -> ControlLink:
        """Serve a control link that is up, in a task of its own."""
        control = ControlLink(link, self._handler)
        self._by_node.setdefault(NodeId(link.peer.node), control)
        self._watchers[control] = []
        self._tasks.create_task(self._serve(control), name=f"control {link.peer.name}")
        return control

    def watch(self, control: ControlLink, on_lost: Callable[[ShardnetError], None]) -> None:
        """Call `on_lost` once when the link ends; at once if it has."""
        if control.ended is None:
            self._watchers[control].append(on_lost)
        else:
            on_lost(control.ended)

    async def keep(self, address: str, log: Callable[[str], None]) -> None:
        """Keep a link to `address` for ever: dial, wait for its end, dial again."""
        last_failure = ""
        while True:
            try:
                await self._lost(await self.link_to(address))
                last_failure = ""
            except ShardnetError as error:
                if str(error) != last_failure:
                    last_failure = str(error)
                    log(f"peer {address}: {error}; trying again every {REDIAL_S:.0f} s")
            await asyncio.sleep(REDIAL_S)

    async def _lost(self, control: ControlLink) -> None:
        """Wait until the link has ended."""
        lost = asyncio.Event()
        self.watch(control, lambda _: lost.set())
        await lost.wait()

    async def close(self) -> None:
        """Say goodbye on every link."""
        await asyncio.gather(*(control.link.close() for control in list(self._watchers)))

    async def _serve(self, control: ControlLink) -> None:
        try:
            await control.serve()
        except ShardnetError as error:
            if self._by_node.get(NodeId(control.link.peer.node)) is control:
                del self._by_node[NodeId(control.link.peer.node)]
            for on_lost in self._watchers.pop(control):
                on_lost(error)
