"""Hand every link that is opened to this node, and every message, to the part that serves it.

Knows every purpose of a link. Must not know what is done on it; messages on control links find
their handlers in a table (peers/control_link.py), among them those here for what no single room
answers: status, pings, peers, and loads, which a head may refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from shardnet.cluster.head.head import Head
from shardnet.cluster.measuring.link_benchmark import GatherBenchmark
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.node.parts import StageParts
from shardnet.cluster.peers.control_link import ControlLink, Handler, MessageHandlers
from shardnet.cluster.peers.peer_links import now_us
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.peers.supervision import supervised
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.errors import (
    BusyError,
    PeerSilentError,
    ProtocolError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.transport.link import Link
from shardnet.wire.messages import handshake
from shardnet.wire.messages.activity import ClockRead, ReadClock
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.membership import IdentifyModel, PeersKnown, Ping, Status, StatusReply
from shardnet.wire.messages.stages import LoadStage


@dataclass(kw_only=True, eq=False, repr=False)
class Dispatcher:
    """Serves the links of one node in `tasks`.

    `own_hello` makes this node's hello, `handle` handles the messages of clients.
    """

    own_hello: Callable[[handshake.Purpose], handshake.Hello]
    handle: Handler
    host: StageHost
    gathers: GatherBenchmark
    sharing: Sharing
    peers: Peers
    tasks: asyncio.TaskGroup
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.clients: set[ControlLink] = set()
        """The links of clients."""

    def hello(self, peer: handshake.Hello) -> handshake.Hello:
        """Return the answer to a peer's hello.

        Raises UsageError for a data link from another node than the one before this in its ring,
        what Sharing.check_hello raises for a bulk link, GatherBenchmark.check_hello for a link of
        parts that belongs to no ring, and BusyError while this machine falls asleep.
        """
        if self.peers.sleeps:
            raise BusyError("this machine is about to sleep", remedy="wake it with `shardnet wake`")
        if _measures_gathers(peer):
            self.gathers.check_hello(peer)
        elif peer.purpose in handshake.OF_RINGS:
            self.host.check_hello(peer)
        elif peer.purpose is handshake.Purpose.BULK:
            self.sharing.check_hello(peer)
        return replace(self.own_hello(peer.purpose), ring=peer.ring, epoch=peer.epoch)

    async def accept(self, link: Link) -> None:
        """Serve a link whose handshake is done."""
        if _measures_gathers(link.peer):
            self._serve(self.gathers.serve, link)
        elif link.peer.purpose in handshake.OF_RINGS:
            self.host.accept(link)
        elif link.peer.purpose is handshake.Purpose.BULK:
            self._serve(self.sharing.serve, link)
        elif link.peer.role is handshake.PeerRole.NODE:
            self.peers.adopt(link)
        else:
            self._serve(self._serve_client, link)

    def _serve(self, work: Callable[[Link], Coroutine[Any, Any, None]], link: Link) -> None:
        """Serve a link in a task of its own, whose failure ends that link and nothing else."""

        async def serve() -> None:
            what = f"the link of {link.peer_address}"
            if not await supervised(lambda: work(link), what, self.log):
                link.abort("an internal error of the other end")

        self.tasks.create_task(serve())

    @property
    def has_clients(self) -> bool:
        """Whether a client has a link to this node, other than from its own process."""
        own = self.own_hello(handshake.Purpose.CONTROL).node
        return any(control.link.peer.node != own for control in self.clients)

    def tell_clients(self, error: ShardnetError) -> None:
        """Send `error` to every client, since this node is leaving."""
        for control in self.clients:
            if not control.link.closed:
                control.link.send(handshake.error_frame(error))

    async def close(self) -> None:
        """Close the clients' links."""
        await asyncio.gather(*(control.link.close() for control in self.clients))

    async def _serve_client(self, link: Link) -> None:
        """Serve a client until it leaves. Log one that breaks the protocol or falls silent."""
        control = ControlLink(link, self.handle)
        self.clients.add(control)
        try:
            await control.serve()
        except ShardnetError as error:
            if isinstance(error, ProtocolError | PeerSilentError):
                self.log(f"dropped the client at {link.peer_address}: {error}")
            await link.close()  # not at once: it may still read why
        finally:
            self.clients.discard(control)


def _measures_gathers(hello: handshake.Hello) -> bool:
    return hello.purpose is handshake.Purpose.PARTS and hello.ring == handshake.MEASURED_RING


@dataclass(kw_only=True, eq=False, repr=False)
class NodeMessages:
    """Answers for one node."""

    stage: StageParts
    peers: Peers
    head: Head

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages that are answered here."""
        handlers.register(Status, self._status)
        handlers.register(Ping, self._ping)
        handlers.register(PeersKnown, self._peers_known)
        handlers.register(IdentifyModel, self._identify)
        handlers.register(LoadStage, self._load_stage)
        handlers.register(ReadClock, self._read_clock)

    async def _status(self, control: ControlLink, message: Status) -> None:
        listed = self.stage.directory.listed
        peers = [*await listed(), *self.peers.sleepers.listed()] if message.with_peers else []
        load, node = self.head.load, self.stage.own.info()
        control.send(StatusReply(request=message.request, node=node, peers=peers, load=load))

    async def _ping(self, control: ControlLink, message: Ping) -> None:
        """Answer a ping. Raises BusyError for one that would disturb sequences here."""
        if message.payload or message.as_step:
            self.stage.host.check_idle()
        if message.as_step:
            await self.stage.host.wait_for_compute()
        control.send(Done(request=message.request))

    async def _read_clock(self, control: ControlLink, message: ReadClock) -> None:
        received_us = now_us()
        control.send(ClockRead(request=message.request, received_us=received_us, sent_us=now_us()))

    async def _peers_known(self, control: ControlLink, message: PeersKnown) -> None:
        """Take the peers of a node. Raises RemoteProtocolError if a client sends them."""
        if control.link.peer.role is not handshake.PeerRole.NODE:
            raise RemoteProtocolError(
                f"{control.peer_name} is a client and sent PeersKnown, which only nodes send"
            )
        self.peers.heard(control, message)

    async def _identify(self, control: ControlLink, message: IdentifyModel) -> None:
        control.send(await self.stage.sharing.answer(message))

    async def _load_stage(self, control: ControlLink, message: LoadStage) -> None:
        """Load for another head. Raises BusyError while requests run on this node's own ring."""
        self.head.led.check_idle()
        await self.stage.orders.load_for(control, message)
