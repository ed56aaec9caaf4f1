"""What an endpoint is, what its handler gets and may return, and how the answer is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, get_type_hints

import msgspec
from starlette.types import Send

from shardnet.api.server.errors import Fault
from shardnet.api.server.service import Exchange

Headers = Sequence[tuple[str, str]]


class Rest:
    """Leaves out the first `n` events of a stream, and the comments among them."""

    def __init__(self, n: int, media_type: str) -> None:
        self._n_left = n
        self._end = b"\n\n" if media_type.startswith("text/event-stream") else b"\n"

    def of(self, chunk: bytes) -> bytes:
        """Return what is left of the next chunk, which holds whole events."""
        while self._n_left and chunk:
            event, _, chunk = chunk.partition(self._end)
            self._n_left -= not event.startswith(b":")
        return chunk


class AnswerWriter:
    """Sends an answer with ASGI's `send`; `headers` go with every one."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._media_type = ""
        self._wrote_at_s = 0.0
        self.status = 0
        """The status that was sent, 0 before."""

    async def whole(self, status: int, media_type: str, body: bytes, headers: Headers = ()) -> None:
        """Send a whole answer."""
        length = ("content-length", str(len(body)))
        await self._start(status, media_type, [*headers, length])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def begin(self, media_type: str) -> None:
        """Prepare a stream: its headers go out with its first piece."""
        self._media_type = media_type

    async def piece(self, data: bytes) -> None:
        """Send more of a stream."""
        async with self._lock:
            await self._start_stream()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._wrote_at_s = time.monotonic()

    async def end(self) -> None:
        """End a stream, of which there may be nothing: its client may have had all of it."""
        async with self._lock:
            await self._start_stream()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(
        self, heartbeat: Callable[[], bytes] | None, first_s: float, every_s: float
    ) -> None:
        """Send headers after `first_s`, and `heartbeat` when nothing came for `every_s` seconds.

        To be cancelled at the end of the stream.
        """
        await asyncio.sleep(first_s)
        while True:
            left_s = self._wrote_at_s + every_s - time.monotonic()
            if self.status and left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.piece(heartbeat() if heartbeat is not None else b"")

    async def _start_stream(self) -> None:
        if not self.status:
            # A proxy that collects an answer before passing it on would undo the stream.
            headers = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
            await self._start(200, self._media_type, headers)

    async def _start(self, status: int, media_type: str, headers: Headers) -> None:
        every = [("content-type", media_type), *headers, *self._headers]
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


Body = TypeVar("Body")

EVENTS: Final = "text/event-stream"
JSON: Final = "application/json"
FORM: Final = "multipart/form-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Json:
    """An answer that is one JSON value, a struct or whatever msgspec writes."""

    value: object
    status: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """An answer of another type."""

    text: str | bytes
    media_type: str
    status: int = 200
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An answer that is sent while it is made.

    The first of the `chunks` is to come when the ring has accepted the request, errors before it
    have a status of their own. `heartbeat` is sent when nothing comes for long, None for nothing.
    """

    chunks: AsyncGenerator[bytes, None]
    media_type: str = f"{EVENTS}; charset=utf-8"
    heartbeat: Callable[[], bytes] | None = None


Reply = Json | Text | Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a family of endpoints writes a fault: as an answer, and inside a stream.

    Answers have the id of the request in each of the `id_headers`. `paths` are where its programs
    look for what there is not, too: faults of other paths below them are written in this form.
    """

    name: str
    fault: Callable[[Fault], object]
    fault_in_stream: Callable[[Fault], bytes]
    fault_type: type[msgspec.Struct]
    id_headers: tuple[str, ...] = ("x-request-id",)
    paths: tuple[str, ...] = ()

    def at(
        self,
        route: str,
        summary: str,
        handle: Callable[[Exchange, Body], Awaitable[Reply]],
        answer: Any = None,
        **further: Any,
    ) -> Endpoint[Body]:
        """Make an endpoint of a `route`, a method and a path; for the rest see there.

        The type of its body is that of the handler's parameter `body`.
        """
        method, path = route.split(" ")
        body = get_type_hints(handle)["body"]
        return Endpoint(
            method=method,
            path=path,
            summary=summary,
            handle=handle,
            dialect=self,
            body=None if body is type(None) else body,
            answer=answer,
            **further,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[Body]):
    """One method of one path.

    `body` is the struct that the body is decoded to, of JSON or of a form as `body_type` says, None
    without one. `answer` and `chunk` are
    what the OpenAPI document says of the answer, and of the events of a stream, `chunk_type` that
    one's media type. Without `is_open` a
    key is asked for; with `counts` it is a request in the sense of a key's limit.
    """

    method: str
    path: str
    summary: str
    handle: Callable[[Exchange, Body], Awaitable[Reply]]
    dialect: Dialect
    body: type[Body] | None = None
    body_type: str = JSON
    answer: Any = None
    chunk: Any = None
    chunk_type: str = EVENTS
    is_open: bool = False
    counts: bool = False


def event(value: object) -> bytes:
    """Write an event of a stream whose data is JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """Write an event of a stream that has a name."""
    return b"event: " + name.encode() + b"\n" + event(value)


def comment(text: str) -> bytes:
    """Write a line of a stream that programs pass over."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"
