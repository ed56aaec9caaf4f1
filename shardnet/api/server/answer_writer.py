"""Writes one answer: at once, or piece by piece with comments while nothing comes.

Knows ASGI's messages. Must not know what is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.types import Send

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
        self.status = status
        every = [("content-type", media_type), *headers, *self._headers]
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
