"""Sources of weights inside one process: real ones, and ones that a test scripts.

`Sources.dial` opens bulk links by name, over memory. Knows no cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import TensorFiles, begin_replica, lay_out, parts_of
from shardnet.cluster.sharing.bulk_client import BulkServer, SendRate
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import LocalModels
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import PeerUnreachableError, ShardnetError
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.wire.messages.bulk import BulkMessage, bulk_frame, read_bulk
from shardnet.wire.messages.handshake import Capability, Hello, PeerRole, Purpose

Serve = Callable[[Link], Awaitable[None]]
Script = Callable[[BulkMessage], list[tuple[BulkMessage, bytes]] | None]
"""Gives the answers to a request; None ends the link."""


def hello(name: str, role: PeerRole = PeerRole.NODE) -> Hello:
    own = {"node": name, "name": name, "version": "0"}
    return Hello(purpose=Purpose.BULK, role=role, capabilities=[*Capability], **own)


class Sources:
    """Who answers at which name. `dialled` lists the names in the order they were dialled."""

    def __init__(self, tasks: asyncio.TaskGroup, disk: DiskJobs) -> None:
        self._tasks = tasks
        self._jobs = disk
        self.disk = disk.at("the receiver's disk")
        self.serves: dict[str, Serve] = {}
        self.dialled: list[str] = []

    def add(self, name: str, folder: Path, cache: Path) -> None:
        """Let a real source with a checkpoint, or a replica of a cache, answer."""
        models = LocalModels(ModelCache(cache))
        if folder.exists():
            models.inspect(folder)
        adapters = AdapterStore(cache / "adapters")
        self.serves[name] = BulkServer(
            models, self._jobs, SendRate(None), time.monotonic, adapters
        ).serve

    def script(self, name: str, script: Script) -> None:
        """Let a scripted source answer."""

        async def serve(link: Link) -> None:
            while (answers := script(read_bulk(await link.receive()))) is not None:
                for message, payload in answers:
                    link.send(bulk_frame(message, payload))
                    await link.drain()
            link.abort("as the script says")

        self.serves[name] = serve

    async def dial(self, name: str, role: PeerRole = PeerRole.NODE) -> Link:
        """Open a bulk link to a source."""
        self.dialled.append(name)
        if name not in self.serves:
            raise PeerUnreachableError(f"nothing answers at {name}")
        near, far = await memory_pair(hello("near", role), hello(name))
        self._tasks.create_task(self._serve(name, far))
        return near

    async def _serve(self, name: str, link: Link) -> None:
        with contextlib.suppress(ShardnetError):
            await self.serves[name](link)
        await link.close()


@asynccontextmanager
async def open_sources() -> AsyncIterator[Sources]:
    """Give sources whose links and thread end with it."""
    disk = DiskJobs("test-share")
    try:
        async with asyncio.TaskGroup() as tasks:
            yield Sources(tasks, disk)
    finally:
        await disk.drain()
        disk.close()


def empty_replica(source: Path, folder: Path) -> Path:
    """A replica of `source` without any tensor, in `folder`."""
    checkpoint = Checkpoint.open(source)
    folder.mkdir(parents=True)
    heads = checkpoint.skeleton()
    files = lay_out(folder, heads)
    for head in heads:
        whole = memoryview((checkpoint.folder / head.name).read_bytes())
        for at, n_bytes in head.ranges:
            files.write(head.name, at, whole[at : at + n_bytes])
    files.close()
    begin_replica(folder, checkpoint.model_id, "a test")
    return folder


def same_bytes(folder: Path, source: Path, tensors: Iterable[str]) -> bool:
    """Whether these tensors have the same bytes in both folders."""
    checkpoint = Checkpoint.open(source)
    ours, theirs = TensorFiles(folder), TensorFiles(checkpoint.folder)
    parts = [part for name in tensors for part in parts_of(checkpoint.stored[name])]
    equal = all(ours.digest(part) == theirs.digest(part) for part in parts)
    ours.close()
    theirs.close()
    return equal
