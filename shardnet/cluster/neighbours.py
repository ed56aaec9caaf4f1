"""What this node tells of itself, and what its neighbours tell of themselves.

Knows how to ask a node who it is, and how long to wait. Must not know plans, rings or clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from shardnet.cluster.control import ControlLink
from shardnet.cluster.peers import Peers
from shardnet.cluster.presence import Presence
from shardnet.errors import ShardnetError, UsageError, first_error
from shardnet.types import NodeId
from shardnet.wire.neighbours import NodeInfo, Status, StatusReply

PEER_STATUS_S = 1.5
"""How long a node waits for a peer's status before it plans without that one."""
LISTED_S = 0.7
"""How long it waits before it tells what it last knew of that peer: lists are to come at once."""


class Neighbours:
    """This node and those it knows, as they are now. `own_info` describes this one."""

    def __init__(
        self, *, own_info: Callable[[], NodeInfo], peers: Peers, presence: Presence
    ) -> None:
        self._own_info = own_info
        self._peers = peers
        self._presence = presence
        self._latest: dict[str, NodeInfo] = {}

    async def candidates(self, addresses: Sequence[str]) -> list[NodeInfo]:
        """Return the nodes at `addresses`, or without any this node and its peers.

        Raises LinkError when there is no node at an address, UsageError when one is named twice.
        """
        if not addresses:
            return [self._own_info(), *await self.peers()]
        try:
            async with asyncio.TaskGroup() as tasks:
                asks = [tasks.create_task(self._at(address)) for address in addresses]
        except* ShardnetError as group:
            raise first_error(group) from None
        infos = [ask.result() for ask in asks]
        for place, info in enumerate(infos):
            if info.node in {other.node for other in infos[:place]}:
                raise UsageError(f"--nodes names node {info.name} ({info.address}) twice")
        return infos

    async def peers(self) -> list[NodeInfo]:
        """Ask every linked peer; one that does not answer in time is left out."""
        return await self._ask_all(PEER_STATUS_S)

    async def listed(self) -> list[NodeInfo]:
        """Ask every linked peer; of one that does not answer at once tell what was known last.

        That it is here is known from its link.
        """
        answers = {info.node: info for info in await self._ask_all(LISTED_S)}
        linked = [control.link.peer.node for control in self._peers.lines.linked()]
        self._latest = {node: self._latest[node] for node in linked if node in self._latest}
        return [answers.get(node) or self._latest[node] for node in linked if node in self._latest]

    async def _ask_all(self, patience_s: float) -> list[NodeInfo]:
        async def ask(control: ControlLink) -> NodeInfo | None:
            try:
                async with asyncio.timeout(patience_s):
                    return await _ask(control)
            except (ShardnetError, TimeoutError):
                return None

        answers = await asyncio.gather(*(ask(control) for control in self._peers.lines.linked()))
        infos = [
            replace(info, address=self._peers.address_of(NodeId(info.node)) or info.address)
            for info in answers
            if info is not None
        ]
        self._latest |= {info.node: info for info in infos}
        return infos

    async def _at(self, address: str) -> NodeInfo:
        """Ask the node at `address`, which may be this one, who it is."""
        own = self._own_info()
        control = None if address == own.address else await self._peers.find(address)
        if control is not None:
            return replace(await _ask(control), address=address)
        return replace(own, address=self._presence.seen_as(address))


async def _ask(control: ControlLink) -> NodeInfo:
    ask = Status(request=control.next_request(), with_peers=False)
    return (await control.ask(ask, StatusReply)).node
