"""The node: the composition root that ties listener, peers, stage and head together.

Knows the parts and in which order they begin and end. Everything a node does is done elsewhere:
what comes in is node/dispatcher.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from shardnet import __version__
from shardnet.cluster.discovery.discovery import Discovery
from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.head_environment import Surroundings
from shardnet.cluster.head.wire_loss import WireErrors
from shardnet.cluster.machine.folders import PACKS_FOLDER
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import MemoryBudget, available_cores, make_host_id
from shardnet.cluster.measuring.figure_cache import FigureCache
from shardnet.cluster.measuring.link_benchmark import LinkFigures
from shardnet.cluster.measuring.measurement_service import Survey
from shardnet.cluster.measuring.node_benchmark import OwnFigures
from shardnet.cluster.node.dispatcher import Reception
from shardnet.cluster.node.reporter import Holding, Reporter
from shardnet.cluster.peers.advertisement import Presence
from shardnet.cluster.peers.node_directory import Neighbours
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.peers.rejected_handshakes import Refusals
from shardnet.cluster.ring.dialer import Dialling
from shardnet.cluster.ring.ring_membership import RingSeat
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.cluster.ring.stage_orders import StageOrders
from shardnet.cluster.sharing.send_rate import SendRate
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import (
    PeerFailedError,
    ShardnetError,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.transport import tcp
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import NodeId
from shardnet.wire.messages.membership import (
    NodeInfo,
    StageInfo,
)
from shardnet.wire.messages.metas import Purpose, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node is told at its start. `threads` 0 is a share of the machine's cores.

    `models` keeps weights that come from other nodes; `share_rate` bounds the bytes per second that
    this one gives to others, None does not.

    Without `identity` its links are neither encrypted nor authenticated. `discovery` finds other
    nodes and makes this one found; without it there are only `peers`, and whom they know. `cache`
    is the folder for what can be made again, figures and the last run among it.
    """

    node: NodeId
    name: str
    budget: MemoryBudget
    threads: int
    peers: tuple[str, ...]
    local_nodes: LocalNodes
    cache: Path
    models: ModelCache
    log: Callable[[str], None]
    share_rate: float | None = None
    identity: Identity | None = None
    discovery: Discovery | None = None


