"""The node: built from its parts, begun, ended.

Knows in which order the parts begin and end; how they are built stands in node/parts.py and
node/services.py.
Everything a node does is done elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from shardnet.cluster.node.parts import LinkParts, StageParts
from shardnet.cluster.node.services import Services, own_client
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers.address_search import AddressSearch, RememberedPeers
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.supervision import kept_running
from shardnet.errors import PeerFailedError, ShardnetError
from shardnet.transport import tcp
from shardnet.transport.link import Link
from shardnet.transport.listener import Listener
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo

ADDRESSES_S: Final = 2.0
"""Interval of the looks at this machine's addresses."""


class Node:
    """One node. Runs inside `running`, which owns its tasks. It is the NodeEvents of its parts."""

    def __init__(self, settings: NodeSettings, tasks: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._links = LinkParts(settings, self, tasks)
        self._stage = StageParts(settings, self._links)
        self._search = AddressSearch(
            peers=self._links.peers,
            probe=self._links.dialer.probe,
            on_disk=self._stage.disk.submit,
            remembered=RememberedPeers(settings.cache, settings.cluster or "")
            if settings.remembers
            else None,
            tailnet=settings.tailnet,
            named=settings.peers,
            log=settings.log,
        )
        self._services = services = Services(settings, self._links, self._stage, tasks)
        self.head = services.head
        """What this node does as a head."""
        self.handlers = services.handlers
        """What handles each control message."""
        self.drain = services.drain
        """How this node is emptied before it ends."""
        self.pressure = services.pressure
        """How this node gives memory and processors back."""
        self.planned = services.planned
        """How a ring that this node leads is replaced while it works."""
        self.router = services.router
        """Which ring of several behind this head a request is given to."""
        self.audits = services.audits
        """How stages of a ring that this node leads are audited."""
        self.standbys = services.standbys
        """How nodes stand by for others in a ring that this node leads."""
        self.recovery = services.recovery
        """How a ring that this node leads is replaced when it is lost."""

    def addresses_changed(self) -> None:
        """Advertise the node's addresses again: to its peers, and by mDNS."""
        self._links.peers.addresses_changed()
        if self._settings.discovery is not None:
            self._settings.discovery.announce()

    def heartbeat_progress(self) -> tuple[int, int]:
        """Return (epoch, last completed step) for heartbeats."""
        return self._stage.host.progress

    def rests(self) -> str:
        """Return why this node takes no layers now, "" while it does."""
        return self._stage.host.refusals.rests

    def named_peer_answered(self, address: str) -> None:
        """Remember an address that a person has named, for later starts."""
        self._search.remember(address)

    async def message_received(self, control: ControlLink, message: Incoming) -> None:
        """Handle a message of a peer. Raises ShardnetError: the request fails with it."""
        await self.handlers.handle(control, message)

    def info(self) -> NodeInfo:
        """Describe this node."""
        return self._stage.own.info()

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self._settings.node

    @property
    def address(self) -> str:
        """The address at which others reach this node best, "" if it does not listen."""
        return self._links.advertisement.address

    @property
    def cluster(self) -> str | None:
        """The fingerprint of this node's cluster, None if it has no key."""
        return self._settings.cluster

    async def client(self) -> Link:
        """Open a control link to this node from its own process."""
        return await own_client(self._links, self._services.dispatcher)

    async def listen(self, host: str, port: int) -> Listener:
        """Listen on `host`, "" for all interfaces. Raises ConfigurationError if it cannot."""
        listener = await tcp.listen(
            host,
            port,
            self._services.dispatcher.hello,
            self._services.dispatcher.accept,
            on_failure=lambda error: self._settings.log(f"refused a link: {error}"),
            on_refused=self._refused,
            known=self._links.dialer.known,
            options=self._links.dialer.options,
        )
        self._links.advertisement.listening_at(listener.address)
        return listener

    def _refused(self, host: str, error: ShardnetError) -> None:
        """Count a failed handshake of `host`, for reports."""
        self._links.refusals.note(host, error, time.monotonic())

    def kept(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the node does, each begun again when it fails."""
        peers, services = self._links.peers, self._services
        jobs: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "keeping peers": lambda: peers.run(self._settings.peers),
            "watching for unused models": services.unused.run,
            "watching this machine's memory": services.pressure.run,
            "watching for nodes that come": services.nodes.run,
            "keeping nodes that stand by": services.standbys.run,
            "auditing stages": services.audits.run,
        }
        if self._settings.tailnet or self._settings.remembers:
            jobs["looking for nodes without mDNS"] = self._search.run
        return [kept_running(run, what, self._settings.log) for what, run in jobs.items()]

    async def watch_addresses(self) -> None:
        """Notice changes of this machine's addresses, as DHCP makes them, until cancelled."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(ADDRESSES_S)
                with contextlib.suppress(OSError):  # too many files are open, for a while
                    self._links.advertisement.refresh()

        await kept_running(watch, "watching addresses", self._settings.log)

    async def discover(self) -> None:
        """Advertise this node and discover others, until cancelled."""
        discovery, links = self._settings.discovery, self._links
        if discovery is not None:
            await kept_running(
                lambda: links.advertisement.discover(discovery, links.peers),
                "discovery by mDNS",
                self._settings.log,
            )

    async def close(self) -> None:
        """Unload the ring that this node leads, leave the one it is a member of, end the threads.

        Waiting clients get an error that says so.
        """
        self._services.stand_in.stop_copying()
        self._services.dispatcher.tell_clients(
            PeerFailedError("the node is leaving", remedy="start it again or ask another one")
        )
        await self._services.router.close()
        await self._services.stand_in.close()
        await self._services.recovery.close()
        await self.head.close()
        self._services.drafts.close()
        self._services.lent.close()
        await self._services.encoders.close()
        self._services.constraints.close()
        self._services.pictures.close()
        await self._stage.kv.close()
        await self._stage.host.close()
        await self._links.peers.close()
        await self._stage.sharing.close()
        await self._services.dispatcher.close()
        self._stage.reader.close()
        self._stage.disk.close()
        self._services.wire_loss.close()


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
