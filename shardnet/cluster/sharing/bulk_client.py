"""Request a model, or keys and values, over one bulk link.

Knows requests and their answers, and that every wait has a deadline. Must not know other sources,
nor where the bytes are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from typing import TypeVar

from msgspec.structs import replace

from shardnet.checkpoint.adapters.layer_files import LayerPart
from shardnet.checkpoint.replica import TensorPart
from shardnet.checkpoint.tensors.stored_tensor import FileHead
from shardnet.errors import PeerSilentError, RemoteProtocolError
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link
from shardnet.wire.messages.bulk import (
    BulkMessage,
    BulkRequest,
    Digests,
    FetchAdapter,
    FetchDigests,
    FetchHead,
    FetchKv,
    FetchPart,
    FetchSkeleton,
    KvRows,
    KvSent,
    PartName,
    Piece,
    Refused,
    Skeleton,
    bulk_frame,
    read_bulk,
)

ANSWER_S = 20.0
"""Timeout while a source sends nothing of an answer."""

Answer = TypeVar("Answer", bound=BulkMessage)


class SourceRefused(Exception):
    """The source answered that it does not send the requested data; the message says why."""


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
        _, payload = await self._receive(request, Piece)
        if not 0 < len(payload) <= left:
            raise RemoteProtocolError(
                f"{self.name} sent a piece of {len(payload)} bytes where {left} were to come"
            )
        return payload

    def _send(self, message: BulkRequest) -> None:
        self.link.send(bulk_frame(message))

    async def _receive(self, request: int, expected: type[Answer]) -> tuple[Answer, memoryview]:
        try:
            async with deadline(self._answer_s):
                frame = await self.link.receive()
        except TimeoutError:
            raise PeerSilentError(
                f"{self.name} gave nothing of what it was asked for within {self._answer_s:g} s"
            ) from None
        message = read_bulk(frame)
        if message.request == request and isinstance(message, Refused):
            raise SourceRefused(f"{self.name}: {message.message}")
        if message.request != request or not isinstance(message, expected):
            raise RemoteProtocolError(
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
        message = FetchSkeleton(request=next(self._numbers), model_id=self._model_id)
        self._send(message)
        answer, _ = await self._receive(message.request, Skeleton)
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
        message = FetchHead(request=next(self._numbers), model_id=self._model_id, file=head.name)
        self._send(message)
        for offset, n_bytes in head.ranges:
            at = 0
            while at < n_bytes:
                piece = await self.piece(message.request, n_bytes - at)
                yield offset + at, piece
                at += len(piece)

    async def digests(self, parts: Sequence[TensorPart]) -> list[str | None]:
        """Request the SHA-256 (hex) of at most MAX_DIGESTS parts; None for parts it lacks."""
        message = FetchDigests(
            request=next(self._numbers),
            model_id=self._model_id,
            parts=[PartName(part.tensor, part.number) for part in parts],
        )
        self._send(message)
        answer, _ = await self._receive(message.request, Digests)
        if len(answer.sha256) != len(parts):
            raise RemoteProtocolError(
                f"{self.name} sent {len(answer.sha256)} digests of {len(parts)} parts"
            )
        return answer.sha256

    def ask_part(self, part: TensorPart) -> int:
        """Request a part; return the number of the request, for `piece`."""
        message = FetchPart(
            request=next(self._numbers),
            model_id=self._model_id,
            tensor=part.tensor,
            part=part.number,
        )
        self._send(message)
        return message.request


class AdapterClient(BulkAsker):
    """Requests parts of LoRA adapters on one link."""

    async def part(self, adapter_id: str, part: LayerPart) -> bytes:
        """Request the file of one layer, whose digest the caller checks."""
        message = FetchAdapter(request=next(self._numbers), adapter_id=adapter_id, layer=part.layer)
        self._send(message)
        content = bytearray()
        while len(content) < part.size_bytes:
            content += await self.piece(message.request, part.size_bytes - len(content))
        return bytes(content)


class KvClient(BulkAsker):
    """Requests what stages of one ring hold of sequences."""

    def ask(self, message: FetchKv) -> int:
        """Send a request, which is numbered here; return its number, for `rows`."""
        message = replace(message, request=next(self._numbers))
        self._send(message)
        return message.request

    async def rows(self, request: int) -> KvRows:
        """Receive what the answer to the oldest request will be. Its bytes are to be read next."""
        answer, _ = await self._receive(request, KvRows)
        return answer

    async def payload(self, rows: KvRows) -> AsyncGenerator[memoryview, None]:
        """Receive the bytes of an answer piece by piece, and check their digest at the end."""
        digest, left = hashlib.sha256(), rows.n_bytes
        while left:
            piece = await self.piece(rows.request, left)
            digest.update(piece)
            left -= len(piece)
            yield piece
        sent, _ = await self._receive(rows.request, KvSent)
        if sent.sha256 != digest.hexdigest():
            raise RemoteProtocolError(f"{self.name} sent keys and values that changed on the way")
