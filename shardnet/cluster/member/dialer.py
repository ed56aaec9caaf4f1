"""Open links to other nodes: the hello that is sent, and the options for each purpose.

Must not know which node has which address (peers.py), nor what a link is used for once it is up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as with_options

from msgspec import UNSET
from msgspec.structs import replace

from shardnet import __version__
from shardnet.cluster.member.ring_membership import DataEnd
from shardnet.cluster.peers.rtt_probe import HANDSHAKE_S as PROBE_S
from shardnet.transport import tcp
from shardnet.transport.address import host_of, split_address
from shardnet.transport.admission import KnownHosts
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.traffic import Traffic
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

BULK_FRAMES = 8
"""Pieces of weights that may wait to be written, per link."""
BULK_WINDOW_BYTES = 128 * 1024
"""Bytes of weights on their way at a time, per link: activations wait behind no more, wherever
both leave by one interface. Enough for 1 Gbit/s over 1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Opens links for one node. `progress` returns what its heartbeats carry: (epoch, last step).
    `traffic` counts what goes over them.

    Hosts that answer join `known`: their own links to this node come up when strangers flood it.
    Every method that opens a link raises UsageError if the address is not `host:port`, and what
    tcp.connect raises.
    """

    node: NodeId
    name: str
    identity: Identity | None
    progress: Callable[[], tuple[int, int]]
    known: KnownHosts = field(default_factory=KnownHosts)
    traffic: Traffic | None = None

    @property
    def options(self) -> LinkOptions:
        """Options of every link of this node."""
        return LinkOptions(
            identity=self.identity,
            progress=self.progress,
            traffic=self.traffic,
        )

    def hello(self, purpose: Purpose) -> Hello:
        """Return the hello of this node for a link of `purpose`."""
        return Hello(
            purpose=purpose, role=PeerRole.NODE, node=self.node, name=self.name, version=__version__
        )

    async def control(self, address: str) -> Link:
        """Open a control link to another node."""
        return await self._connect(address, self.hello(Purpose.CONTROL), self.options)

    async def dial_as_client(self, address: str) -> Link:
        """Open a control link as a client, to see who answers."""
        hello = replace(self.hello(Purpose.CONTROL), role=PeerRole.CLIENT)
        return await self._connect(address, hello, self.options)

    async def probe(self, address: str) -> Link:
        """Open a control link as a client, with a short limit on the handshake."""
        hello = replace(self.hello(Purpose.CONTROL), role=PeerRole.CLIENT)
        return await self._connect(address, hello, with_options(self.options, handshake_s=PROBE_S))

    async def bulk(self, address: str) -> Link:
        """Open a link for weights."""
        options = with_options(
            self.options, receive_frames=BULK_FRAMES, socket_buffer_bytes=BULK_WINDOW_BYTES
        )
        return await self._connect(address, self.hello(Purpose.BULK), options)

    async def data(self, address: str, own: DataEnd) -> Link:
        """Open a data link from this node, whose end is `own`, to another one of a ring."""
        hello = replace(
            self.hello(Purpose.DATA),
            ring=own.ring,
            epoch=own.epoch,
            rank=own.rank,
            shard=UNSET if own.shard is None else own.shard,
        )
        return await self._connect(address, hello, self.options)

    async def _connect(self, address: str, hello: Hello, options: LinkOptions) -> Link:
        host, port = split_address(address)
        link = await tcp.connect(host, port, hello, options=options)
        self.known.add(host_of(link.peer_address))
        return link
