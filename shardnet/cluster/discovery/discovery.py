"""Discovery by mDNS: announce this node on the network and browse for others.

Knows when to announce and when to browse. A record only means that a node may answer there:
liveness and cluster membership are determined on control links (peers.py). Must not dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Final

from zeroconf import DNSIncoming  # type: ignore[attr-defined]  # public, but not in __all__
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncZeroconf

from shardnet.cluster.discovery import service_browser
from shardnet.cluster.machine.addresses import LocalAddress, multicast_hosts, rank, read_interfaces
from shardnet.errors import first_error
from shardnet.transport.loop import at_most, finish
from shardnet.types import NodeId, remember

MDNS_PORT: Final = 5353
GROUP_V4: Final = "224.0.0.251"
GROUP_V6: Final = "ff02::fb"
_LINUX_IP_MULTICAST_ALL: Final = 49
"""If off, a socket receives only the groups it has joined itself, on the interface it named."""

MAX_HEARD: Final = 256
"""Largest number of pairs of a node and an interface; the one heard longest ago goes first."""


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
        """Return the nodes heard per interface, the latest last."""
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
            remember(self._heard, (NodeId(node), interface), time.monotonic(), MAX_HEARD)


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
    discovery's sockets. Windows refuses that, and gives those to the sockets bound to an address.
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
            member.bind((_bound(GROUP_V4), MDNS_PORT))
            group = socket.inet_aton(GROUP_V4) + socket.inet_aton(address.host)
            member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        else:
            index = _index_of(address)
            member.bind((_bound(GROUP_V6), MDNS_PORT, 0, index if _bound(GROUP_V6) else 0))
            group = socket.inet_pton(socket.AF_INET6, GROUP_V6) + struct.pack("@I", index)
            member.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
    except OSError:
        member.close()
        raise
    return member


def _bound(group: str) -> str:
    return "" if sys.platform == "win32" else group


def _index_of(address: LocalAddress) -> int:
    """Return the number of an interface: on Windows a scope is one, and names are for people."""
    _, _, scope = address.host.partition("%")
    return int(scope) if scope.isdecimal() else socket.if_nametoindex(address.interface)


REANNOUNCE_S: Final = 30.0
"""Interval of announcements: a network partition that has healed is not noticed otherwise."""


class Discovery:
    """Announces one node and browses for others.

    `interfaces` are addresses of the interfaces to use; without any, those of the node's own hosts,
    read again before each announcement, so that a cable plugged in later counts. `fingerprint` is
    that of the cluster key. `log` takes lines for people.
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        interfaces: Sequence[str] = (),
        log: Callable[[str], None],
        reannounce_s: float = REANNOUNCE_S,
    ) -> None:
        self.fingerprint = fingerprint
        self.clusters: Sequence[str] = (fingerprint,)
        """The fingerprints of all keys whose holders are of this cluster."""
        self._fixed_interfaces = tuple(interfaces)
        self._log = log
        self._reannounce_s = reannounce_s
        self.hosts: tuple[str, ...] = ()
        """Addresses of the interfaces in use now."""
        self.failure = ""
        """Why no interface is in use, "" otherwise."""
        self.records: dict[NodeId, service_browser.NodeRecord] = {}
        """The current records of other nodes."""
        self.listener = MdnsListener(service_browser.SERVICE_TYPE)
        self._is_due = asyncio.Event()

    def announce(self) -> None:
        """Announce the node's record now, since it has changed."""
        self._is_due.set()

    async def run(
        self, own: Callable[[], service_browser.NodeRecord], on_event: service_browser.OnEvent
    ) -> None:
        """Announce the record of `own` and report others to `on_event`, until cancelled.

        Withdraws the record at the end. If multicast is not possible, logs that once and retries
        at every announcement.
        """
        warnings = service_browser.RecordWarnings(self._log)

        def note(event: service_browser.NodeRecord | service_browser.Goodbye) -> None:
            if isinstance(event, service_browser.NodeRecord):
                self.records[event.node] = event
            else:
                self.records.pop(event.node, None)
            on_event(event)

        while True:
            try:
                interfaces = self._interfaces(own())
                async with (
                    service_browser.open_mdns(interfaces) as zeroconf,
                    self.listener.listening(interfaces, rank(read_interfaces())),
                ):
                    self.hosts, self.failure = interfaces, ""
                    try:
                        await self._keep(zeroconf, interfaces, own, note, warnings)
                    finally:
                        self._unfollow(note)
            except* (OSError, ZeroconfError) as group:
                self._fail(first_error(group))
            if not self.hosts:
                await self._until_due()

    async def _keep(
        self,
        zeroconf: AsyncZeroconf,
        interfaces: tuple[str, ...],
        own: Callable[[], service_browser.NodeRecord],
        on_event: service_browser.OnEvent,
        warnings: service_browser.RecordWarnings,
    ) -> None:
        """Announce and browse until the interfaces change."""
        record = own()
        reader = service_browser.RecordReader(
            own=record.node,
            own_host_id=record.host_id,
            warnings=warnings,
            only_here=not self.fingerprint
            and all(ip_address(host).is_loopback for host in record.hosts),
        )
        async with service_browser.browsing(zeroconf, reader, on_event):
            # Node ids are unique: asking around whether the name is taken would cost a second.
            announcing = await zeroconf.async_register_service(
                service_browser.to_service(record), cooperating_responders=True
            )
            while True:
                await announcing  # it is sent several times
                await self._until_due()
                record = own()
                if self._interfaces(record) != interfaces:
                    return
                announcing = await zeroconf.async_update_service(service_browser.to_service(record))

    def _unfollow(self, on_event: service_browser.OnEvent) -> None:
        """Withdraw all records: nobody hears what becomes of them until they are heard again."""
        for node in list(self.records):
            on_event(service_browser.Goodbye(node=node))

    async def _until_due(self) -> None:
        """Wait until a record is to be announced."""
        async with at_most(self._reannounce_s):
            await self._is_due.wait()
        self._is_due.clear()

    def _interfaces(self, record: service_browser.NodeRecord) -> tuple[str, ...]:
        return self._fixed_interfaces or multicast_hosts(record.hosts, rank(read_interfaces()))

    def _fail(self, error: Exception) -> None:
        before, self.hosts, self.failure = self.failure, (), str(error)
        if before != self.failure:
            self._log(
                f"warning: mDNS does not work here ({error}), so nodes do not find each other: "
                "name other nodes with --peer, or give --no-mdns to hide this warning"
            )


