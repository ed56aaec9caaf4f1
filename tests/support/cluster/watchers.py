"""Discoveries on loopback that note what they see and say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from shardnet.cluster.discovery.discovery import Discovery
from shardnet.cluster.discovery.service_browser import Goodbye, NodeRecord
from shardnet.types import NodeId

LOOPBACK = ["127.0.0.1"]

RECORD = NodeRecord(
    node=NodeId("a" * 32),
    name="anna",
    version="0.2.0",
    protocol=1,
    fingerprint="",
    host_id="anna-001122334455",
    hosts=("192.168.1.10", "fd00::10"),
    port=7433,
)


def new_record(name: str) -> NodeRecord:
    """A record of its own for a node on this machine."""
    return replace(RECORD, node=NodeId(secrets.token_hex(16)), name=name, hosts=("127.0.0.1",))


class Watcher:
    """One node's discovery and what it has seen."""

    def __init__(self, record: NodeRecord, **options: Any) -> None:
        self.record = record
        self.events: list[NodeRecord | Goodbye] = []
        self.lines: list[str] = []
        self._news = asyncio.Event()
        options = {"fingerprint": "", "interfaces": LOOPBACK, **options}
        self._discovery = Discovery(log=self._log, **options)

    @property
    def own_lines(self) -> list[str]:
        """What it has logged, but for records that other tests on this machine have written."""
        return [line for line in self.lines if "not an id" not in line]

    async def run(self) -> None:
        await self._discovery.run(lambda: self.record, self._see)

    async def sees(self, event: NodeRecord | Goodbye) -> None:
        """Wait until it has seen `event`."""
        await self._until(lambda: event in self.events)

    async def says(self, part: str) -> None:
        """Wait until it has logged `part`."""
        await self._until(lambda: any(part in line for line in self.lines))

    async def _until(self, happened: Any) -> None:
        while not happened():
            self._news.clear()
            await self._news.wait()

    def _see(self, event: NodeRecord | Goodbye) -> None:
        self.events.append(event)
        self._news.set()

    def _log(self, line: str) -> None:
        self.lines.append(line)
        self._news.set()


@asynccontextmanager
async def running(*watchers: Watcher) -> AsyncIterator[None]:
    """Run discoveries, and have them say goodbye."""
    tasks = [asyncio.create_task(watcher.run()) for watcher in watchers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
