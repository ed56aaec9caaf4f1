"""Discovery by mDNS: tells the network of this node and proposes others as candidates.

Knows when to announce and when to look. Nothing is believed of a record but that a node may answer
there: who is alive, who is of this cluster and who has gone is found out on control links
(peers.py). Must not dial.
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
    Complaints,
    Goodbye,
    OnEvent,
    RecordReader,
    browsing,
    open_mdns,
)
from shardnet.cluster.machine.addresses import multicast_hosts, rank, read_interfaces
from shardnet.types import NodeId

REANNOUNCE_S: Final = 30.0
"""How often the record is sent again: a partition that has healed does not show by itself."""


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
        self.records: dict[NodeId, NodeRecord] = {}
        """Of other nodes, as they are now."""
        self.listener = MdnsListener(SERVICE_TYPE)

    async def run(self, own: Callable[[], NodeRecord], on_event: OnEvent) -> None:
        """Announce what `own` gives and report others, until cancelled; then say goodbye.

        Where multicast is not possible this is said once, and tried again at every announcement.
        """
        complaints = Complaints(self._log)

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
                    await self._keep(zeroconf, interfaces, own, note, complaints)
            except* (OSError, ZeroconfError) as group:
                self._fail(_first(group))
                await asyncio.sleep(self._reannounce_s)

    async def _keep(
        self,
        zeroconf: AsyncZeroconf,
        interfaces: tuple[str, ...],
        own: Callable[[], NodeRecord],
        on_event: OnEvent,
        complaints: Complaints,
    ) -> None:
        """Announce and browse while the interfaces are these."""
        record = own()
        reader = RecordReader(own=record.node, own_host_id=record.host_id, complaints=complaints)
        async with browsing(zeroconf, reader, on_event):
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

    def _interfaces(self, record: NodeRecord) -> tuple[str, ...]:
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
) -> list[NodeRecord]:
    """Look for nodes without announcing one: for `longest_s`, or until some are found and no other
    has shown itself for `quiet_s`. Where mDNS does not work there are none.
    """
    found: dict[NodeId, NodeRecord] = {}
    news = asyncio.Event()

    def note(event: NodeRecord | Goodbye) -> None:
        if isinstance(event, NodeRecord):
            found[event.node] = event
        else:
            found.pop(event.node, None)
        news.set()

    reader = RecordReader(own=NodeId(""), own_host_id=own_host_id, complaints=Complaints(_nowhere))
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
    return sorted(found.values(), key=lambda candidate: (candidate.name, candidate.node))


async def _quiet(news: asyncio.Event, quiet_s: float) -> None:
    """Wait for news, and then until none has come for `quiet_s`."""
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
