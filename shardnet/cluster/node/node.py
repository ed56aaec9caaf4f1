"""The node: built from its parts, begun, ended.

Knows in which order the parts begin and end; how they are built stands in node/parts.py and
node/services.py.
Everything a node does is done elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from shardnet.cluster.machine.addresses import LOOPBACK_HOST
from shardnet.cluster.machine.profile import make_node_id
from shardnet.cluster.node.parts import LinkParts, StageParts
from shardnet.cluster.node.services import Services, own_client
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers.address_search import AddressSearch, RememberedPeers
from shardnet.cluster.peers.supervision import kept_running
from shardnet.cluster.pressure.sleep import SleepSettings
from shardnet.errors import PeerFailedError, ShardnetError
from shardnet.transport import tcp
from shardnet.transport.link import Link
from shardnet.transport.listener import Listener
from shardnet.transport.loop import at_most
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

MEET_S: Final = 3.0
"""How long a runner waits for links to the others of its model."""
ADDRESSES_S: Final = 2.0
"""Interval of the looks at this machine's addresses."""


class Node(Services):
    """One node. Runs inside `running`, which owns its tasks. Its parts tell it of events."""

    def __init__(self, settings: NodeSettings, tasks: asyncio.TaskGroup) -> None:
        links = LinkParts(settings, self, tasks)
        stage = StageParts(settings, links)
        self.search = AddressSearch(
            peers=links.peers,
            probe=links.dialer.probe,
            on_disk=stage.disk.submit,
            remembered=RememberedPeers(settings.cache, lambda: settings.clusters)
            if settings.remembers
            else None,
            tailnet=settings.tailnet,
            named=settings.peers,
            log=settings.log,
        )
        self._listens_on = LOOPBACK_HOST
        super().__init__(settings, links, stage, tasks)

    def addresses_changed(self) -> None:
        """Advertise the node's addresses again: to its peers, and by mDNS."""
        self.links.peers.addresses_changed()
        if self.settings.discovery is not None:
            self.settings.discovery.announce()

    def cluster_renamed(self) -> None:
        """Advertise the node by the names that its cluster has now, and remember peers by them."""
        super().cluster_renamed()
        self.search.remember_all()

    @asynccontextmanager
    async def open_runner(self, model: str, choice: ModelChoice) -> AsyncIterator[NodeRunner]:
        """See Services: it listens where this node does, at a port of its own."""
        settings, host = self.settings, self.stage.host
        own = replace(
            settings,
            node=make_node_id(),
            name=settings.name,
            budget=replace(settings.budget, asked_bytes=0),
            peers=(),
            discovery=None,
            tailnet=False,
            remembers=False,
            idle_unload_s=None,
            keeper=None,
            serves_http=False,
            sleeps=SleepSettings(),
            serves=choice,
            compute=host.compute,
            log=lambda line: settings.log(f"{model}: {line}"),
        )
        async with listening(own, self._listens_on, 0) as node:
            node.router.entrance = lambda: self.address
            yield NodeRunner(node)

    def info(self) -> NodeInfo:
        """Describe this node."""
        return self.stage.own.info()

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self.settings.node

    @property
    def address(self) -> str:
        """The address at which others reach this node best, "" if it does not listen."""
        return self.links.advertisement.address

    @property
    def cluster(self) -> str | None:
        """The fingerprint of this node's cluster, None if it has no key."""
        return self.settings.cluster

    async def client(self) -> Link:
        """Open a control link to this node from its own process."""
        return await own_client(self.links, self.dispatcher)

    async def listen(self, host: str, port: int) -> Listener:
        """Listen on `host`, "" for all interfaces. Raises ConfigurationError if it cannot."""
        self._listens_on = host
        listener = await tcp.listen(
            host,
            port,
            self.dispatcher.hello,
            self.dispatcher.accept,
            on_failure=lambda error: self.settings.log(f"refused a link: {error}"),
            on_refused=self._refused,
            known=self.links.dialer.known,
            options=self.links.dialer.options,
        )
        self.links.advertisement.listening_at(listener.address)
        return listener

    def _refused(self, host: str, error: ShardnetError) -> None:
        """Count a failed handshake of `host`, for reports."""
        self.links.refusals.note(host, error, time.monotonic())

    def kept(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the node does, each begun again when it fails."""
        peers = self.links.peers
        jobs: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "keeping peers": lambda: peers.run(self.settings.peers),
            "watching for unused models": self.unused.run,
            "watching this machine's memory": self.pressure.run,
            "reading what this machine draws": self.stage.power.run,
            "watching for nodes that come": self.nodes.run,
            "keeping nodes that stand by": self.standbys.run,
            "auditing stages": self.audits.run,
            "changing cluster keys": self.keys.run,
        }
        if self.settings.serves is None:
            jobs["looking after the household"] = self.household.run
        if self.settings.sleeps.after_s is not None:
            jobs["watching for use of this node"] = self.sleep.run
        if self.settings.tailnet or self.settings.remembers:
            jobs["looking for nodes without mDNS"] = self.search.run
        return [kept_running(run, what, self.settings.log) for what, run in jobs.items()]

    async def watch_addresses(self) -> None:
        """Notice changes of this machine's addresses, as DHCP makes them, until cancelled."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(ADDRESSES_S)
                with contextlib.suppress(OSError):  # too many files are open, for a while
                    self.links.advertisement.refresh()

        await kept_running(watch, "watching addresses", self.settings.log)

    async def discover(self) -> None:
        """Advertise this node and discover others, until cancelled."""
        discovery, links = self.settings.discovery, self.links
        if discovery is not None:
            discovery.clusters = self.settings.clusters
            await kept_running(
                lambda: links.advertisement.discover(discovery, links.peers),
                "discovery by mDNS",
                self.settings.log,
            )

    async def close(self) -> None:
        """Unload the ring that this node leads, leave the one it is a member of, end the threads.

        Waiting clients get an error that says so.
        """
        await self.household.close()
        await self.runners.close()
        self.copying.stop()
        self.dispatcher.tell_clients(
            PeerFailedError("the node is leaving", remedy="start it again or ask another one")
        )
        await self.router.close()
        await self.stand_in.close()
        await self.recovery.close()
        await self.head.close()
        self.drafts.close()
        self.lent.close()
        await self.encoders.close()
        self.constraints.close()
        self.pictures.close()
        await self.stage.kv.close()
        await self.stage.host.close()
        await self.links.peers.close()
        await self.stage.sharing.close()
        await self.dispatcher.close()
        self.stage.power.close()
        self.stage.reader.close()
        self.stage.disk.close()
        self.wire_loss.close()


class NodeRunner:
    """A node that is a runner of another one: see household/runners.py."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.node, self.address = node.node, node.address

    @property
    def held_bytes(self) -> int:
        """See Runner."""
        return self._node.stage.host.weight_bytes

    @property
    def is_needed(self) -> bool:
        """See Runner."""
        return self._node.drain.is_needed

    def limit(self, memory_bytes: int, leader: str) -> None:
        """See Runner."""
        self._node.router.leader = leader
        self._node.settings.budget.asked_bytes = memory_bytes

    async def meet(self, addresses: Sequence[str]) -> None:
        """See Runner. One that does not answer within MEET_S is left out."""
        peers = self._node.links.peers
        async with at_most(MEET_S):
            await asyncio.gather(*map(peers.find, addresses), return_exceptions=True)

    async def leave(self, deadline_s: float) -> None:
        """See Runner."""
        await self._node.drain.drain(deadline_s)


@asynccontextmanager
async def running(settings: NodeSettings) -> AsyncIterator[Node]:
    """Run a node that does not listen, for clients in this process; see `listening`."""
    async with asyncio.TaskGroup() as tasks:
        node = Node(settings, tasks)
        keeping = [tasks.create_task(job) for job in node.kept()]
        try:
            yield node
        finally:
            for task in keeping:
                task.cancel()
            await node.close()


@asynccontextmanager
async def listening(settings: NodeSettings, host: str, port: int) -> AsyncIterator[Node]:
    """Run a node that listens on `host`, "" for all interfaces; port 0 takes a free one.

    Raises ConfigurationError when the address cannot be used.
    """
    async with running(settings) as node:
        listener = await node.listen(host, port)
        async with asyncio.TaskGroup() as tasks:
            keeping = [
                tasks.create_task(node.discover()),
                tasks.create_task(node.watch_addresses()),
            ]
            try:
                yield node
            finally:
                for task in keeping:
                    task.cancel()
                await listener.close()
