"""Follows the records of other nodes: python-zeroconf's sockets, browsers and events.

Knows how python-zeroconf is used. Every record is read by node_record.py, and their number is
bounded. Must not know what is announced, nor what comes of what is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from zeroconf import Error as ZeroconfError
from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from shardnet.cluster.discovery.node_record import (
    SERVICE_TYPE,
    NodeRecord,
    UnusableRecordError,
    from_service,
)
from shardnet.transport.loop import finish
from shardnet.types import NodeId

RESOLVE_S: Final = 3.0
GOODBYE_S: Final = 0.8
"""How long saying goodbye may take."""

MAX_RECORDS: Final = 256
"""Records of others that are followed at one time; more are ignored."""
MAX_COMPLAINTS: Final = 32
"""Unusable records that are logged; a network can hold any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The record of a node was taken back, or has aged."""

    node: NodeId


OnEvent = Callable[[NodeRecord | Goodbye], None]


@asynccontextmanager
async def open_mdns(interfaces: Sequence[str]) -> AsyncIterator[AsyncZeroconf]:
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
    """Report what is seen while the context is open."""
    async with asyncio.TaskGroup() as tasks:
        seen = _Seen(zeroconf.zeroconf, reader, on_event, tasks)
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[seen.changed])
        try:
            yield
        finally:
            await browser.async_cancel()
            seen.stop()


class RecordReader:
    """Reads records of others; of this node's own and of unusable ones it makes nothing."""

    def __init__(self, *, own: NodeId, own_host_id: str, complaints: Complaints) -> None:
        self._own = own
        self._own_host_id = own_host_id
        self._complaints = complaints

    async def read(self, zeroconf: Zeroconf, name: str) -> NodeRecord | None:
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
        self, zeroconf: Zeroconf, reader: RecordReader, on_event: OnEvent, tasks: asyncio.TaskGroup
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


class Complaints:
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
