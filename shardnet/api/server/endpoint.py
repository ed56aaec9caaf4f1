"""What an endpoint is, what its handler gets, and what it may return.

Knows no dialect: each lists its endpoints, and how it writes errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from shardnet.api.server.answer_writer import Headers
from shardnet.api.server.errors import Fault
from shardnet.api.server.service import Exchange

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
        body: type[Body] | None = None,
        answer: Any = None,
        **further: Any,
    ) -> Endpoint[Body]:
        """Make an endpoint of a `route`, a method and a path; for the rest see there."""
        method, path = route.split(" ")
        return Endpoint(
            method=method,
            path=path,
            summary=summary,
            handle=handle,
            dialect=self,
            body=body,
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
