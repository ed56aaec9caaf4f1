"""The latest NodeInfo of this node and of those it is linked to.

Knows how to ask a node for its status, and how long to wait. Must not know plans, rings or clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shardnet.cluster.peers.advertisement import Advertisement
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.peers import Peers
from shardnet.errors import LinkError, ShardnetError, UsageError
from shardnet.transport.loop import together
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.membership import NodeInfo, Status, StatusReply
from shardnet.wire.messages.plans import LeftOut

PEER_STATUS_S = 10.0
"""Timeout of a peer's status before a node plans without it: longer than a silent link lives, so a
peer left out for this reason is reachable but overloaded."""
TOO_BUSY = "its link lives, so it is too busy; ask again when that has ended"
LISTED_S = 0.7
"""Timeout of a peer's status before a list shows the last known one: lists must be quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCandidates:
    """The nodes that a plan may use, and the linked peers without a status in time.

    Those that are `away` drain or rest: they are named among the `silent` too, and do no more than
    go on in the ring that they are in, where it needs them.
    """

    nodes: tuple[NodeInfo, ...]
    silent: tuple[LeftOut, ...] = ()
    away: tuple[NodeInfo, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False)
class NodeDirectory:
    """The current status of this node and its peers. `own_info` returns that of this one.

    `status_s` is the timeout of a peer's status when a plan needs it, in seconds.
    """

    own_info: Callable[[], NodeInfo]
    peers: Peers
    advertisement: Advertisement
    status_s: float = PEER_STATUS_S

    def __post_init__(self) -> None:
        self._latest: dict[str, NodeInfo] = {}

    async def candidates(
        self, addresses: Sequence[str], status_s: float | None = None, *, leads: bool = False
    ) -> NodeCandidates:
        """Return the nodes at `addresses`; without any, this node and its peers, without those that
        drain or rest. If this node `leads` the ring to replace, it is the first in any case.

        Waits for a peer while its link lives, at most `status_s` if given. Raises LinkError if
        there is no node at an address, UsageError if one is named twice.
        """
        if not addresses:
            await self.peers.links.settled()
            infos, silent = await self._ask_all(self.status_s if status_s is None else status_s)
            own = self.own_info()
            nodes = infos if leads else [own, *infos]
            away = tuple(info for info in nodes if info.is_draining or info.rests)
            stay = tuple(info for info in nodes if not (info.is_draining or info.rests))
            if leads:
                stay = (own, *stay)
            return NodeCandidates(nodes=stay, silent=(*silent, *map(_away, away)), away=away)
        async with together() as tasks:
            asks = [tasks.create_task(self._at(address)) for address in addresses]
        infos = [ask.result() for ask in asks]
        for place, info in enumerate(infos):
            if info.node in {other.node for other in infos[:place]}:
                raise UsageError(f"--nodes names node {info.name} ({info.address}) twice")
        return NodeCandidates(nodes=tuple(infos))

    async def of(self, nodes: Collection[str], status_s: float) -> list[NodeInfo]:
        """Return the status of those of some nodes, by their ids, that answer in time."""
        infos, _ = await self._ask_all(status_s, nodes)
        return [info for info in (self.own_info(), *infos) if info.node in nodes]

    async def listed(self) -> list[NodeInfo]:
        """Return the status of each peer, the last known one if it does not answer at once."""
        infos, _ = await self._ask_all(LISTED_S)
        answers = {info.node: info for info in infos}
        linked = [control.link.peer.node for control in self.peers.links.linked()]
        self._latest = {node: self._latest[node] for node in linked if node in self._latest}
        return [answers.get(node) or self._latest[node] for node in linked if node in self._latest]

    async def _ask_all(
        self, grace_s: float, nodes: Collection[str] | None = None
    ) -> tuple[list[NodeInfo], tuple[LeftOut, ...]]:
        """Ask every linked peer, or those of `nodes`.

        Returns the answers, and the peers without one in `grace_s`. One whose link breaks meanwhile
        is asked again over its next one.
        """

        links = self.peers.links

        async def ask(control: ControlLink) -> NodeInfo | LeftOut:
            try:
                async with asyncio.timeout(grace_s):
                    try:
                        return await _ask(control)
                    except LinkError:
                        await links.settled()
                        if (again := links.link_of(NodeId(control.link.peer.node))) is None:
                            raise
                        return await _ask(again)
            except TimeoutError:
                return _silent(control, f"it did not answer within {grace_s:g} s: {TOO_BUSY}")
            except ShardnetError as error:
                return _silent(control, explanation(error))

        asked = [each for each in links.linked() if nodes is None or each.link.peer.node in nodes]
        answers = await asyncio.gather(*map(ask, asked))
        infos = [
            replace(info, address=self.peers.address_of(NodeId(info.node)) or info.address)
            for info in answers
            if isinstance(info, NodeInfo)
        ]
        self._latest |= {info.node: info for info in infos}
        return infos, tuple(answer for answer in answers if isinstance(answer, LeftOut))

    async def _at(self, address: str) -> NodeInfo:
        """Return the status of the node at `address`, which may be this one, or sleep."""
        own = self.own_info()
        if (asleep := self.peers.sleepers.at(address)) is not None:
            return asleep
        control = None if address == own.address else await self.peers.find(address)
        if control is not None:
            return replace(await _ask(control), address=address)
        return replace(own, address=self.advertisement.seen_as(address))


def _away(info: NodeInfo) -> LeftOut:
    why = "it is draining" if info.is_draining else info.rests
    return LeftOut(node=info.node, name=info.name, why=why)


def _silent(control: ControlLink, why: str) -> LeftOut:
    hello = control.link.peer
    return LeftOut(node=hello.node, name=hello.name, why=why)


async def _ask(control: ControlLink) -> NodeInfo:
    ask = Status(request=0, with_peers=False)
    return (await control.ask(ask, StatusReply)).node
