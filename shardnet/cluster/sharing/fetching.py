"""Fetch a stage's weights from many sources into one replica.

Knows the order of work: digests from one source, parts from all, each part verified, then recorded.
Which source sends which part is decided in replica_sources.py. Must not know what the weights are
for, nor how links are dialled.
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
from shardnet.cluster.sharing.bulk_client import ANSWER_S, BulkClient, SourceRefused, ended
from shardnet.cluster.sharing.replica_sources import FetchPlan
from shardnet.errors import CheckpointError, LinkError, PeerFailedError, ShardnetError
from shardnet.runtime.stage.executor import JobThread
from shardnet.transport.link import Link
from shardnet.transport.loop import together
from shardnet.wire.messages.bulk import MAX_DIGESTS

WINDOW: Final = 2
"""Parts requested from one source at a time."""
DIGEST_BYTES: Final = 64 << 20
"""Bytes of parts whose digests are requested at a time."""
TRIES: Final = 3
"""Attempts in a row without a part before a source is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """Timeouts and delays, in seconds.

    `answer_s`: while a source sends nothing. `redial_s`: between losing and redialling a source.
    """

    answer_s: float = ANSWER_S
    redial_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The result of a fetch: the bytes that matched their digests, and the names of the senders."""

    n_bytes: int
    sources: tuple[str, ...]


@dataclass(kw_only=True, eq=False, repr=False)
class Fetch:
    """Fetches tensors of the model `model_id` into `replica`.

    `sources` are addresses for `dial`, which opens a bulk link; the first one states the digests.
    Disk writes run on `writer`. `on_progress` takes (bytes fetched, bytes to fetch in all).
    """

    model_id: str
    replica: Replica
    sources: Sequence[str]
    dial: Callable[[str], Awaitable[Link]]
    writer: JobThread
    on_progress: Callable[[int, int], None]
    log: Callable[[str], None]
    times: FetchTimes = FetchTimes()

    def __post_init__(self) -> None:
        self.sources = tuple(dict.fromkeys(self.sources))
        self._plan = FetchPlan(self.sources)
        self._digests: dict[TensorPart, tuple[str, str]] = {}
        self._has_mismatch = False
        self._names: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._fetched_bytes: dict[str, int] = {}
        self._partial_bytes: dict[TensorPart, int] = {}
        self._news = asyncio.Event()
        self._total_bytes = 0

    async def run(self, tensors: Sequence[str]) -> Fetched:
        """Fetch the parts of these tensors that the replica lacks.

        Raises PeerFailedError if no source is left for a part, CheckpointError if sources disagree
        or send wrong bytes, CapacityError if the disk is full. Parts fetched by then stay, also
        after a cancellation.
        """
        parts = self.replica.parts(tensors)
        async with together() as tasks:
            await self._verify_stored(tensors)
            self._total_bytes = self.replica.lacking_bytes(tensors)
            self._report()
            fetching = [tasks.create_task(self._fetch_from(s)) for s in self.sources]
            await self._settle_digests(parts)
            while not self._plan.finished:
                await self._news.wait()
            for task in fetching:
                task.cancel()
        if self._fetched_bytes:
            files = {part.file for part in parts}
            await self.writer.run(lambda: self.replica.seal(files))
        return Fetched(
            n_bytes=sum(self._fetched_bytes.values()),
            sources=tuple(self._names[source] for source in self._fetched_bytes),
        )

    async def _verify_stored(self, tensors: Sequence[str]) -> None:
        """Verify the stored parts in files that were not left sealed; drop the damaged ones."""
        unverified = await self.writer.run(lambda: self.replica.unverified(tensors))
        n_wrong = 0
        for part in unverified:
            n_wrong += not await self.writer.run(partial(self.replica.check, part))
        if n_wrong:
            self.log(f"{n_wrong} parts in {self.replica.folder} are damaged: fetched again")
        if unverified:
            await self.writer.run(lambda: self.replica.seal({part.file for part in unverified}))

    # --- digests

    async def _settle_digests(self, parts: Sequence[TensorPart]) -> None:
        """Request the digest of every part, and queue the parts that the replica lacks.

        All come from the first source, and only those that it lacks from the next one. If a source
        fails, the next one states all digests, so that two different models are not mixed.
        """
        rest = list(parts)
        for source in self.sources:
            if not rest:
                break
            lacking = await self._ask_digests(source, rest, TRIES if self._total_bytes else 1)
            rest = list(parts) if lacking is None else lacking
        for part in rest:
            if part not in self._digests and self.replica.digest(part) is None:
                raise self._unobtainable(part)
        self._plan.close()
        self._wake()

    async def _ask_digests(
        self, source: str, parts: Sequence[TensorPart], tries: int
    ) -> list[TensorPart] | None:
        """Request digests from a source, in at most `tries` attempts in a row without an answer.

        Returns the parts that it lacks, None if the source failed.
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
                await asyncio.sleep(self.times.redial_s if left else 0)
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
        known, first = self._digests.setdefault(part, (sha256, source))
        if known != sha256:
            raise CheckpointError(
                f"{self._name(first)} and {self._name(source)} hold different weights under one "
                f"model id ({self.model_id[:12]}): tensor {part.tensor} differs",
                remedy="copy one checkpoint to both",
            )
        if first != source:
            return
        held = self.replica.digest(part)
        if held == sha256:
            return
        if held is not None:
            await self.writer.run(lambda: self.replica.drop(part))
            self._total_bytes += part.size_bytes
        self._plan.want(part)
        self._wake()
        self._check_obtainable()

    # --- parts

    async def _fetch_from(self, source: str) -> None:
        """Fetch parts from one source until it is dropped, or this is cancelled."""
        left = TRIES
        while source in self._plan.sources:
            if not self._plan.has_waiting:
                await self._news.wait()
                continue
            had = self._fetched_bytes.get(source, 0)
            try:
                async with self._open(source) as client:
                    await self._pull(source, client)
            except LinkError as error:
                self._plan.lost(source)
                self._failures[source] = str(error)
                self._wake()
                left = TRIES if self._fetched_bytes.get(source, 0) > had else left - 1
                if not left:
                    self._drop_source(source)
                await asyncio.sleep(self.times.redial_s if left else 0)

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
        """Receive one part; record it if its digest matches, unless another source took over."""
        is_ours = self._plan.begin(part, source)
        try:
            if not is_ours:
                await self._receive_pieces(client, request, part, store=False)
                return
            sha256 = await self._receive_pieces(client, request, part)
            if sha256 != self._digests[part][0]:
                self._reject_part(part, source, client)
                return
            await self.writer.run(partial(self.replica.record, part, sha256))
        except SourceRefused as refusal:
            self._failures[source] = str(refusal)
            if is_ours:
                self._plan.bar(part)
                self._wake()
                self._check_obtainable()
            return
        finally:
            if is_ours:
                self._partial_bytes.pop(part, None)
        self._fetched_bytes[source] = self._fetched_bytes.get(source, 0) + part.size_bytes
        self._plan.settled(part)
        self._wake()

    async def _receive_pieces(
        self, client: BulkClient, request: int, part: TensorPart, *, store: bool = True
    ) -> str:
        """Receive a part, and write it if `store` is set; return its SHA-256 in hex."""
        digest = hashlib.sha256()
        at = 0
        while at < part.size_bytes:
            piece = await client.piece(request, part.size_bytes - at)
            if store:
                await self.writer.run(partial(self._write, part, at, piece, digest))
                self._partial_bytes[part] = at + len(piece)
                self._report()
            at += len(piece)
        return digest.hexdigest()

    def _write(self, part: TensorPart, at: int, piece: memoryview, digest: hashlib._Hash) -> None:
        self.replica.write(part, at, piece)
        digest.update(piece)

    def _reject_part(self, part: TensorPart, source: str, client: BulkClient) -> None:
        """Drop a source whose part does not match its digest."""
        self._has_mismatch = True
        self._failures[source] = (
            f"its {part} is not what {self._name(self._digests[part][1])} has: the checkpoints "
            "differ, or one is damaged"
        )
        client.link.abort("it sends wrong weights")
        self._drop_source(source)

    def _drop_source(self, source: str) -> None:
        self.log(f"no more weights from {self._name(source)}: {self._failures[source]}")
        self._plan.drop_source(source)
        self._wake()
        self._check_obtainable()

    def _check_obtainable(self) -> None:
        part = self._plan.unobtainable()
        if part is not None:
            raise self._unobtainable(part)

    def _unobtainable(self, part: TensorPart) -> ShardnetError:
        asked = "; ".join(
            f"{self._name(source)}: {self._failures.get(source, 'does not have it')}"
            for source in self.sources
        )
        kind = CheckpointError if self._has_mismatch else PeerFailedError
        return kind(
            f"no node sends tensor {part.tensor} of model {self.model_id[:12]} "
            f"({asked or 'no node to ask'})",
            remedy="start a node that has the whole checkpoint, or copy one to those that differ",
        )

    # --- links and news

    @contextlib.asynccontextmanager
    async def _open(self, source: str) -> AsyncIterator[BulkClient]:
        try:
            link = await self.dial(source)
        except LinkError:
            raise
        except ShardnetError as error:
            raise LinkError(f"{source} refuses a link: {error}") from error
        self._names[source] = link.peer.name
        async with ended(link):
            yield BulkClient(link, self.model_id, answer_s=self.times.answer_s)

    def _name(self, source: str) -> str:
        name = self._names.get(source)
        return f"{name} ({source})" if name else source

    def _wake(self) -> None:
        """Wake all tasks that wait for a change of the plan."""
        self._news.set()
        self._news = asyncio.Event()

    @property
    def _done_bytes(self) -> int:
        return sum(self._fetched_bytes.values()) + sum(self._partial_bytes.values())

    def _report(self) -> None:
        self.on_progress(self._done_bytes, self._total_bytes)


def _batches(parts: Sequence[TensorPart]) -> list[list[TensorPart]]:
    """Split a list of parts into batches of at most DIGEST_BYTES and MAX_DIGESTS."""
    batches: list[list[TensorPart]] = []
    room = 0
    for part in parts:
        if not batches or room < part.size_bytes or len(batches[-1]) == MAX_DIGESTS:
            batches.append([])
            room = DIGEST_BYTES
        batches[-1].append(part)
        room -= part.size_bytes
    return batches
