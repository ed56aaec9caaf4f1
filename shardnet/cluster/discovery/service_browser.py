"""Follow the mDNS records of other nodes: written, read and validated here.

The number of records is bounded.

Records are public and unauthenticated: their size is bounded, and they only mean that a node may
answer there.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Final

from zeroconf import Error as ZeroconfError
from zeroconf import ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from shardnet.cluster.machine.addresses import format_addresses
from shardnet.transport.loop import at_most, finish
from shardnet.types import NodeId

SERVICE_TYPE: Final = "_shardnet._tcp.local."
MAX_HOSTS: Final = 16

_HOST_TTL_S: Final = 120
_RECORD_TTL_S: Final = 1125
"""The shortest time for which python-zeroconf stores a PTR record."""

_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,63}")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{0,64}")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+-]{1,32}")
_MAX_NAME_BYTES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """The description of a node in its record; of another node it is unauthenticated.

    `fingerprint` is that of the cluster key, "" without one; `version` that of shardnet, `protocol`
    that of the wire protocol; `host_id` is equal for nodes on one machine; `hosts` are best first.
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
        """All hosts with the port, host:port."""
        return format_addresses(self.hosts, self.port)


class UnusableRecordError(ValueError):
    """A malformed or useless record; the message says why. It becomes a line in the log."""


def to_service(record: NodeRecord) -> AsyncServiceInfo:
    """Write a node's record as an mDNS service."""
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


def from_service(service: ServiceInfo, own_host_id: str) -> NodeRecord:
    """Read a node's record. Raises UnusableRecordError if it is not well formed.

    Loopback addresses count only for nodes with `own_host_id`, those of this machine.
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
    return NodeRecord(
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
    """Remove unprintable characters, and cut to the size of a TXT entry."""
    printable = "".join(c for c in text if c.isprintable())
    return printable.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")


def _is_believable(host: str, *, same_machine: bool) -> bool:
    ip = ip_address(host)
    if ip.is_loopback:
        return same_machine
    return not (ip.is_multicast or ip.is_unspecified or ip.is_reserved)


RESOLVE_S: Final = 3.0
GOODBYE_S: Final = 0.8
"""Timeout of withdrawing the own record."""

MAX_RECORDS: Final = 256
"""Largest number of records followed at one time; more wait for room."""
MAX_WAITING: Final = 1024
"""Largest number of records that wait; more are ignored."""
MAX_WARNINGS: Final = 32
"""Largest number of unusable records that are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The record of a node was withdrawn, or has expired."""

    node: NodeId


OnEvent = Callable[[NodeRecord | Goodbye], None]


@asynccontextmanager
async def open_mdns(interfaces: Sequence[str]) -> AsyncIterator[AsyncZeroconf]:
    """Open sockets on the `interfaces` (addresses); at the end withdraw records and close them.

    Raises OSError if multicast is not possible.
    """
    present = [address for address in interfaces if _is_here(address)]
    if not present:
        raise OSError(f"no network: this machine has no address {' or '.join(interfaces)}")
    try:
        zeroconf = AsyncZeroconf(interfaces=present)
    except RuntimeError as error:  # an interface has just gone down
        raise OSError(str(error)) from error
    try:
        await finish(zeroconf.zeroconf.async_wait_for_start())
        yield zeroconf
    finally:
        async with at_most(GOODBYE_S):
            await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()


def _is_here(address: str) -> bool:
    """Return whether an interface of this machine has the address now."""
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
async def browsing(
    zeroconf: AsyncZeroconf, reader: RecordReader, on_event: OnEvent
) -> AsyncIterator[None]:
    """Browse inside the context: read records with `reader`, and pass changes to `on_event`."""
    async with asyncio.TaskGroup() as tasks:
        seen = _FollowedRecords(zeroconf.zeroconf, reader, on_event, tasks)
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[seen.changed])
        try:
            yield
        finally:
            await browser.async_cancel()
            seen.stop()


class RecordReader:
    """Reads records of other nodes; skips this node's own, and logs unusable ones.

    With `only_here` it also skips those of other machines: sockets on loopback get these too, as
    unicast to mDNS's port and from groups that other programs have joined.
    """

    def __init__(
        self, *, own: NodeId, own_host_id: str, warnings: RecordWarnings, only_here: bool
    ) -> None:
        self._own = own
        self._own_host_id = own_host_id
        self._warnings = warnings
        self._only_here = only_here

    async def read(self, zeroconf: Zeroconf, name: str) -> NodeRecord | None:
        """Request the record `name` and validate it; None if missing, unusable or the own one."""
        try:
            service = AsyncServiceInfo(SERVICE_TYPE, name)
            if not await service.async_request(zeroconf, RESOLVE_S * 1000):
                return None
            record = from_service(service, self._own_host_id)
        except (UnusableRecordError, ZeroconfError) as error:
            self._warnings.add(name, str(error))
            return None
        except Exception as error:  # strangers write records: none may end discovery
            self._warnings.add(name, f"it cannot be read ({error!r})")
            return None
        if self._only_here:
            hosts = tuple(host for host in record.hosts if ip_address(host).is_loopback)
            record = replace(record, hosts=hosts)
        return record if record.hosts and record.node != self._own else None


class _FollowedRecords:
    """The records of others being followed, by instance name."""

    def __init__(
        self, zeroconf: Zeroconf, reader: RecordReader, on_event: OnEvent, tasks: asyncio.TaskGroup
    ) -> None:
        self._zeroconf = zeroconf
        self._reader = reader
        self._on_event = on_event
        self._tasks = tasks
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, NodeId] = {}
        self._waiting: dict[str, None] = {}
        """Names that came while there was no room, oldest first: zeroconf reports each once."""

    def changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Handle a change of one record. zeroconf passes the arguments by name."""
        if state_change is ServiceStateChange.Removed:
            self._waiting.pop(name, None)
            self._stop_reading(name)
            node = self._known.pop(name, None)
            if node is not None:
                self._on_event(Goodbye(node=node))
            self._read_waiting()
        elif name in self._known or self._has_room:
            self._begin_reading(name)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting[name] = None

    def stop(self) -> None:
        """Cancel all pending reads of records."""
        for name in list(self._reading):
            self._stop_reading(name)

    @property
    def _has_room(self) -> bool:
        return len(self._known.keys() | self._reading.keys()) < MAX_RECORDS

    def _read_waiting(self) -> None:
        """Begin to read the records that wait, as far as there is room."""
        while self._waiting and self._has_room:
            name = next(iter(self._waiting))
            del self._waiting[name]
            self._begin_reading(name)

    def _begin_reading(self, name: str) -> None:
        self._stop_reading(name)
        self._reading[name] = self._tasks.create_task(self._read(name))

    def _stop_reading(self, name: str) -> None:
        task = self._reading.pop(name, None)
        if task is not None:
            task.cancel()

    async def _read(self, name: str) -> None:
        try:
            record = await self._reader.read(self._zeroconf, name)
        finally:
            if self._reading.get(name) is asyncio.current_task():
                del self._reading[name]
        if record is not None:
            self._known[name] = record.node
            self._on_event(record)
        else:
            self._read_waiting()


class RecordWarnings:
    """Logs each unusable record once, and at most MAX_WARNINGS in all."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._said: set[str] = set()

    def add(self, name: str, why: str) -> None:
        """Log that the record `name` is ignored, and `why`."""
        if name in self._said or len(self._said) >= MAX_WARNINGS:
            return
        self._said.add(name)
        shown = "".join(c for c in name if c.isprintable())[:80]
        self._log(f"ignored the mDNS record {shown}: {why}")
