"""Bulk links, both ends: a model's files, parts and digests, and keys and values of sequences.

A peer can read the models of this machine and nothing else: tensors and files go by the model's own
names.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from operator import attrgetter
from struct import iter_unpack
from typing import BinaryIO, TypeVar

from msgspec.structs import replace

from shardnet import errors
from shardnet.checkpoint.adapters.layer_files import LayerPart
from shardnet.checkpoint.replica import TensorPart
from shardnet.checkpoint.tensors.stored_tensor import FileHead, StoredRow
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import LocalModels, OpenModel
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link
from shardnet.types import block_spans
from shardnet.wire.framing.frames import Buffer
from shardnet.wire.messages import bulk
from shardnet.wire.messages.handshake import PeerRole, error_frame, explanation

ANSWER_S = 20.0
"""Timeout while a source sends nothing of an answer."""

Answer = TypeVar("Answer", bound=bulk.BulkMessage)


class SourceRefused(Exception):
    """The source answered that it does not send the requested data; the message says why."""


@asynccontextmanager
async def ended(link: Link) -> AsyncIterator[Link]:
    """Close a link behind the body, or abort it where that fails."""
    try:
        yield link
    except BaseException:
        link.abort("the fetch has ended")
        raise
    await link.close()


class BulkAsker:
    """Requests over one link. Answers come in the order of the requests.

    Every method that waits raises LinkError if the link ends, PeerSilentError if nothing comes for
    `answer_s` seconds, RemoteProtocolError for an unexpected answer, SourceRefused for a refusal.
    """

    def __init__(self, link: Link, *, answer_s: float = ANSWER_S) -> None:
        self.link = link
        self.name = f"{link.peer.name} ({link.peer_address})"
        self._answer_s = answer_s
        self._numbers = count(1)

    async def piece(self, request: int, left: int) -> memoryview:
        """Receive the next bytes of the answer to a request; `left` bytes of it are to come."""
        _, payload = await self._receive(request, bulk.Piece)
        if not 0 < len(payload) <= left:
            raise errors.RemoteProtocolError(
                f"{self.name} sent a piece of {len(payload)} bytes where {left} were to come"
            )
        return payload

    def _send(self, message: bulk.BulkRequest) -> None:
        self.link.send(bulk.bulk_frame(message))

    async def _receive(self, request: int, expected: type[Answer]) -> tuple[Answer, memoryview]:
        try:
            async with deadline(self._answer_s):
                frame = await self.link.receive()
        except TimeoutError:
            raise errors.PeerSilentError(
                f"{self.name} gave nothing of what it was asked for within {self._answer_s:g} s"
            ) from None
        message = bulk.read_bulk(frame)
        if message.request == request and isinstance(message, bulk.Refused):
            raise SourceRefused(f"{self.name}: {message.message}")
        if message.request != request or not isinstance(message, expected):
            raise errors.RemoteProtocolError(
                f"{self.name} sent {type(message).__name__} {message.request} where "
                f"{expected.__name__} {request} was to come"
            )
        return message, memoryview(frame.payload)


class BulkClient(BulkAsker):
    """Requests one model on one link."""

    def __init__(self, link: Link, model_id: str, *, answer_s: float = ANSWER_S) -> None:
        super().__init__(link, answer_s=answer_s)
        self._model_id = model_id

    async def skeleton(self) -> list[FileHead]:
        """Request the list of the model's files, with the byte ranges that its id covers."""
        message = bulk.FetchSkeleton(request=next(self._numbers), model_id=self._model_id)
        self._send(message)
        answer, _ = await self._receive(message.request, bulk.Skeleton)
        return [
            FileHead(
                name=file.name,
                size_bytes=file.size_bytes,
                ranges=tuple((part.offset, part.n_bytes) for part in file.heads),
            )
            for file in answer.files
        ]

    async def head(self, head: FileHead) -> AsyncGenerator[tuple[int, memoryview], None]:
        """Request the ranges of `head`; yield (offset in the file, bytes)."""
        message = bulk.FetchHead(
            request=next(self._numbers), model_id=self._model_id, file=head.name
        )
        self._send(message)
        for offset, n_bytes in head.ranges:
            at = 0
            while at < n_bytes:
                piece = await self.piece(message.request, n_bytes - at)
                yield offset + at, piece
                at += len(piece)

    async def digests(self, parts: Sequence[TensorPart]) -> list[str | None]:
        """Request the SHA-256 (hex) of at most MAX_DIGESTS parts; None for parts it lacks."""
        message = bulk.FetchDigests(
            request=next(self._numbers),
            model_id=self._model_id,
            parts=[bulk.PartName(part.tensor, part.number) for part in parts],
        )
        self._send(message)
        answer, _ = await self._receive(message.request, bulk.Digests)
        if len(answer.sha256) != len(parts):
            raise errors.RemoteProtocolError(
                f"{self.name} sent {len(answer.sha256)} digests of {len(parts)} parts"
            )
        return answer.sha256

    def ask_part(self, part: TensorPart) -> int:
        """Request a part; return the number of the request, for `piece`."""
        message = bulk.FetchPart(
            request=next(self._numbers),
            model_id=self._model_id,
            tensor=part.tensor,
            part=part.number,
        )
        self._send(message)
        return message.request

    async def rows(self, rows: Sequence[StoredRow]) -> bytearray:
        """Request at most MAX_ROWS rows, those of one tensor together; return their bytes."""
        message = bulk.FetchRows(
            request=next(self._numbers),
            model_id=self._model_id,
            tables=[
                bulk.RowNumbers(tensor, b"".join(row.number.to_bytes(8, "little") for row in some))
                for tensor, some in groupby(rows, key=attrgetter("tensor"))
            ],
        )
        self._send(message)
        found, n_bytes = bytearray(), sum(row.n_bytes for row in rows)
        while len(found) < n_bytes:
            found += await self.piece(message.request, n_bytes - len(found))
        return found


