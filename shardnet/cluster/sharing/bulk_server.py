"""Serve bulk links: file heads, parts of tensors, their digests, and what a stage has of sequences.

Knows the requests and the rate of answers. A peer can read the models of this machine and nothing
else: tensors and files go by the model's own names. Must not know what they are needed for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import LocalModels, OpenModel
from shardnet.errors import (
    CheckpointError,
    LinkError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
    internal_error,
)
from shardnet.transport.link import Link
from shardnet.types import block_spans
from shardnet.wire.framing.frames import Buffer
from shardnet.wire.messages.bulk import (
    BulkRequest,
    Digests,
    FetchAdapter,
    FetchDigests,
    FetchHead,
    FetchKv,
    FetchPart,
    FetchSkeleton,
    HeadRange,
    KvRows,
    KvSent,
    Piece,
    Refused,
    Skeleton,
    SkeletonFile,
    WeightsRequest,
    bulk_frame,
    read_bulk,
)
from shardnet.wire.messages.handshake import error_frame, explanation

_log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""Bytes per frame: few, so that encrypting them does not block the loop for long."""


BURST_S = 0.25
"""Unused rate of at most this time may be used later."""


class KvHolder(Protocol):
    """Has the keys and values of sequences, which change while they are read."""

    async def held(self, ask: FetchKv) -> KvRows:
        """Say what is here of what is asked for. Raises UsageError if it cannot be given."""

    async def read(self, ask: FetchKv, begin: int, end: int) -> memoryview:
        """Copy positions `[begin, end)`, or the whole state. Raises UsageError likewise."""


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
    kv: KvHolder | None = None

    async def serve(self, link: Link) -> None:
        """Answer requests until the link ends; raises its LinkError then.

        Raises RemoteProtocolError, after an ERROR frame to the peer, if that breaks the protocol.
        """
        opened: dict[str, OpenModel] = {}
        try:
            while True:
                message = read_bulk(await link.receive())
                if not isinstance(message, BulkRequest):
                    raise RemoteProtocolError(
                        f"{link.peer.name} ({link.peer_address}) sent {type(message).__name__} "
                        "without being asked"
                    )
                await self._answer(link, message, opened)
        except RemoteProtocolError as error:
            if not link.closed:
                link.send(error_frame(error))
                await link.close()
            raise
        finally:
            for model in opened.values():
                self.disk.submit(model.checkpoint.folder, model.close)

    async def _answer(self, link: Link, message: BulkRequest, opened: dict[str, OpenModel]) -> None:
        try:
            if isinstance(message, FetchKv):
                await self._send_kv(link, message)
                return
            if isinstance(message, FetchAdapter):
                await self._send_adapter(link, message)
                return
            model = opened.get(message.model_id)
            if model is None:
                model = await self.disk.run(
                    f"model {message.model_id[:12]}", partial(self.models.open, message.model_id)
                )
                opened[message.model_id] = model
            await self._carry_out(link, message, model)
        except LinkError:
            raise
        except ShardnetError as error:
            _refuse(link, message, error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # our own bug, or a library's panic: the node must live
            what = type(message).__name__
            _log.error("%s of %s failed", what, link.peer.name, exc_info=error)
            _refuse(link, message, internal_error(what, error))

    async def _carry_out(self, link: Link, message: WeightsRequest, model: OpenModel) -> None:
        disk = self.disk.at(model.checkpoint.folder)
        match message:
            case FetchSkeleton(request=request):
                heads = await disk.run(model.checkpoint.skeleton)
                files = [
                    SkeletonFile(
                        name=head.name,
                        size_bytes=head.size_bytes,
                        heads=[HeadRange(*r) for r in head.ranges],
                    )
                    for head in heads
                ]
                link.send(bulk_frame(Skeleton(request=request, files=files)))
            case FetchHead(request=request, file=file):
                heads = await disk.run(model.checkpoint.skeleton)
                ranges = {head.name: head.ranges for head in heads}
                if file not in ranges:
                    raise CheckpointError(f"the model has no file {file!r}")
                for offset, n_bytes in ranges[file]:
                    await self._send(link, request, model, file, offset, n_bytes)
            case FetchPart(request=request, tensor=tensor, part=number):
                part = model.part(tensor, number)
                await self._send(link, request, model, part.file, part.offset, part.size_bytes)
            case FetchDigests(request=request, parts=parts):
                digests = [
                    await disk.run(partial(model.digest, name.tensor, name.part)) for name in parts
                ]
                link.send(bulk_frame(Digests(request=request, sha256=digests)))

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

    async def _send_adapter(self, link: Link, ask: FetchAdapter) -> None:
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
        link.send(bulk_frame(Piece(request=request), data))
        await link.drain()

    async def _send_kv(self, link: Link, ask: FetchKv) -> None:
        """Send rows in parts of one block at most: computing goes on between them."""
        if self.kv is None:
            raise UsageError("this node has no sequences")
        rows = await self.kv.held(ask)
        link.send(bulk_frame(rows))
        digest = hashlib.sha256()
        parts = [(0, ask.end)] if rows.is_state else block_spans(rows.first, ask.end)
        for begin, end in parts:
            data = await self.kv.read(ask, begin, end)
            digest.update(data)
            for at in range(0, len(data), PIECE_BYTES):
                link.send(bulk_frame(Piece(request=ask.request), data[at : at + PIECE_BYTES]))
                await link.drain()
        link.send(bulk_frame(KvSent(request=ask.request, sha256=digest.hexdigest())))


def _refuse(link: Link, message: BulkRequest, error: ShardnetError) -> None:
    text = explanation(error)
    link.send(bulk_frame(Refused(request=message.request, code=error.code, message=text)))


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
