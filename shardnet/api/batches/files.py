"""Files that programs send and fetch: the requests of batches, and their answers."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shardnet.api.client import Client
from shardnet.api.openai.kept import Kept
from shardnet.api.openai.paging import page_of
from shardnet.api.server.endpoint import Json, Reply, Text
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange

MAX_NAME: Final = 255


class SentFile(msgspec.Struct, kw_only=True):
    """A file as a field of a form."""

    filename: Annotated[str, Meta(max_length=MAX_NAME)]
    content: bytes


class FileForm(msgspec.Struct, kw_only=True):
    """The body that brings a file."""

    file: SentFile
    purpose: str


class FileObject(msgspec.Struct, kw_only=True):
    """What is said of a file; of its content only how large it is."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """The files of a key, the latest first."""

    object: str = "list"
    data: list[FileObject]
    has_more: bool = False


class FileDeleted(msgspec.Struct, kw_only=True):
    """Says that a file is gone."""

    id: str
    object: str = "file"
    deleted: bool = True


class Files:
    """The files that programs send, and those that batches write, in the cluster's memory."""

    def __init__(self) -> None:
        self._kept = Kept(what="file", prefix="file-")

    async def put(
        self, client: Client, owner: str, filename: str, purpose: str, content: bytes
    ) -> FileObject:
        """Keep a file for the key `owner`. Raises ShardnetError where no node does."""
        described = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            bytes=len(content),
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        await self._kept.put(client, owner, described.id, msgspec.json.encode(described), content)
        return described

    async def content_of(self, client: Client, owner: str, name: str) -> bytes:
        """Return what a file has. Raises HttpError 404."""
        return await self._kept.get(client, owner, name)

    async def upload(self, exchange: Exchange, body: FileForm) -> Reply:
        """Keep a file that was sent. Raises HttpError 400 for one that is not for a batch."""
        if body.purpose != "batch":
            raise refused("purpose: files are for batches: give 'batch'", "purpose")
        client, sent = exchange.service.client, body.file
        file = await self.put(client, exchange.owner, sent.filename, body.purpose, sent.content)
        return Json(value=file)

    async def list(self, exchange: Exchange, body: None) -> Reply:
        """List the files of the request's key."""
        kept = await self._kept.listed(exchange.service.client, exchange.owner)
        files = [msgspec.json.decode(one.description, type=FileObject) for one in kept]
        files.sort(key=lambda file: (-file.created_at, file.id))
        data, has_more = page_of(files, exchange.query)
        return Json(value=FileList(data=data, has_more=has_more))

    async def show(self, exchange: Exchange, body: None) -> Reply:
        """Describe a file. Raises HttpError 404."""
        client, name = exchange.service.client, exchange.path_parameters["file_id"]
        described = await self._kept.describe(client, exchange.owner, name)
        return Text(text=described, media_type="application/json")

    async def fetch(self, exchange: Exchange, body: None) -> Reply:
        """Return what a file has. Raises HttpError 404."""
        client, name = exchange.service.client, exchange.path_parameters["file_id"]
        content = await self.content_of(client, exchange.owner, name)
        return Text(text=content, media_type="application/jsonl")

    async def delete(self, exchange: Exchange, body: None) -> Reply:
        """Keep a file no longer. Raises HttpError 404."""
        name = exchange.path_parameters["file_id"]
        await self._kept.drop(exchange.service.client, exchange.owner, name)
        return Json(value=FileDeleted(id=name))
