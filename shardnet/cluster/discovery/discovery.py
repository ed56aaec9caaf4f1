"""Discovery by mDNS: announce this node on the network and browse for others.

Knows when to announce and when to browse. A record only means that a node may answer there:
liveness and cluster membership are determined on control links (peers.py). Must not dial.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncZeroconf

from shardnet.cluster.discovery.mdns_listener import MdnsListener
from shardnet.cluster.discovery.node_record import SERVICE_TYPE, NodeRecord, to_service
from shardnet.cluster.discovery.service_browser import (
    Goodbye,
    OnEvent,
    RecordReader,
    RecordWarnings,
    browsing,
    open_mdns,
)
from shardnet.cluster.machine.addresses import multicast_hosts, rank, read_interfaces
from shardnet.types import NodeId

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
        self._fixed_interfaces = tuple(interfaces)
        self._log = log
        self._reannounce_s = reannounce_s
        self.hosts: tuple[str, ...] = ()
        """Addresses of the interfaces in use now."""
        self.failure = ""
        """Why no interface is in use, "" otherwise."""
        self.records: dict[NodeId, NodeRecord] = {}
        """The current records of other nodes."""
        self.listener = MdnsListener(SERVICE_TYPE)
        self._is_due = asyncio.Event()

    def announce(self) -> None:
        """Announce the node's record now, since it has changed."""
        self._is_due.set()

    async def run(self, own: Callable[[], NodeRecord], on_event: OnEvent) -> None:
        """Announce the record of `own` and report others to `on_event`, until cancelled.

        Withdraws the record at the end. If multicast is not possible, logs that once and retries
        at every announcement.
        """
        warnings = RecordWarnings(self._log)

        def note(event: NodeRecord | Goodbye) -> None:
            if isinstance(event, NodeRecord):
                self.records[event.node] = event
            else:
                self.records.pop(event.node, None)
            on_event(event)

        while True:
            try:
                interfaces = self._interfaces(own())
                async with (
                    open_mdns(interfaces) as zeroconf,
                    self.listener.listening(interfaces, rank(read_interfaces())),
                ):
                    self.hosts, self.failure = interfaces, ""
                    await self._keep(zeroconf, interfaces, own, note, warnings)
            except* (OSError, ZeroconfError) as group:
                self._fail(_first(group))
                await self._until_due()

    async def _keep(
        self,
        zeroconf: AsyncZeroconf,
        interfaces: tuple[str, ...],
        own: Callable[[], NodeRecord],
        on_event: OnEvent,
        warnings: RecordWarnings,
    ) -> None:
        """Announce and browse until the interfaces change."""
        record = own()
        reader = RecordReader(own=record.node, own_host_id=record.host_id, warnings=warnings)
        async with browsing(zeroconf, reader, on_event):
            # Node ids are unique: asking around whether the name is taken would cost a second.
            announcing = await zeroconf.async_register_service(
                to_service(record), cooperating_responders=True
            )
            while True:
                await announcing  # it is sent several times
                await self._until_due()
                record = own()
                if self._interfaces(record) != interfaces:
                    return
                announcing = await zeroconf.async_update_service(to_service(record))

    async def _until_due(self) -> None:
        """Wait until a record is to be announced."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._reannounce_s):
                await self._is_due.wait()
        self._is_due.clear()

    def _interfaces(self, record: NodeRecord) -> tuple[str, ...]:
        return self._fixed_interfaces or multicast_hosts(record.hosts, rank(read_interfaces()))

    def _fail(self, error: Exception) -> None:
        before, self.hosts, self.failure = self.failure, (), str(error)
        self.records.clear()
        if before != self.failure:
            self._log(
                f"warning: mDNS does not work here ({error}), so nodes do not find each other: "
                "name other nodes with --peer, or give --no-mdns to hide this warning"
            )


async def browse(
    interfaces: Sequence[str],
    *,
    own_host_id: str,
    longest_s: float,
    quiet_s: float,
    on_heard: Callable[[], None] = lambda: None,
) -> list[NodeRecord]:
    """Browse for nodes without announcing one; return their records, sorted by name.

    Calls `on_heard` at each record that comes. Ends after `longest_s` seconds, or when some are
    found and there was no event for `quiet_s` seconds. Returns none if mDNS does not work here.
    """
    found: dict[NodeId, NodeRecord] = {}
    news = asyncio.Event()

    def note(event: NodeRecord | Goodbye) -> None:
        if isinstance(event, NodeRecord):
            found[event.node] = event
        else:
            found.pop(event.node, None)
        news.set()
        on_heard()

    reader = RecordReader(
        own=NodeId(""), own_host_id=own_host_id, warnings=RecordWarnings(_nowhere)
    )
    try:
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(longest_s),
                open_mdns(interfaces) as zeroconf,
                browsing(zeroconf, reader, note),
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


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
