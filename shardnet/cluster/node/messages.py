"""Messages that no single room answers: status, pings, peers, and loads, which a head may refuse.

Knows which part of the node has the answer. Must not know how it is found.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardnet.cluster.head.head import Head
from shardnet.cluster.node.parts import StageParts
from shardnet.cluster.peers.clocks import now_us
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.message_handlers import MessageHandlers
from shardnet.cluster.peers.peers import Peers
from shardnet.errors import RemoteProtocolError
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import PeerRole
from shardnet.wire.messages.membership import IdentifyModel, PeersKnown, Ping, Status, StatusReply
from shardnet.wire.messages.stages import LoadStage
from shardnet.wire.messages.traces import ClockRead, ReadClock


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
        peers = await self.stage.directory.listed() if message.with_peers else []
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
        if control.link.peer.role is not PeerRole.NODE:
            raise RemoteProtocolError(
                f"{control.peer_name} is a client and sent PeersKnown, which only nodes send"
            )
        self.peers.heard(control, message)

    async def _identify(self, control: ControlLink, message: IdentifyModel) -> None:
        control.send(await self.stage.sharing.answer(message))

    async def _load_stage(self, control: ControlLink, message: LoadStage) -> None:
        """Load for another head. Raises BusyError while requests run on this node's own ring."""
        self.head.check_idle()
        await self.stage.orders.load_for(control, message)