class Node:
    """One node. Runs inside `running`, which owns its tasks."""

    def __init__(self, settings: NodeSettings, tasks: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._tasks = tasks
        self._reader = Executor("shardnet-read", niceness=10)
        self._host = StageHost(dial=self._dial_data, packs=settings.cache / PACKS_FOLDER)
        self._dialling = Dialling(
            node=settings.node,
            name=settings.name,
            identity=settings.identity,
            progress=lambda: self._host.progress,
        )
        self._presence = Presence(
            node=settings.node,
            name=settings.name,
            on_changed=lambda: self._peers.addresses_changed(),
        )
        self._peers = Peers(
            node=settings.node,
            name=settings.name,
            dial=self._dialling.control,
            knock=self._dialling.knock,
            handler=lambda control, message: self._reception.handle(control, message),
            tasks=tasks,
            own_hosts=lambda: self._presence.local,
            own_addresses=lambda: self._presence.addresses,
            log=settings.log,
        )
        self._neighbours = Neighbours(
            own_info=self.info, peers=self._peers, presence=self._presence
        )
        self._sharing = Sharing(
            node=settings.node,
            name=settings.name,
            cache=settings.models,
            peers=self._peers,
            dial=self._dial_bulk,
            rate=SendRate(settings.share_rate),
            log=settings.log,
        )
        self._orders = StageOrders(
            host=self._host,
            sharing=self._sharing,
            budget=settings.budget,
            asked_threads=settings.threads,
            local_nodes=settings.local_nodes,
            watch=self._peers.lines.watch,
            log=settings.log,
        )
        links = LinkFigures(link_of=self._peers.lines.link_of, turn=self._host.turn)
        self._survey = Survey(
            node=settings.node,
            own=OwnFigures(
                host=self._host,
                orders=self._orders,
                reader=self._reader,
                cache=FigureCache(settings.cache, settings.log),
            ),
            links=links,
            reader=self._reader,
            control_to=self._sharing.control,
        )
        self._refusals = Refusals()
        self.head = Head(
            Surroundings(
                node=settings.node,
                name=settings.name,
                host=self._host,
                orders=self._orders,
                sharing=self._sharing,
                peers=self._peers,
                neighbours=self._neighbours,
                survey=self._survey,
                reader=self._reader,
                on_broken=lambda ring, error: self.head.ring_broken(ring, error),
                log=settings.log,
            )
        )
        """What this node does as a head."""
        self._drafts = Drafts(
            reader=self._reader,
            device=settings.budget.device.kind,
            spare_bytes=lambda: self.info().memory_free_bytes,
            threads=lambda: self._orders.threads,
        )
        self._reporter = Reporter(
            own_info=self.info,
            holding=self._holding,
            cluster=self.cluster,
            presence=self._presence,
            peers=self._peers,
            discovery=settings.discovery,
            refusals=self._refusals,
            knock=self._dialling.probe,
            reader=self._reader,
            disk=settings.cache,
            bandwidth=links.glance,
        )
        self._wire_errors = WireErrors(
            cache=settings.cache, threads=lambda: self._orders.threads, log=settings.log
        )
        self._reception = Reception(
            own_hello=self._dialling.hello,
            own_info=self.info,
            host=self._host,
            orders=self._orders,
            sharing=self._sharing,
            peers=self._peers,
            neighbours=self._neighbours,
            survey=self._survey,
            reporter=self._reporter,
            head=self.head,
            clients=Clients(
                self.head,
                self._reader,
                self._drafts,
                self._wire_errors,
                settings.cache,
                settings.log,
            ),
            tasks=tasks,
            log=settings.log,
        )

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self._settings.node

    @property
    def address(self) -> str:
        """Where others reach this node best, "" where it does not listen."""
        return self._presence.address

    @property
    def cluster(self) -> str | None:
        """The fingerprint of this node's cluster, None where it has no key."""
        return self._settings.identity.fingerprint if self._settings.identity else None

    async def client(self) -> Link:
        """Open a control link to this node from its own process."""
        ours = self._dialling.hello(Purpose.CONTROL)
        near, far = await memory_pair(
            replace(ours, role=Role.CLIENT), ours, options=self._dialling.options
        )
        await self._reception.accept(far)
        return near

    async def listen(self, host: str, port: int) -> tcp.Listener:
        """Listen on `host`, "" for all interfaces. Raises ConfigurationError if that cannot be."""
        listener = await tcp.listen(
            host,
            port,
            self._reception.hello,
            self._reception.accept,
            on_failure=lambda error: self._settings.log(f"refused a link: {error}"),
            on_refused=self._refused,
            options=self._dialling.options,
        )
        self._presence.listening_at(listener.address)
        return listener

    def _refused(self, host: str, error: ShardnetError) -> None:
        """Take note of a handshake of `host` that failed."""
        self._refusals.note(host, error, time.monotonic())

    async def keep_peers(self) -> None:
        """Keep links to the peers that were named and to all that are found."""
        await self._peers.run(self._settings.peers)

    async def discover(self) -> None:
        """Be found and find others, until cancelled."""
        if self._settings.discovery is not None:
            await self._presence.discover(self._settings.discovery, self._peers)

    async def close(self) -> None:
        """Unload what this node leads, leave what it follows, end the threads.

        Clients that wait for something are told why they get nothing.
        """
        self._reception.tell_clients(
            PeerFailedError("the node is leaving; start it again or ask another one")
        )
        await self.head.close()
        self._drafts.close()
        await self._host.close()
        await self._peers.close()
        await self._sharing.close()
        await self._reception.close()
        self._reader.close()
        self._wire_errors.close()

    def info(self) -> NodeInfo:
        """Describe this node."""
        loaded, seat = self._host.loaded, self._host.seat
        total = self._orders.memory_bytes()
        used = loaded.weight_bytes if loaded else 0
        stage = None
        if loaded is not None:
            layers = loaded.order.layers
            stage = StageInfo(
                model=loaded.order.model,
                layers=(layers.start, layers.end),
                rank=seat.rank if seat else 0,
            )
        return NodeInfo(
            node=self.node,
            name=self._settings.name,
            address=self.address,
            version=__version__,
            device=self._settings.budget.device.description,
            memory_bytes=total,
            memory_free_bytes=max(0, total - used),
            cores=available_cores(),
            threads=self._orders.threads,
            dtypes=[dtype.value for dtype in self._settings.budget.device.dtypes],
            host_id=make_host_id(),
            stage=stage,
        )

    async def _dial_bulk(self, address: str) -> Link:
        return await self._peers.dial_by(address, self._dialling.bulk)

    async def _dial_data(self, address: str, seat: RingSeat) -> Link:
        return await self._peers.dial_by(address, lambda at: self._dialling.data(at, seat))

    def _holding(self) -> Holding:
        return Holding(stage=self._host.state(), n_requests=self.head.n_requests)


@asynccontextmanager
async def running(settings: NodeSettings) -> AsyncIterator[Node]:
    """Run a node that is not listening, for the process it is in; see `listening`."""
    async with asyncio.TaskGroup() as tasks:
        node = Node(settings, tasks)
        keeping = tasks.create_task(node.keep_peers())
        try:
            yield node
        finally:
            keeping.cancel()
            await node.close()


@asynccontextmanager
async def listening(settings: NodeSettings, host: str, port: int) -> AsyncIterator[Node]:
    """Run a node that listens on `host`, "" for all interfaces; port 0 takes a free one.

    Raises ConfigurationError when the address cannot be used.
    """
    async with running(settings) as node:
        listener = await node.listen(host, port)
        async with asyncio.TaskGroup() as tasks:
            discovering = tasks.create_task(node.discover())
            try:
                yield node
            finally:
                discovering.cancel()
                await listener.close()
