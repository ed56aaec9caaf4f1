"""Files that programs send and fetch: the requests of batches, and their answers."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shardnet.api.openai.kept import Kept
from shardnet.api.openai.paging import page_of
from shardnet.api.server.endpoint import Json, Reply, Text
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange

MOST_FILES: Final = 1024
MOST_BYTES: Final = 256 << 20
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    described: FileObject
    content: bytes


class Files:
    """The files of one server, in its memory."""

    def __init__(self) -> None:
        self._kept = Kept[_File]("file", most=MOST_FILES, most_bytes=MOST_BYTES)

    def put(self, owner: str, filename: str, purpose: str, content: bytes) -> FileObject:
        """Keep a file for the key `owner`."""
        described = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            bytes=len(content),
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        self._kept.put(
            owner, described.id, _File(described=described, content=content), len(content)
        )
        return described

    def content_of(self, owner: str, name: str) -> bytes:
        """Return what a file has. Raises HttpError 404."""
        return self._kept.get(owner, name).content

    async def upload(self, exchange: Exchange, body: FileForm) -> Reply:
        """Keep a file that was sent. Raises HttpError 400 for one that is not for a batch."""
        if body.purpose != "batch":
            raise refused("purpose: files are for batches: give 'batch'", "purpose")
        sent = body.file
        return Json(value=self.put(exchange.owner, sent.filename, body.purpose, sent.content))

    async def list(self, exchange: Exchange, body: None) -> Reply:
        """List the files of the request's key."""
        files = [file.described for file in self._kept.of(exchange.owner)]
        files.sort(key=lambda file: (-file.created_at, file.id))
        data, has_more = page_of(files, exchange.query)
        return Json(value=FileList(data=data, has_more=has_more))

    async def show(self, exchange: Exchange, body: None) -> Reply:
        """Describe a file. Raises HttpError 404."""
        return Json(value=self._kept.get(exchange.owner, _named(exchange)).described)

    async def fetch(self, exchange: Exchange, body: None) -> Reply:
        """Return what a file has. Raises HttpError 404."""
        content = self.content_of(exchange.owner, _named(exchange))
        return Text(text=content, media_type="application/jsonl")

    async def delete(self, exchange: Exchange, body: None) -> Reply:
        """Keep a file no longer. Raises HttpError 404."""
        name = _named(exchange)
        self._kept.get(exchange.owner, name)
        self._kept.drop(exchange.owner, name)
        return Json(value=FileDeleted(id=name))


def _named(exchange: Exchange) -> str:
    return exchange.path_parameters["file_id"]
