"""Responses that are made while nobody waits: their events, read from any number on, and their end.

Knows how events are kept. Must not know what they say, nor where responses are kept.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shardnet.api.responses.answers import Response
from shardnet.api.server.service import Exchange

BEAT_S: Final = 1.0
"""How often the cluster is told that a response is being made, and a key's place looked for."""


class EventLog:
    """The events of a stream, each whole, in their order; `packed` are those of one that ended."""

    def __init__(self, packed: bytes = b"") -> None:
        self.events: list[bytes] = []
        if packed:
            self.events = msgspec.msgpack.decode(zlib.decompress(packed), type=list[bytes])
        self._is_over = bool(packed)
        self._changed = asyncio.Event()

    def packed(self, more: Sequence[bytes] = ()) -> bytes:
        """Return all of them, and `more`, compressed."""
        return zlib.compress(msgspec.msgpack.encode([*self.events, *more]))

    def add(self, *events: bytes, is_last: bool = False) -> None:
        """Add the next events."""
        self.events += events
        self._is_over |= is_last
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the events behind number `number`, counted from 0, as they come."""
        at = number + 1
        while True:
            changed = self._changed
            if missing := self.events[at:]:
                at += len(missing)
                yield b"".join(missing)
            elif self._is_over:
                return
            else:
                await changed.wait()


@dataclass(slots=True, kw_only=True)
class Background:
    """A response that this server makes, and what it does for that."""

    response: Response
    log: EventLog = field(default_factory=EventLog)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_cancelled: bool = False

    async def cancel(self) -> None:
        """Make no more of it, and wait until that is known everywhere."""
        self.is_cancelled = True
        for task in self.tasks:
            task.cancel()
        await self.ended.wait()


@asynccontextmanager
async def place_of(exchange: Exchange) -> AsyncIterator[None]:
    """Wait until a key may have one more request."""
    while True:
        with exchange.service.settings.keys.place(exchange.key) as has_place:
            if has_place:
                yield
                return
        await asyncio.sleep(BEAT_S)
