"""Fetch a stage's weights from many sources into one replica.

Knows the order of work: digests from one source, parts from all, each part checked and then held.
What became of each request is decided in fetch_plan.py. Must not know who wants the weights, nor
how links are dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from shardnet.checkpoint.replica import Replica, TensorPart
from shardnet.cluster.sharing.bulk_client import ANSWER_S, BulkClient, SourceRefused
from shardnet.cluster.sharing.fetch_plan import FetchPlan
from shardnet.errors import (
    CheckpointError,
    LinkError,
    PeerFailedError,
    ShardnetError,
    first_error,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.transport.link import Link
from shardnet.wire.messages.bulk import MAX_DIGESTS

WINDOW: Final = 2
"""Parts asked from one source at a time."""
DIGEST_BYTES: Final = 64 << 20
"""Bytes whose digests are asked at a time."""
TRIES: Final = 3
"""How often a source is dialled again while no part comes from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """How long things take, in seconds.

    `answer_s`: how long a source may send nothing. `redial_s`: from losing a source to dialling it
    again.
    """

    answer_s: float = ANSWER_S
    redial_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What was fetched: the bytes that passed their digest, and the names of their senders."""

    n_bytes: int
    sources: tuple[str, ...]


class Fetch:
    """Fetches tensors into `replica`. `sources` are addresses for `dial`; the first states digests.

    `on_progress` takes (bytes fetched, bytes to fetch in all).
    """

    def __init__(
        self,
        *,
        model_id: str,
        replica: Replica,
        sources: Sequence[str],
        dial: Callable[[str], Awaitable[Link]],
        writer: Executor,
        on_progress: Callable[[int, int], None],
        log: Callable[[str], None],
        times: FetchTimes | None = None,
    ) -> None:
        self._model_id = model_id
        self._replica = replica
        self._sources = tuple(dict.fromkeys(sources))
        self._dial = dial
        self._writer = writer
        self._on_progress = on_progress
        self._log = log
        self._times = times or FetchTimes()
        self._plan = FetchPlan(self._sources)
        self._digests: dict[TensorPart, tuple[str, str]] = {}
        self._has_come_wrong = False
        self._names: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._came: dict[str, int] = {}
        self._under_way: dict[TensorPart, int] = {}
        self._news = asyncio.Event()
        self._total_bytes = 0

    async def run(self, tensors: Sequence[str]) -> Fetched:
        """Fetch the parts of these tensors that the replica lacks.

        Raises PeerFailedError when no source is left for a part, CheckpointError when sources
        disagree or send wrong bytes, CapacityError when the disk is full. Parts fetched by then
        stay, also when this is cancelled.
        """
        parts = self._replica.parts(tensors)
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._check_what_is_here(tensors)
                self._total_bytes = self._replica.lacking_bytes(tensors)
                self._report()
                fetching = [tasks.create_task(self._fetch_from(s)) for s in self._sources]
                await self._settle_digests(parts)
                while not self._plan.finished:
                    await self._news.wait()
                for task in fetching:
                    task.cancel()
        except* ShardnetError as group:
            raise first_error(group) from None
        if self._came:
            files = {part.file for part in parts}
            await self._writer.run(lambda: self._replica.seal(files))
        return Fetched(
            n_bytes=sum(self._came.values()),
            sources=tuple(self._names[source] for source in self._came),
        )

    async def _check_what_is_here(self, tensors: Sequence[str]) -> None:
        """Verify the held parts in files that were not left sealed; drop the damaged ones."""
        doubtful = await self._writer.run(lambda: self._replica.doubtful(tensors))
        n_wrong = 0
        for part in doubtful:
            n_wrong += not await self._writer.run(partial(self._replica.check, part))
        if n_wrong:
            self._log(f"{n_wrong} parts in {self._replica.folder} are damaged: fetched again")
        if doubtful:
            await self._writer.run(lambda: self._replica.seal({part.file for part in doubtful}))

    # --- digests

    async def _settle_digests(self, parts: Sequence[TensorPart]) -> None:
        """Ask for the digest of every part, and queue those that the replica lacks.

        The first source tells. When it fails, the next one tells of all parts, so that no two are
        mixed; it also tells of those that the first one lacks.
        """
        rest = list(parts)
        for source in self._sources:
            if not rest:
                break
            lacking = await self._ask_digests(source, rest, TRIES if self._total_bytes else 1)
            rest = list(parts) if lacking is None else lacking
        for part in rest:
            if part not in self._digests and self._replica.digest(part) is None:
                raise self._out_of_reach(part)
        self._plan.close()
        self._tell()

    async def _ask_digests(
        self, source: str, parts: Sequence[TensorPart], tries: int
    ) -> list[TensorPart] | None:
        """Ask a source for digests, `tries` times without any answer.

        Returns the parts that it lacks, None when the source has failed.
        """
        waiting = deque(_batches(parts))
        lacking: list[TensorPart] = []
        left = tries
        while waiting and left:
            try:
                async with self._open(source) as client:
                    while waiting:
                        digests = await client.digests(waiting[0])
                        left = tries
                        lacking += await self._take_digests(source, waiting.popleft(), digests)
            except SourceRefused as refusal:
                self._failures[source] = str(refusal)
                break
            except LinkError as error:
                self._failures[source] = str(error)
                left -= 1
                await asyncio.sleep(self._times.redial_s if left else 0)
        return None if waiting else lacking

    async def _take_digests(
        self, source: str, parts: Sequence[TensorPart], digests: Sequence[str | None]
    ) -> list[TensorPart]:
        """Record the digests from a source; return the parts that it lacks."""
        for part, sha256 in zip(parts, digests, strict=True):
            if sha256 is not None:
                await self._take_digest(part, sha256, source)
        return [part for part, sha256 in zip(parts, digests, strict=True) if sha256 is None]

    async def _take_digest(self, part: TensorPart, sha256: str, source: str) -> None:
        told, teller = self._digests.setdefault(part, (sha256, source))
        if told != sha256:
            raise CheckpointError(
                f"{self._name(teller)} and {self._name(source)} hold different weights under one "
                f"model id ({self._model_id[:12]}): tensor {part.tensor} differs",
                remedy="copy one checkpoint to both",
            )
        if teller != source:
            return
        held = self._replica.digest(part)
        if held == sha256:
            return
        if held is not None:
            await self._writer.run(lambda: self._replica.drop(part))
            self._total_bytes += part.size_bytes
        self._plan.want(part)
        self._tell()
        self._check_obtainable()

    # --- parts

    async def _fetch_from(self, source: str) -> None:
        """Take parts from one source until it is given up, or this is cancelled."""
        left = TRIES
        while source in self._plan.sources:
            if not self._plan.has_waiting:
                await self._news.wait()
                continue
            had = self._came.get(source, 0)
            try:
                async with self._open(source) as client:
                    await self._pull(source, client)
            except LinkError as error:
                self._plan.lost(source)
                self._failures[source] = str(error)
                self._tell()
                left = TRIES if self._came.get(source, 0) > had else left - 1
                if not left:
                    self._give_up(source)
                await asyncio.sleep(self._times.redial_s if left else 0)

    async def _pull(self, source: str, client: BulkClient) -> None:
        asked: deque[tuple[int, TensorPart]] = deque()
        while source in self._plan.sources:
            while len(asked) < WINDOW and (part := self._plan.take(source, len(asked))):
                asked.append((client.ask_part(part), part))
            if asked:
                await self._receive(source, client, *asked[0])
                asked.popleft()
            else:
                await self._news.wait()

    async def _receive(
        self, source: str, client: BulkClient, request: int, part: TensorPart
    ) -> None:
        """Take in one part and hold it if it is right; leave what another source has taken over."""
        is_ours = self._plan.begin(part, source)
        try:
            if not is_ours:
                await self._take_pieces(client, request, part, keep=False)
                return
            sha256 = await self._take_pieces(client, request, part)
            if sha256 != self._digests[part][0]:
                self._came_wrong(part, source, client)
                return
            await self._writer.run(partial(self._replica.hold, part, sha256))
        except SourceRefused as refusal:
            self._failures[source] = str(refusal)
            if is_ours:
                self._plan.bar(part)
                self._tell()
                self._check_obtainable()
            return
        finally:
            if is_ours:
                self._under_way.pop(part, None)
        self._came[source] = self._came.get(source, 0) + part.size_bytes
        self._plan.settled(part)
        self._tell()

    async def _take_pieces(
        self, client: BulkClient, request: int, part: TensorPart, *, keep: bool = True
    ) -> str:
        """Write a part as it comes, if it is to be kept; return its SHA-256 in hex."""
        digest = hashlib.sha256()
        at = 0
        while at < part.size_bytes:
            piece = await client.piece(request, part.size_bytes - at)
            if keep:
                await self._writer.run(partial(self._write, part, at, piece, digest))
                self._under_way[part] = at + len(piece)
                self._report()
            at += len(piece)
        return digest.hexdigest()

    def _write(self, part: TensorPart, at: int, piece: memoryview, digest: hashlib._Hash) -> None:
        self._replica.write(part, at, piece)
        digest.update(piece)

    def _came_wrong(self, part: TensorPart, source: str, client: BulkClient) -> None:
        """Give up a source whose part does not match its digest."""
        self._has_come_wrong = True
        self._failures[source] = (
            f"its {part} is not what {self._name(self._digests[part][1])} holds: the checkpoints "
            "differ, or one is damaged"
        )
        client.link.abort("it sends wrong weights")
        self._give_up(source)

    def _give_up(self, source: str) -> None:
        self._log(f"no more weights from {self._name(source)}: {self._failures[source]}")
        self._plan.leave(source)
        self._tell()
        self._check_obtainable()

    def _check_obtainable(self) -> None:
        part = self._plan.unobtainable()
        if part is not None:
            raise self._out_of_reach(part)

    def _out_of_reach(self, part: TensorPart) -> ShardnetError:
        asked = "; ".join(
            f"{self._name(source)}: {self._failures.get(source, 'does not hold it')}"
            for source in self._sources
        )
        kind = CheckpointError if self._has_come_wrong else PeerFailedError
        return kind(
            f"no node gives tensor {part.tensor} of model {self._model_id[:12]} "
            f"({asked or 'nobody to ask'})",
            remedy="start a node that has the whole checkpoint, or copy one to those that differ",
        )

    # --- links and news

    @contextlib.asynccontextmanager
    async def _open(self, source: str) -> AsyncIterator[BulkClient]:
        try:
            link = await self._dial(source)
        except LinkError:
            raise
        except ShardnetError as error:
            raise LinkError(f"{source} refuses a link: {error}") from error
        self._names[source] = link.peer.name
        is_done = False
        try:
            yield BulkClient(link, self._model_id, answer_s=self._times.answer_s)
            is_done = True
        finally:
            if is_done:
                await link.close()
            else:
                link.abort("the fetch has ended")

    def _name(self, source: str) -> str:
        name = self._names.get(source)
        return f"{name} ({source})" if name else source

    def _tell(self) -> None:
        """Wake all who wait for something to fetch."""
        self._news.set()
        self._news = asyncio.Event()

    @property
    def _done_bytes(self) -> int:
        return sum(self._came.values()) + sum(self._under_way.values())

    def _report(self) -> None:
        self._on_progress(self._done_bytes, self._total_bytes)


def _batches(parts: Sequence[TensorPart]) -> list[list[TensorPart]]:
    """Cut a list of parts where it has come to DIGEST_BYTES or MAX_DIGESTS."""
    batches: list[list[TensorPart]] = []
    room = 0
    for part in parts:
        if not batches or room < part.size_bytes or len(batches[-1]) == MAX_DIGESTS:
            batches.append([])
            room = DIGEST_BYTES
        batches[-1].append(part)
        room -= part.size_bytes
    return batches
