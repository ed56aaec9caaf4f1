"""Discovery by mDNS: tells the network of this node and proposes others as candidates.

Knows the service record and how python-zeroconf is used. What it hears is public and unproved:
every record is bounded and checked, and nothing is believed but that a node may answer there. Who
is alive, who is of this cluster and who has gone is found out on control links (peers.py). Must not
dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from zeroconf import Error as ZeroconfError
from zeroconf import ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from shardnet.cluster.addresses import (
    format_addresses,
    multicast_hosts,
    rank,
    read_interfaces,
)
from shardnet.cluster.multicast_ear import MulticastEar
from shardnet.transport.loop import finish
from shardnet.types import NodeId

SERVICE_TYPE: Final = "_shardnet._tcp.local."

REANNOUNCE_S: Final = 30.0
"""How often the record is sent again: a partition that has healed does not show by itself."""

RESOLVE_S: Final = 3.0
GOODBYE_S: Final = 0.8
"""How long saying goodbye may take."""

MAX_RECORDS: Final = 256
"""Records of others that are followed at one time; more are ignored."""
MAX_HOSTS: Final = 16
MAX_COMPLAINTS: Final = 32
"""Unusable records that are logged; a network can hold any number."""

_HOST_TTL_S: Final = 120
_RECORD_TTL_S: Final = 1125
"""The shortest that python-zeroconf keeps a PTR record."""

_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,63}")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{0,64}")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+-]{1,32}")
_MAX_NAME_BYTES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as its record describes it: this one, or one that may be there.

    `fingerprint` is that of the cluster key, "" without one; `protocol` the version of the wire
    protocol; `hosts` are best first.
    """

    node: NodeId
    name: str
    version: str
    protocol: int
    fingerprint: str
    host_id: str
    hosts: tuple[str, ...]
    port: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every host with the port."""
        return format_addresses(self.hosts, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The record of a node was taken back, or has aged."""

    node: NodeId


class UnusableRecordError(ValueError):
    """A record that says nothing usable; the message says why. It never leaves this module."""


OnEvent = Callable[[Candidate | Goodbye], None]


