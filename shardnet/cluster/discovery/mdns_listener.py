"""Listen to mDNS multicast: which nodes are heard on which interface, and when last.

Knows sockets in a multicast group on one interface, and how an mDNS answer names its node. It is
for diagnosis; discovery.py finds nodes. Its input is public and unauthenticated. Without such
sockets on this system it listens on no interface, which `interfaces` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from zeroconf import DNSIncoming  # type: ignore[attr-defined]  # public, but not in __all__

from shardnet.cluster.machine.addresses import LocalAddress
from shardnet.transport.loop import finish
from shardnet.types import NodeId

MDNS_PORT: Final = 5353
GROUP_V4: Final = "224.0.0.251"
GROUP_V6: Final = "ff02::fb"
_LINUX_IP_MULTICAST_ALL: Final = 49
"""If off, a socket receives only the groups it has joined itself, on the interface it named."""

MAX_HEARD: Final = 256
"""Largest number of pairs of a node and an interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A node was heard on an interface; `at` is a time of time.monotonic."""

    node: NodeId
    interface: str
    at: float


class MdnsListener:
    """Listens to answers about records of `service_type`, inside `listening`."""

    def __init__(self, service_type: str) -> None:
        self._suffix = f".{service_type}"
        self._heard: dict[tuple[NodeId, str], float] = {}
        self._own: frozenset[str] = frozenset()
        self.others: set[str] = set()
        """Names of the interfaces on which another machine was heard, whatever it runs."""
        self.interfaces: tuple[str, ...] = ()
        """Names of the interfaces it listens on now."""
        self.since = time.monotonic()
        """When it began to listen, by time.monotonic."""

    def heard(self) -> list[Heard]:
        """Return the nodes heard per interface, in the order of the first time."""
        return [Heard(node=node, interface=i, at=at) for (node, i), at in self._heard.items()]

    @asynccontextmanager
    async def listening(
        self, hosts: Sequence[str], local: Sequence[LocalAddress]
    ) -> AsyncIterator[None]:
        """Listen on the interfaces of `hosts`, addresses of this machine, inside the context.

        `local` maps hosts to interfaces. Skips interfaces that cannot be joined.
        """
        by_host = {address.host: address for address in local}
        self._own = frozenset(_bare(address.host) for address in local)
        self.others.clear()
        transports: dict[str, asyncio.DatagramTransport] = {}

        async def open_one(address: LocalAddress) -> None:
            receiver = partial(_Receiver, self, address.interface)
            transports[address.interface], _ = await loop.create_datagram_endpoint(
                receiver, sock=_join(address)
            )

        loop = asyncio.get_running_loop()
        self.since = time.monotonic()
        try:
            for address in (by_host[host] for host in hosts if host in by_host):
                with contextlib.suppress(OSError):
                    await finish(open_one(address))
            self.interfaces = tuple(transports)
            yield
        finally:
            self.interfaces = ()
            for transport in transports.values():
                transport.close()

    def take(self, datagram: bytes, interface: str, sender: str = "") -> None:
        """Record every node named in an mDNS answer, and that another machine than this was heard.

        `sender` is the IP address that the datagram is from.
        """
        if sender and _bare(sender) not in self._own:
            self.others.add(interface)
        message = DNSIncoming(datagram)
        if not message.valid or not message.is_response():
            return
        for record in message.answers():
            name = getattr(record, "alias", record.name)
            node = name.removesuffix(self._suffix)
            if node == name or not node.isprintable() or len(node) > 63:
                continue
            key = (NodeId(node), interface)
            if key in self._heard or len(self._heard) < MAX_HEARD:
                self._heard[key] = time.monotonic()


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, listener: MdnsListener, interface: str) -> None:
        self._listener = listener
        self._interface = interface

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self._listener.take(data, self._interface, addr[0])


def _bare(host: str) -> str:
    """Return an address without its IPv6 scope."""
    return host.partition("%")[0]


def _join(address: LocalAddress) -> socket.socket:
    """Open a socket in the mDNS group on the interface of `address`. Raises OSError.

    It is bound to the group, not to the port alone: it must not take unicast answers from
    discovery's sockets.
    """
    family = socket.AF_INET if address.net.version == 4 else socket.AF_INET6
    member = socket.socket(family, socket.SOCK_DGRAM)
    try:
        member.setblocking(False)
        member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if address.net.version == 4:
            with contextlib.suppress(OSError):
                member.setsockopt(socket.IPPROTO_IP, _LINUX_IP_MULTICAST_ALL, 0)
            member.bind((GROUP_V4, MDNS_PORT))
            group = socket.inet_aton(GROUP_V4) + socket.inet_aton(address.host)
            member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        else:
            index = socket.if_nametoindex(address.interface)
            member.bind((GROUP_V6, MDNS_PORT, 0, index))
            group = socket.inet_pton(socket.AF_INET6, GROUP_V6) + struct.pack("@I", index)
            member.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
    except OSError:
        member.close()
        raise
    return member