class AdapterClient(BulkAsker):
    """Requests parts of LoRA adapters on one link."""

    async def part(self, adapter_id: str, part: LayerPart) -> bytes:
        """Request the file of one layer, whose digest the caller checks."""
        message = bulk.FetchAdapter(
            request=next(self._numbers), adapter_id=adapter_id, layer=part.layer
        )
        self._send(message)
        content = bytearray()
        while len(content) < part.size_bytes:
            content += await self.piece(message.request, part.size_bytes - len(content))
        return bytes(content)


class WheelClient(BulkAsker):
    """Sends a wheel on one link."""

    async def send(
        self, offer: bulk.OfferWheel, file: BinaryIO, on_progress: Callable[[int, int], None]
    ) -> None:
        """Send what is offered, the content of `file`, and wait until it can be installed there."""
        self._send(offer)
        await self._receive(offer.request, bulk.WheelState)
        n_sent = 0
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            self.link.send(bulk.bulk_frame(bulk.Piece(request=offer.request), piece))
            await self.link.drain()
            n_sent += len(piece)
            on_progress(n_sent, offer.size_bytes)
        await self._receive(offer.request, bulk.WheelState)


class KvClient(BulkAsker):
    """Requests what stages of one ring hold of sequences."""

    def ask(self, message: bulk.FetchKv) -> int:
        """Send a request, which is numbered here; return its number, for `rows`."""
        message = replace(message, request=next(self._numbers))
        self._send(message)
        return message.request

    async def rows(self, request: int) -> bulk.KvRows:
        """Receive what the answer to the oldest request will be. Its bytes are to be read next."""
        answer, _ = await self._receive(request, bulk.KvRows)
        return answer

    async def payload(self, rows: bulk.KvRows) -> AsyncGenerator[memoryview, None]:
        """Receive the bytes of an answer piece by piece, and check their digest at the end."""
        digest, left = hashlib.sha256(), rows.n_bytes
        while left:
            piece = await self.piece(rows.request, left)
            digest.update(piece)
            left -= len(piece)
            yield piece
        sent, _ = await self._receive(rows.request, bulk.KvSent)
        if sent.sha256 != digest.hexdigest():
            raise errors.RemoteProtocolError(
                f"{self.name} sent keys and values that changed on the way"
            )


_log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""Bytes per frame: few, so that encrypting them does not block the loop for long."""


BURST_S = 0.25
"""Unused rate of at most this time may be used later."""


TakeWheel = Callable[[Link, bulk.OfferWheel], Awaitable[None]]
"""Receives the wheel that is offered over a link, and answers."""


async def take_none(link: Link, offer: bulk.OfferWheel) -> None:
    """Take no wheel. Raises UsageError."""
    raise errors.UsageError("this node takes no wheels")


ReadRows = Callable[[int, int], Awaitable[memoryview]]


HeldKv = Callable[[bulk.FetchKv], Awaitable[tuple[bulk.KvRows, ReadRows]]]
"""Says what is here of keys and values, and what copies positions `[begin, end)` of it.