class Discovery:
    """Announces one node and browses for others.

    `interfaces` are addresses of the interfaces to use; without any they are those of the node's
    own hosts, looked up again before each announcement, so that a cable that is plugged in later
    counts. `log` takes lines for people.
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
        self._fixed_interfaces = tuple(interfaces)
        self._log = log
        self._reannounce_s = reannounce_s
        self.hosts: tuple[str, ...] = ()
        """Addresses of the interfaces on which it speaks now."""
        self.failure = ""
        """Why it speaks nowhere."""
        self.records: dict[NodeId, Candidate] = {}
        """Of other nodes, as they are now."""
        self.ear = MulticastEar(SERVICE_TYPE)

    async def run(self, own: Callable[[], Candidate], on_event: OnEvent) -> None:
        """Announce what `own` gives and report others, until cancelled; then say goodbye.

        Where multicast is not possible this is said once, and tried again at every announcement.
        """
        complaints = _Complaints(self._log)

        def note(event: Candidate | Goodbye) -> None:
            if isinstance(event, Candidate):
                self.records[event.node] = event
            else:
                self.records.pop(event.node, None)
            on_event(event)

        while True:
            interfaces = self._interfaces(own())
            try:
                async with (
                    _open(interfaces) as zeroconf,
                    self.ear.listening(interfaces, rank(read_interfaces())),
                ):
                    self.hosts, self.failure = interfaces, ""
                    await self._keep(zeroconf, interfaces, own, note, complaints)
            except* (OSError, ZeroconfError) as group:
                self._fail(_first(group))
                await asyncio.sleep(self._reannounce_s)

    async def _keep(
        self,
        zeroconf: AsyncZeroconf,
        interfaces: tuple[str, ...],
        own: Callable[[], Candidate],
        on_event: OnEvent,
        complaints: _Complaints,
    ) -> None:
        """Announce and browse while the interfaces are these."""
        record = own()
        reader = _Reader(own=record.node, own_host_id=record.host_id, complaints=complaints)
        async with _browsing(zeroconf, reader, on_event):
            # Node ids are unique: asking around whether the name is taken would cost a second.
            announcing = await zeroconf.async_register_service(
                to_service(record), cooperating_responders=True
            )
            while True:
                await announcing  # it is sent several times
                await asyncio.sleep(self._reannounce_s)
                record = own()
                if self._interfaces(record) != interfaces:
                    return
                announcing = await zeroconf.async_update_service(to_service(record))

    def _interfaces(self, record: Candidate) -> tuple[str, ...]:
        return self._fixed_interfaces or multicast_hosts(record.hosts, rank(read_interfaces()))

    def _fail(self, error: Exception) -> None:
        before, self.hosts, self.failure = self.failure, (), str(error)
        self.records.clear()
        if before != self.failure:
            self._log(
                "warning: this node is not found by itself, mDNS does not work here "
                f"({error}): name other nodes with --peer, or give --no-mdns to hide this warning"
            )


async def browse(
    interfaces: Sequence[str], *, own_host_id: str, longest_s: float, quiet_s: float
) -> list[Candidate]:
    """Look for nodes without announcing one: for `longest_s`, or until some are found and no other
    has shown itself for `quiet_s`. Where mDNS does not work there are none.
    """
    found: dict[NodeId, Candidate] = {}
    news = asyncio.Event()

    def note(event: Candidate | Goodbye) -> None:
        if isinstance(event, Candidate):
            found[event.node] = event
        else:
            found.pop(event.node, None)
        news.set()

    reader = _Reader(own=NodeId(""), own_host_id=own_host_id, complaints=_Complaints(_nowhere))
    try:
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(longest_s),
                _open(interfaces) as zeroconf,
                _browsing(zeroconf, reader, note),
            ):
                await _quiet(news, quiet_s)
    except* (OSError, ZeroconfError):
        found.clear()
    return sorted(found.values(), key=lambda candidate: (candidate.name, candidate.node))


async def _quiet(news: asyncio.Event, quiet_s: float) -> None:
    """Wait for news, and then until none has come for `quiet_s`."""
    await news.wait()
    with contextlib.suppress(TimeoutError):
        while True:
            news.clear()
            async with asyncio.timeout(quiet_s):
                await news.wait()


# --- the record ---------------------------------------------------------------------------------


def to_service(record: Candidate) -> AsyncServiceInfo:
    """Write a node's record."""
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{record.node}.{SERVICE_TYPE}",
        port=record.port,
        parsed_addresses=[host.partition("%")[0] for host in record.hosts[:MAX_HOSTS]],
        server=f"{record.node}.local.",
        properties={
            "id": record.node,
            "name": _short(record.name),
            "version": record.version,
            "protocol": str(record.protocol),
            "cluster": record.fingerprint,
            "host": _short(record.host_id),
        },
        host_ttl=_HOST_TTL_S,
        other_ttl=_RECORD_TTL_S,
    )


def from_service(service: ServiceInfo, own_host_id: str) -> Candidate:
    """Read a node's record. Raises UnusableRecordError for anything that is not well formed.

    Loopback addresses count only for nodes of this machine.
    """
    properties = service.properties
    node = _text(properties, b"id", _ID)
    if service.name != f"{node}.{SERVICE_TYPE}":
        raise UnusableRecordError("its id is not its name")
    host_id = _text(properties, b"host")
    hosts = tuple(
        host
        for host in dict.fromkeys(service.parsed_scoped_addresses())
        if _is_believable(host, same_machine=host_id == own_host_id)
    )[:MAX_HOSTS]
    if not hosts:
        raise UnusableRecordError("it has no usable address")
    if not service.port:
        raise UnusableRecordError("it has no port")
    protocol = _text(properties, b"protocol", re.compile(r"\d{1,5}"))
    return Candidate(
        node=NodeId(node),
        name=_text(properties, b"name"),
        version=_text(properties, b"version", _VERSION),
        protocol=int(protocol),
        fingerprint=_text(properties, b"cluster", _FINGERPRINT),
        host_id=host_id,
        hosts=hosts,
        port=service.port,
    )


def _text(
    properties: dict[bytes, bytes | None], key: bytes, pattern: re.Pattern[str] | None = None
) -> str:
    raw = properties.get(key)
    if raw is None:
        raise UnusableRecordError(f"it has no {key.decode()}")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise UnusableRecordError(f"its {key.decode()} is no text") from None
    if not text.isprintable() or (pattern is not None and not pattern.fullmatch(text)):
        raise UnusableRecordError(f"its {key.decode()} is malformed")
    return text


