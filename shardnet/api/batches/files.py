"""Files that programs send and fetch: a line for each request of a batch, or for its answer."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.api.client import Client
from shardnet.api.openai.endpoints import Kept
from shardnet.api.openai.faults import page_of
from shardnet.api.server.bodies import decode_body
from shardnet.api.server.endpoint import Endpoint, Json, Reply, Text
from shardnet.api.server.errors import Fault, HttpError, fault_of, refused
from shardnet.api.server.keys import ApiKey
from shardnet.api.server.service import Exchange, Service
from shardnet.errors import ShardnetError, where

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


_log = logging.getLogger(__name__)

MAX_LINES: Final = 50_000
"""OpenAI's number."""
LOWEST: Final = -100
"""The priority of these requests: any other one goes first."""
LOOK_S: Final = 1.0
"""How often a line that waits looks whether its batch was cancelled."""
TRIES: Final = 3
"""How often a request is sent that a busy or broken ring turns away."""


class Line(msgspec.Struct, kw_only=True):
    """One request; `url` is the path of its endpoint. Its `body` stays JSON until it is sent."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, kw_only=True):
    """The answer to a line, as it would have come alone."""

    status_code: int
    request_id: str
    body: Any


class LineError(msgspec.Struct, kw_only=True):
    """Why a line was not sent."""

    code: str
    message: str


class LineAnswer(msgspec.Struct, kw_only=True):
    """What became of a line."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_right(self) -> bool:
        """Whether it has the answer that was asked for."""
        return self.response is not None and self.response.status_code == 200


class WrongLineError(Exception):
    """Line `number` of a file is no request of a batch: `fault` says why."""

    def __init__(self, number: int, fault: Fault) -> None:
        super().__init__(fault.message)
        self.number = number
        self.fault = fault


def read_lines(content: bytes, path: str) -> list[Line]:
    """Read the requests to the endpoint at `path`. Raises WrongLineError."""
    lines: list[Line] = []
    known: set[str] = set()
    for number, raw in enumerate(content.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = decode_body(raw, Line)
            if line.url != path:
                raise refused(f"url is to be that of the batch, {path}", "url")
            if not bytes(line.body).startswith(b"{"):
                raise refused("body is to be an object", "body")
            if line.custom_id in known:
                raise refused("custom_id is that of another line, too", "custom_id")
            if len(lines) >= MAX_LINES:
                raise refused(f"a batch has at most {MAX_LINES} lines")
        except HttpError as error:
            raise WrongLineError(number, error.fault) from error
        known.add(line.custom_id)
        lines.append(line)
    if not lines:
        raise WrongLineError(1, refused("the file has no lines").fault)
    return lines


def skipped(line: Line, end: str) -> LineAnswer:
    """Say of a line that it was not sent, since its batch was cancelled, expired or has failed."""
    error = LineError(code=f"batch_{end}", message=f"the batch was {end} before this line")
    return LineAnswer(id=_new_id(), custom_id=line.custom_id, error=error)


async def answered(
    service: Service,
    key: ApiKey | None,
    endpoint: Endpoint[Any],
    line: Line,
    goes_on: Callable[[], bool],
    places: asyncio.Semaphore,
) -> LineAnswer | None:
    """Send a line's request in one of the `places`, and return what came of it.

    It is sent again while the ring is busy or broken, TRIES times at most, if its batch `goes_on`.
    None if that has ended before it was sent.
    """
    response = None
    for n_left in reversed(range(TRIES)):
        await _until_paid(service, key, goes_on)
        async with places:
            if not goes_on():
                break
            exchange = Exchange(
                service=service,
                request_id=uuid.uuid4().hex,
                path_parameters={},
                key=key,
                hears=True,
            )
            response, retry_s = await _asked(exchange, endpoint, line)
        if retry_s is None or not n_left:
            break
        await asyncio.sleep(retry_s)
    if response is None:
        return None
    return LineAnswer(id=_new_id(), custom_id=line.custom_id, response=response)


async def _until_paid(service: Service, key: ApiKey | None, goes_on: Callable[[], bool]) -> None:
    """Wait until a key may have tokens, or a batch ends."""
    while key is not None and goes_on():
        wait_s = service.settings.keys.wait_s(key, time.monotonic())
        if not wait_s:
            return
        await asyncio.sleep(min(wait_s, LOOK_S))


async def _asked(
    exchange: Exchange, endpoint: Endpoint[Any], line: Line
) -> tuple[LineResponse, int | None]:
    """Send a request; return its answer, and in how many seconds another one may do better."""
    status, retry_s = 200, None
    try:
        asked = decode_body(bytes(line.body), dict[str, Any])
        asked |= {"stream": False, "priority": LOWEST}
        body = decode_body(msgspec.json.encode(asked), endpoint.body or dict)
        reply = await endpoint.handle(exchange, body)
        assert isinstance(reply, Json)
        value: Any = msgspec.Raw(msgspec.json.encode(reply.value))
    except Exception as error:
        if not isinstance(error, ShardnetError | HttpError):
            _log.error("%s failed in a batch: %r in %s", endpoint.path, error, where(error))
        fault = fault_of(error)
        fault = replace(fault, message=exchange.service.models.shown(fault.message))
        status, retry_s, value = fault.status, fault.retry_s, endpoint.dialect.fault(fault)
    finally:
        exchange.leave()
        exchange.pay()
    response = LineResponse(status_code=status, request_id=exchange.request_id, body=value)
    return response, retry_s


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