A state comes before them; the sequence goes on while they are read. Raises UsageError if it cannot
be given.
"""


@dataclass(eq=False, repr=False)
class BulkServer:
    """Answers the requests of bulk links, each link's in order, at `rate` over all weights.

    Disks are read by `disk`. `clock` returns seconds. `adapters` are those of this node, `kv` has
    what sequences own on it.
    """

    models: LocalModels
    disk: DiskJobs
    rate: SendRate
    clock: Callable[[], float]
    adapters: AdapterStore
    kv: HeldKv | None = None
    take_wheel: TakeWheel = take_none

    async def serve(self, link: Link) -> None:
        """Answer requests until the link ends; raises its LinkError then.

        Raises RemoteProtocolError, after an ERROR frame to the peer, if that breaks the protocol.
        """
        opened: dict[str, OpenModel] = {}
        try:
            while True:
                message = bulk.read_bulk(await link.receive())
                if not isinstance(message, bulk.BulkRequest):
                    raise errors.RemoteProtocolError(
                        f"{link.peer.name} ({link.peer_address}) sent {type(message).__name__} "
                        "without being asked"
                    )
                await self._answer(link, message, opened)
        except errors.RemoteProtocolError as error:
            if not link.closed:
                link.send(error_frame(error))
                await link.close()
            raise
        finally:
            for model in opened.values():
                self.disk.submit(model.checkpoint.folder, model.close)

    async def _answer(
        self, link: Link, message: bulk.BulkRequest, opened: dict[str, OpenModel]
    ) -> None:
        try:
            is_of_client = link.peer.role is PeerRole.CLIENT
            if is_of_client and not isinstance(message, bulk.OfferWheel):
                raise errors.UsageError("weights go from node to node only, not to clients")
            if isinstance(message, bulk.OfferWheel):
                await self.take_wheel(link, message)
                return
            if isinstance(message, bulk.FetchKv):
                await self._send_kv(link, message)
                return
            if isinstance(message, bulk.FetchAdapter):
                await self._send_adapter(link, message)
                return
            model = opened.get(message.model_id)
            if model is None:
                model = await self.disk.run(
                    f"model {message.model_id[:12]}", partial(self.models.open, message.model_id)
                )
                opened[message.model_id] = model
            await self._carry_out(link, message, model)
        except errors.LinkError:
            raise
        except errors.ShardnetError as error:
            _refuse(link, message, error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # our own bug, or a library's panic: the node must live
            what = type(message).__name__
            _log.error("%s of %s failed", what, link.peer.name, exc_info=error)
            _refuse(link, message, errors.internal_error(what, error))

    async def _carry_out(self, link: Link, message: bulk.WeightsRequest, model: OpenModel) -> None:
        disk = self.disk.at(model.checkpoint.folder)
        match message:
            case bulk.FetchSkeleton(request=request):
                heads = await disk.run(model.checkpoint.skeleton)
                files = [
                    bulk.SkeletonFile(
                        name=head.name,
                        size_bytes=head.size_bytes,
                        heads=[bulk.HeadRange(*r) for r in head.ranges],
                    )
                    for head in heads
                ]
                link.send(bulk.bulk_frame(bulk.Skeleton(request=request, files=files)))
            case bulk.FetchHead(request=request, file=file):
                heads = await disk.run(model.checkpoint.skeleton)
                ranges = {head.name: head.ranges for head in heads}
                if file not in ranges:
                    raise errors.CheckpointError(f"the model has no file {file!r}")
                for offset, n_bytes in ranges[file]:
                    await self._send(link, request, model, file, offset, n_bytes)
            case bulk.FetchPart(request=request, tensor=tensor, part=number):
                part = model.part(tensor, number)
                await self._send(link, request, model, part.file, part.offset, part.size_bytes)
            case bulk.FetchDigests(request=request, parts=parts):
                digests = [
                    await disk.run(partial(model.digest, name.tensor, name.part)) for name in parts
                ]
                link.send(bulk.bulk_frame(bulk.Digests(request=request, sha256=digests)))
            case bulk.FetchRows():
                await self._send_rows(link, message, model)

    async def _send_rows(self, link: Link, ask: bulk.FetchRows, model: OpenModel) -> None:
        """Send rows that a step waits for: at no rate."""
        if any(len(table.numbers) % 8 for table in ask.tables):
            raise errors.RemoteProtocolError("numbers of rows have 8 bytes each")
        numbers = [[n for (n,) in iter_unpack("<Q", table.numbers)] for table in ask.tables]
        if (n_rows := sum(map(len, numbers))) > bulk.MAX_ROWS:
            raise errors.UsageError(f"{n_rows} rows at a time, at most {bulk.MAX_ROWS} are given")
        found = [
            place
            for table, own in zip(ask.tables, numbers, strict=True)
            for place in model.rows(table.tensor, own)
        ]
        step = max(1, PIECE_BYTES // max((n_bytes for *_, n_bytes in found), default=1))
        for begin in range(0, len(found), step):
            read = partial(model.files.read_all, found[begin : begin + step])
            data = await self.disk.run(model.checkpoint.folder, read)
            await self._send_all(link, ask.request, data)

    async def _send_all(self, link: Link, request: int, data: Buffer) -> None:
        """Send bytes that somebody waits for, piece by piece."""
        for at in range(0, len(data), PIECE_BYTES):
            piece = bulk.Piece(request=request)
            link.send(bulk.bulk_frame(piece, data[at : at + PIECE_BYTES]))
            await link.drain()

    async def _send(
        self, link: Link, request: int, model: OpenModel, file: str, offset: int, n_bytes: int
    ) -> None:
        """Send `n_bytes` of a file from `offset`, piece by piece."""
        at = 0
        while at < n_bytes:
            size = min(self.rate.piece_bytes(PIECE_BYTES), n_bytes - at)
            data = await self.disk.run(
                model.checkpoint.folder, partial(model.files.read, file, offset + at, size)
            )
            await self._send_piece(link, request, data)
            at += size

    async def _send_adapter(self, link: Link, ask: bulk.FetchAdapter) -> None:
        """Send the file of one layer of an adapter, piece by piece."""
        disk = self.disk.at(self.adapters.folder)
        content = await disk.run(partial(self.adapters.read, ask.adapter_id, ask.layer))
        at = 0
        while at < len(content):
            size = self.rate.piece_bytes(PIECE_BYTES)
            await self._send_piece(link, ask.request, content[at : at + size])
            at += size

    async def _send_piece(self, link: Link, request: int, data: Buffer) -> None:
        wait_s = self.rate.reserve(len(data), self.clock())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        link.send(bulk.bulk_frame(bulk.Piece(request=request), data))
        await link.drain()

    async def _send_kv(self, link: Link, ask: bulk.FetchKv) -> None:
        """Send rows in parts of one block at most: computing goes on between them."""
        if self.kv is None:
            raise errors.UsageError("this node has no sequences")
        rows, read = await self.kv(ask)
        link.send(bulk.bulk_frame(rows))
        digest = hashlib.sha256()
        parts = [(rows.first, ask.end)] if rows.is_state else block_spans(rows.first, ask.end)
        for begin, end in parts:
            data = await read(begin, end)
            digest.update(data)
            await self._send_all(link, ask.request, data)
        link.send(bulk.bulk_frame(bulk.KvSent(request=ask.request, sha256=digest.hexdigest())))


def _refuse(link: Link, message: bulk.BulkRequest, error: errors.ShardnetError) -> None:
    text = explanation(error)
    link.send(bulk.bulk_frame(bulk.Refused(request=message.request, code=error.code, message=text)))


class SendRate:
    """A rate of `bytes_per_s`, None for no limit. All times are of one clock."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at: float | None = None

    def reserve(self, n_bytes: int, now: float) -> float:
        """Reserve `n_bytes` at the time `now` (s); return the seconds to wait before sending."""
        if self._bytes_per_s is None:
            return 0.0
        earliest = now - BURST_S
        start = earliest if self._free_at is None else max(self._free_at, earliest)
        self._free_at = start + n_bytes / self._bytes_per_s
        return max(0.0, self._free_at - now)

    def piece_bytes(self, largest: int) -> int:
        """Return the bytes to send at one time: `largest`, fewer at a low rate, for progress."""
        if self._bytes_per_s is None:
            return largest
        return max(1, min(largest, int(self._bytes_per_s / 4)))
