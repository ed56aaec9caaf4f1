"""A client of an ASGI application in the same event loop, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(slots=True, kw_only=True)
class Exchanged:
    """A request that goes on, and what has come of it. `leave` is the client going away."""

    body: bytes
    messages: list[Message] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _is_read: bool = False

    @property
    def status(self) -> int:
        """The status, 0 before it came."""
        return int(self.messages[0]["status"]) if self.messages else 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers by lower-case name."""
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def content(self) -> bytes:
        """All of the body so far."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, JSON but for [DONE]."""
        lines = self.content.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    def leave(self) -> None:
        """Go away."""
        self.left.set()

    async def until_said(self, part: bytes) -> None:
        """Wait until the body has `part`."""
        async with self.changed:
            await self.changed.wait_for(lambda: part in self.content)

    async def until_lines(self, n_lines: int) -> None:
        """Wait until the body has so many lines."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.content.count(b"\n") >= n_lines)

    async def receive(self) -> Message:
        """Give the application the body, then nothing until the client leaves."""
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take what the application sends."""
        async with self.changed:
            self.messages.append(message)
            self.changed.notify_all()


@asynccontextmanager
async def asking(
    app: ASGIApp,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Exchanged]:
    """Send a request; at the end of the context its handling must have ended."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    exchanged = Exchanged(body=raw)
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(n.lower().encode(), v.encode()) for n, v in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    handling = asyncio.create_task(app(scope, exchanged.receive, exchanged.send))
    try:
        yield exchanged
    finally:
        exchanged.leave()
        await handling


async def ask(app: ASGIApp, path: str, body: Any = None, **how: Any) -> Exchanged:
    """Send a request and wait for the whole answer."""
    async with asking(app, path, body, **how) as exchanged:
        async with exchanged.changed:
            await exchanged.changed.wait_for(
                lambda: (
                    bool(exchanged.messages) and exchanged.messages[-1].get("more_body") is False
                )
            )
        return exchanged