def _short(text: str) -> str:
    """Cut to what one TXT entry holds, and leave out what cannot be printed."""
    printable = "".join(c for c in text if c.isprintable())
    return printable.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")


def _is_believable(host: str, *, same_machine: bool) -> bool:
    ip = ip_address(host)
    if ip.is_loopback:
        return same_machine
    return not (ip.is_multicast or ip.is_unspecified or ip.is_reserved)


# --- python-zeroconf ----------------------------------------------------------------------------


@asynccontextmanager
async def _open(interfaces: Sequence[str]) -> AsyncIterator[AsyncZeroconf]:
    """Open the sockets, and say goodbye for what was registered when they are closed.

    Raises OSError where multicast is not possible.
    """
    present = [address for address in interfaces if _is_here(address)]
    if not present:
        raise OSError(f"no network: this machine has no address {' or '.join(interfaces)}")
    try:
        zeroconf = AsyncZeroconf(interfaces=present)
    except RuntimeError as error:  # an interface went away just now
        raise OSError(str(error)) from error
    try:
        await finish(zeroconf.zeroconf.async_wait_for_start())
        yield zeroconf
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()


def _is_here(address: str) -> bool:
    """Say whether an interface of this machine has the address now."""
    try:
        [(family, kind, number, _, place), *_] = socket.getaddrinfo(
            address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, kind, number) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


@asynccontextmanager
async def _browsing(
    zeroconf: AsyncZeroconf, reader: _Reader, on_event: OnEvent
) -> AsyncIterator[None]:
    """Report what is seen while the context is open."""
    async with asyncio.TaskGroup() as tasks:
        seen = _Seen(zeroconf.zeroconf, reader, on_event, tasks)
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[seen.changed])
        try:
            yield
        finally:
            await browser.async_cancel()
            seen.stop()


class _Reader:
    """Reads records of others; of this node's own and of unusable ones it makes nothing."""

    def __init__(self, *, own: NodeId, own_host_id: str, complaints: _Complaints) -> None:
        self._own = own
        self._own_host_id = own_host_id
        self._complaints = complaints

    async def read(self, zeroconf: Zeroconf, name: str) -> Candidate | None:
        """Ask for the record `name` and check it."""
        try:
            service = AsyncServiceInfo(SERVICE_TYPE, name)
            if not await service.async_request(zeroconf, RESOLVE_S * 1000):
                return None
            candidate = from_service(service, self._own_host_id)
        except (UnusableRecordError, ZeroconfError) as error:
            self._complaints.add(name, str(error))
            return None
        return candidate if candidate.node != self._own else None


class _Seen:
    """The records of others that are followed, by instance name."""

    def __init__(
        self, zeroconf: Zeroconf, reader: _Reader, on_event: OnEvent, tasks: asyncio.TaskGroup
    ) -> None:
        self._zeroconf = zeroconf
        self._reader = reader
        self._on_event = on_event
        self._tasks = tasks
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, NodeId] = {}

    def changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Take a change of one record. The parameters have the names that zeroconf calls with."""
        if state_change is ServiceStateChange.Removed:
            self._stop_reading(name)
            node = self._known.pop(name, None)
            if node is not None:
                self._on_event(Goodbye(node=node))
        elif name in self._known or len(self._known.keys() | self._reading.keys()) < MAX_RECORDS:
            self._stop_reading(name)
            self._reading[name] = self._tasks.create_task(self._read(name))

    def stop(self) -> None:
        """Give up the records that are being read."""
        for name in list(self._reading):
            self._stop_reading(name)

    def _stop_reading(self, name: str) -> None:
        task = self._reading.pop(name, None)
        if task is not None:
            task.cancel()

    async def _read(self, name: str) -> None:
        try:
            candidate = await self._reader.read(self._zeroconf, name)
        finally:
            if self._reading.get(name) is asyncio.current_task():
                del self._reading[name]
        if candidate is not None:
            self._known[name] = candidate.node
            self._on_event(candidate)


class _Complaints:
    """Says of each unusable record once what is wrong with it, and at some number no more."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._said: set[str] = set()

    def add(self, name: str, why: str) -> None:
        """Complain about the record `name`."""
        if name in self._said or len(self._said) >= MAX_COMPLAINTS:
            return
        self._said.add(name)
        shown = "".join(c for c in name if c.isprintable())[:80]
        self._log(f"ignored the mDNS record {shown}: {why}")


def _nowhere(line: str) -> None:
    """Log nothing."""


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
