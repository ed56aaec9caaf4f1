"""The node: the composition root that ties listener, peers, stage and head together.

Knows who answers which message. Everything a node does is done elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from shardnet import __version__
from shardnet.cluster.cache_dir import PACKS_FOLDER
from shardnet.cluster.clients import Clients
from shardnet.cluster.control import ControlLink, Incoming
from shardnet.cluster.discovery import Discovery
from shardnet.cluster.drafts import Drafts
from shardnet.cluster.figure_cache import FigureCache
from shardnet.cluster.head import Elsewhere, Head
from shardnet.cluster.holders import Holder
from shardnet.cluster.link_figures import LinkFigures
from shardnet.cluster.local_nodes import LocalNodes
from shardnet.cluster.model_cache import ModelCache
from shardnet.cluster.neighbours import Neighbours
from shardnet.cluster.own_figures import OwnFigures
from shardnet.cluster.peers import Peers
from shardnet.cluster.presence import Presence
from shardnet.cluster.probes import HANDSHAKE_S as PROBE_S
from shardnet.cluster.profile import MemoryBudget, available_cores, make_host_id
from shardnet.cluster.pulling import pull_beside
from shardnet.cluster.refusals import Refusals
from shardnet.cluster.reporter import Holding, Reporter
from shardnet.cluster.seat import RingSeat
from shardnet.cluster.send_rate import SendRate
from shardnet.cluster.sharing import Sharing
from shardnet.cluster.stage_host import StageHost
from shardnet.cluster.stage_orders import StageOrders
from shardnet.cluster.stage_port import LocalPort, Progress, RemotePort, StagePort
from shardnet.cluster.survey import Survey
from shardnet.cluster.wire_errors import WireErrors
from shardnet.errors import (
    CheckpointError,
    PeerFailedError,
    ProtocolError,
    RemoteProtocolError,
    ShardnetError,
    error_for_code,
)
from shardnet.model.hub_cache import HubName
from shardnet.model.tokenizer import Tokenizer
from shardnet.runtime.executor import Executor
from shardnet.runtime.loading import ModelFacts, find_folder
from shardnet.transport import tcp
from shardnet.transport.address import split_address
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.memory import memory_pair
from shardnet.types import NodeId
from shardnet.wire.control import Done
from shardnet.wire.generation import Generate, LastRunRequest, Unload
from shardnet.wire.measured import MeasureLinks, MeasureStage
from shardnet.wire.messages import Hello, Purpose, Role, error_frame
from shardnet.wire.neighbours import (
    IdentifyModel,
    NodeInfo,
    PeersKnown,
    Ping,
    ReportRequest,
    StageInfo,
    Status,
    StatusReply,
)
from shardnet.wire.plans import PlanRequest
from shardnet.wire.stages import ConnectRing, LoadStage, RingBroken, StageReady, UnloadStage

HEARTBEAT_S = 1.0
SILENCE_S = 8.0
"""With these a node that is frozen is given up 8 to 9 s later."""
BULK_FRAMES = 8
"""Pieces of weights that may wait to be written, per link."""
BULK_WINDOW_BYTES = 128 * 1024
"""Bytes of weights on their way at a time, per link: activations wait behind no more, wherever
both leave by one interface. Enough for 1 Gbit/s over 1 ms."""


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
        self._client_links: set[Link] = set()
        self._reader = Executor("shardnet-read", niceness=10)
        self._host = StageHost(dial=self._dial_data, packs=settings.cache / PACKS_FOLDER)
        self._presence = Presence(
            node=settings.node,
            name=settings.name,
            on_changed=lambda: self._peers.addresses_changed(),
        )
        self._peers = Peers(
            node=settings.node,
            name=settings.name,
            dial=self._dial_control,
            knock=self._knock,
            handler=self._handle,
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
        self.head = Head(self)
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
            knock=self._probe,
            reader=self._reader,
            disk=settings.cache,
            bandwidth=links.glance,
        )
        self._wire_errors = WireErrors(
            cache=settings.cache, threads=lambda: self._orders.threads, log=settings.log
        )
        self._clients = Clients(
            self.head,
            self._reader,
            self._drafts,
            self._wire_errors,
            settings.cache,
            settings.log,
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

    def listening_at(self, address: str) -> None:
        """Tell the node where it listens."""
        self._presence.listening_at(address)

    async def client(self) -> Link:
        """Open a control link to this node from its own process."""
        ours = self._hello(Purpose.CONTROL)
        near, far = await memory_pair(replace(ours, role=Role.CLIENT), ours, options=self.options)
        await self.accept(far)
        return near

    @property
    def options(self) -> LinkOptions:
        """How this node's links behave."""
        return LinkOptions(
            identity=self._settings.identity,
            heartbeat_s=HEARTBEAT_S,
            silence_s=SILENCE_S,
            progress=lambda: self._host.progress,
        )

    def hello(self, peer: Hello) -> Hello:
        """Answer a peer's hello. Raises UsageError for a data link to no seat of this node, and
        what Sharing.check_hello raises for a bulk link.
        """
        if peer.purpose is Purpose.DATA:
            self._host.check_hello(peer)
        elif peer.purpose is Purpose.BULK:
            self._sharing.check_hello(peer)
        return replace(self._hello(peer.purpose), ring=peer.ring, epoch=peer.epoch)

    async def accept(self, link: Link) -> None:
        """Take a link that is up."""
        if link.peer.purpose is Purpose.DATA:
            self._host.accept(link)
        elif link.peer.purpose is Purpose.BULK:
            self._tasks.create_task(self._sharing.serve(link))
        elif link.peer.role is Role.NODE:
            self._peers.adopt(link)
        else:
            self._tasks.create_task(self._serve_client(link))

    def refused(self, host: str, error: ShardnetError) -> None:
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
        leaving = PeerFailedError("the node is leaving; start it again or ask another one")
        for link in self._client_links:
            if not link.closed:
                link.send(error_frame(leaving))
        await self.head.close()
        self._drafts.close()
        await self._host.close()
        await self._peers.close()
        await self._sharing.close()
        await asyncio.gather(*(link.close() for link in self._client_links))
        self._reader.close()
        self._wire_errors.close()

    # --- what the head needs to know (head.Neighbourhood)

    async def candidates(self, addresses: Sequence[str]) -> list[NodeInfo]:
        """Return the nodes at `addresses`, or without any this node and its peers."""
        return await self._neighbours.candidates(addresses)

    async def provide(self, model: str, on_progress: Callable[[int, int], None]) -> None:
        """Pull a model of the Hub that neither this node nor a peer has."""
        name = HubName.parse(model)
        if name is None or find_folder(model) is not None:
            return
        try:
            await self._sharing.identify(model)
        except CheckpointError:
            await pull_beside(name, on_progress, self._settings.log)

    async def identify(self, model: str) -> ModelFacts:
        """Look at the model that a path means, on this node or else on its peers."""
        return await self._sharing.identify(model)

    async def holders(
        self, facts: ModelFacts, model: str, plan: Sequence[NodeInfo]
    ) -> list[Holder]:
        """Ask the nodes of a plan, and others if need be, what they have of a model."""
        return await self._sharing.holders(facts, model, plan)

    @property
    def survey(self) -> Survey:
        """What measures nodes and links."""
        return self._survey

    async def load_tokenizer(self, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint on this node, None where it has none."""
        return await self._reader.run(lambda: Tokenizer.load_optional(folder))

    async def port(self, node: NodeInfo) -> StagePort:
        """Return the port to a node."""
        if node.node == self.node:
            return LocalPort(
                self._host,
                self._settings.name,
                self._load_own,
                lambda ring: self._orders.unload(self.node, ring),
            )
        return RemotePort(
            await self._sharing.control(node), self._peers.lines.watch, self._peers.lines.latest
        )

    def head_elsewhere(self) -> Elsewhere | None:
        """Return the head of the ring this node has a seat in, None if that is itself."""
        seat = self._host.seat
        if seat is None or seat.owner == self.node or seat.is_over:
            return None
        return Elsewhere(address=seat.addresses[0], model=seat.model)

    async def free_stage(self) -> None:
        """Free the weights that a ring left behind here."""
        await self._host.unload(self.node)

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

    def _holding(self) -> Holding:
        return Holding(stage=self._host.state(), n_requests=self.head.n_requests)

    # --- messages

    async def _serve_client(self, link: Link) -> None:
        """Serve a client until it leaves. One that breaks the protocol is worth a line."""
        self._client_links.add(link)
        try:
            await ControlLink(link, self._handle).serve()
        except ShardnetError as error:
            link.abort("the client has gone")
            if isinstance(error, ProtocolError):
                self._settings.log(f"dropped the client at {link.peer_address}: {error}")
        finally:
            self._client_links.discard(link)

    async def _handle(self, control: ControlLink, message: Incoming) -> None:
        match message:
            case Status(request=request, with_peers=with_peers):
                peers = await self._neighbours.listed() if with_peers else []
                load = self.head.load
                control.send(StatusReply(request=request, node=self.info(), peers=peers, load=load))
            case Ping(request=request, payload=payload, as_step=as_step):
                if payload or as_step:
                    self._host.check_idle()
                if as_step:
                    await self._host.turn()
                control.send(Done(request=request))
            case MeasureStage() | MeasureLinks():
                await self._survey.answer(control, message)
            case ReportRequest():
                await self._reporter.answer(control, message)
            case PeersKnown():
                if control.link.peer.role is not Role.NODE:
                    raise RemoteProtocolError(f"{control.peer_name} is a client and told of peers")
                self._peers.heard(control, message)
            case IdentifyModel():
                control.send(await self._sharing.answer(message))
            case LoadStage():
                self.head.check_idle()
                await self._orders.load_for(control, message)
            case ConnectRing(request=request, ring=ring, epoch=epoch):
                await self._host.join(ring, epoch)
                control.send(Done(request=request))
            case UnloadStage(request=request, ring=ring):
                await self._orders.unload(control.link.peer.node, ring)
                control.send(Done(request=request))
            case RingBroken(ring=ring, code=code, message=text):
                cause = error_for_code(code, f"{control.peer_name}: {text}")
                self.head.ring_broken(ring, cause)
            case PlanRequest():
                await self._clients.plan(control, message)
            case LastRunRequest():
                await self._clients.last_run(control, message)
            case Generate():
                await self._clients.generate(control, message)
            case Unload():
                await self._clients.unload(control, message)

    async def _load_own(self, message: LoadStage, progress: Progress) -> StageReady:
        def broken(error: ShardnetError) -> None:
            self.head.ring_broken(message.ring, error)

        return await self._orders.load(message, self.node, progress, broken)

    # --- links

    def _hello(self, purpose: Purpose) -> Hello:
        return Hello(
            purpose=purpose,
            role=Role.NODE,
            node=self.node,
            name=self._settings.name,
            version=__version__,
        )

    async def _dial_control(self, address: str) -> Link:
        host, port = split_address(address)
        return await tcp.connect(host, port, self._hello(Purpose.CONTROL), options=self.options)

    async def _knock(self, address: str) -> Link:
        host, port = split_address(address)
        hello = replace(self._hello(Purpose.CONTROL), role=Role.CLIENT)
        return await tcp.connect(host, port, hello, options=self.options)

    async def _probe(self, address: str) -> Link:
        host, port = split_address(address)
        hello = replace(self._hello(Purpose.CONTROL), role=Role.CLIENT)
        options = dataclasses.replace(self.options, handshake_s=PROBE_S)
        return await tcp.connect(host, port, hello, options=options)

    async def _dial_bulk(self, address: str) -> Link:
        hello = self._hello(Purpose.BULK)
        options = dataclasses.replace(
            self.options, receive_frames=BULK_FRAMES, socket_buffer_bytes=BULK_WINDOW_BYTES
        )

        async def dial(address: str) -> Link:
            host, port = split_address(address)
            return await tcp.connect(host, port, hello, options=options)

        return await self._peers.dial_by(address, dial)

    async def _dial_data(self, address: str, seat: RingSeat) -> Link:
        hello = replace(self._hello(Purpose.DATA), ring=seat.ring, epoch=seat.epoch, rank=seat.rank)

        async def dial(address: str) -> Link:
            host, port = split_address(address)
            return await tcp.connect(host, port, hello, options=self.options)

        return await self._peers.dial_by(address, dial)


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
        listener = await tcp.listen(
            host,
            port,
            node.hello,
            node.accept,
            on_failure=lambda error: settings.log(f"refused a link: {error}"),
            on_refused=node.refused,
            options=node.options,
        )
        node.listening_at(listener.address)
        async with asyncio.TaskGroup() as tasks:
            discovering = tasks.create_task(node.discover())
            try:
                yield node
            finally:
                discovering.cancel()
                await listener.close()
