"""Follow the records of other nodes with python-zeroconf.

Knows its sockets, browsers and events. Every record is read by node_record.py, and their number is
bounded. Must not know the own record, nor the use of those found.
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
"""Timeout of withdrawing the own record."""

MAX_RECORDS: Final = 256
"""Largest number of records followed at one time; more are ignored."""
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
    """Reads records of other nodes; skips this node's own, and logs unusable ones."""

    def __init__(self, *, own: NodeId, own_host_id: str, warnings: RecordWarnings) -> None:
        self._own = own
        self._own_host_id = own_host_id
        self._warnings = warnings

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
        return record if record.node != self._own else None


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

    def changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Handle a change of one record. zeroconf passes the arguments by name."""
        if state_change is ServiceStateChange.Removed:
            self._stop_reading(name)
            node = self._known.pop(name, None)
            if node is not None:
                self._on_event(Goodbye(node=node))
        elif name in self._known or len(self._known.keys() | self._reading.keys()) < MAX_RECORDS:
            self._stop_reading(name)
            self._reading[name] = self._tasks.create_task(self._read(name))

    def stop(self) -> None:
        """Cancel all pending reads of records."""
        for name in list(self._reading):
            self._stop_reading(name)

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