async def browse(
    interfaces: Sequence[str],
    *,
    own_host_id: str,
    only_here: bool,
    longest_s: float,
    quiet_s: float,
    on_heard: Callable[[], None] = lambda: None,
) -> list[service_browser.NodeRecord]:
    """Browse for nodes without announcing one; return their records, sorted by name.

    With `only_here` those of this machine alone count, whatever comes on the `interfaces`.
    Calls `on_heard` at each record that comes. Ends after `longest_s` seconds, or when some are
    found and there was no event for `quiet_s` seconds. Returns none if mDNS does not work here.
    """
    found: dict[NodeId, service_browser.NodeRecord] = {}
    news = asyncio.Event()

    def note(event: service_browser.NodeRecord | service_browser.Goodbye) -> None:
        if isinstance(event, service_browser.NodeRecord):
            found[event.node] = event
        else:
            found.pop(event.node, None)
        news.set()
        on_heard()

    reader = service_browser.RecordReader(
        own=NodeId(""),
        own_host_id=own_host_id,
        warnings=service_browser.RecordWarnings(_nowhere),
        only_here=only_here,
    )
    try:
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(longest_s),
                service_browser.open_mdns(interfaces) as zeroconf,
                service_browser.browsing(zeroconf, reader, note),
            ):
                await _quiet(news, quiet_s)
    except* (OSError, ZeroconfError):
        found.clear()
    return sorted(found.values(), key=lambda record: (record.name, record.node))


async def _quiet(news: asyncio.Event, quiet_s: float) -> None:
    """Wait for an event, and then until none has come for `quiet_s`."""
    await news.wait()
    with contextlib.suppress(TimeoutError):
        while True:
            news.clear()
            async with asyncio.timeout(quiet_s):
                await news.wait()


def _nowhere(line: str) -> None:
    """Log nothing."""
