"""What comes to this node: links, and who answers the messages on them.

Knows every purpose of a link and every message. Must not know how anything is done: that is the
part's whom it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.head import Head
from shardnet.cluster.measuring.measurement_service import Survey
from shardnet.cluster.node.reporter import Reporter
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.cluster.ring.stage_orders import StageOrders
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.errors import (
    ProtocolError,
    RemoteProtocolError,
    ShardnetError,
    error_for_code,
)
from shardnet.transport.link import Link
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.generation import Generate, LastRunRequest, Unload
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose, error_frame
from shardnet.wire.messages.measurements import MeasureLinks, MeasureStage
from shardnet.wire.messages.membership import (
    IdentifyModel,
    NodeInfo,
    PeersKnown,
    Ping,
    ReportRequest,
    Status,
    StatusReply,
)
from shardnet.wire.messages.plans import PlanRequest
from shardnet.wire.messages.stages import ConnectRing, LoadStage, RingBroken, UnloadStage


class Reception:
    """Hands links and messages to the parts of one node. Serves links in `tasks`.

    `own_hello` and `own_info` say who the node is.
    """

    def __init__(
        self,
        *,
        own_hello: Callable[[Purpose], Hello],
        own_info: Callable[[], NodeInfo],
        host: StageHost,
        orders: StageOrders,
        sharing: Sharing,
        peers: Peers,
        neighbours: NodeDirectory,
        survey: Survey,
        reporter: Reporter,
        head: Head,
        clients: Clients,
        tasks: asyncio.TaskGroup,
        log: Callable[[str], None],
    ) -> None:
        self._own_hello = own_hello
        self._own_info = own_info
        self._host = host
        self._orders = orders
        self._sharing = sharing
        self._peers = peers
        self._neighbours = neighbours
        self._survey = survey
        self._reporter = reporter
        self._head = head
        self._clients = clients
        self._tasks = tasks
        self._log = log
        self._client_links: set[Link] = set()

    def hello(self, peer: Hello) -> Hello:
        """Answer a peer's hello. Raises UsageError for a data link to no seat of this node, and
        what Sharing.check_hello raises for a bulk link.
        """
        if peer.purpose is Purpose.DATA:
            self._host.check_hello(peer)
        elif peer.purpose is Purpose.BULK:
            self._sharing.check_hello(peer)
        return replace(self._own_hello(peer.purpose), ring=peer.ring, epoch=peer.epoch)

    async def accept(self, link: Link) -> None:
        """Take a link that is up."""
        if link.peer.purpose is Purpose.DATA:
            self._host.accept(link)
        elif link.peer.purpose is Purpose.BULK:
            self._tasks.create_task(self._sharing.serve(link))
        elif link.peer.role is PeerRole.NODE:
            self._peers.adopt(link)
        else:
            self._tasks.create_task(self._serve_client(link))

    def tell_clients(self, error: ShardnetError) -> None:
        """Tell every client why it gets nothing more."""
        for link in self._client_links:
            if not link.closed:
                link.send(error_frame(error))

    async def close(self) -> None:
        """Close the clients' links."""
        await asyncio.gather(*(link.close() for link in self._client_links))

    async def _serve_client(self, link: Link) -> None:
        """Serve a client until it leaves. One that breaks the protocol is worth a line."""
        self._client_links.add(link)
        try:
            await ControlLink(link, self.handle).serve()
        except ShardnetError as error:
            link.abort("the client has gone")
            if isinstance(error, ProtocolError):
                self._log(f"dropped the client at {link.peer_address}: {error}")
        finally:
            self._client_links.discard(link)

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        """Answer one message, whoever sent it. Raises ShardnetError: the request fails with it."""
        match message:
            case Status(request=request, with_peers=with_peers):
                peers = await self._neighbours.listed() if with_peers else []
                load = self._head.load
                control.send(
                    StatusReply(request=request, node=self._own_info(), peers=peers, load=load)
                )
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
                if control.link.peer.role is not PeerRole.NODE:
                    raise RemoteProtocolError(f"{control.peer_name} is a client and told of peers")
                self._peers.heard(control, message)
            case IdentifyModel():
                control.send(await self._sharing.answer(message))
            case LoadStage():
                self._head.check_idle()
                await self._orders.load_for(control, message)
            case ConnectRing(request=request, ring=ring, epoch=epoch):
                await self._host.join(ring, epoch)
                control.send(Done(request=request))
            case UnloadStage(request=request, ring=ring):
                await self._orders.unload(control.link.peer.node, ring)
                control.send(Done(request=request))
            case RingBroken(ring=ring, code=code, message=text):
                cause = error_for_code(code, f"{control.peer_name}: {text}")
                self._head.ring_broken(ring, cause)
            case PlanRequest():
                await self._clients.plan(control, message)
            case LastRunRequest():
                await self._clients.last_run(control, message)
            case Generate():
                await self._clients.generate(control, message)
            case Unload():
                await self._clients.unload(control, message)
