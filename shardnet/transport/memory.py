"""Links within one process, over a pair of byte queues in place of sockets.

Imitates an asyncio transport: flow control, half-close and reset. For tests, and for rings whose
stages share a process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from shardnet.transport.asyncio_link import AsyncioLink
from shardnet.transport.link import Link, LinkOptions
from shardnet.wire.connection.connection import HelloAnswer
from shardnet.wire.framing.frames import KIB, Buffer
from shardnet.wire.messages.handshake import Hello

MEMORY_HOSTS: Final = ("memory-a", "memory-b")
"""Host names in the addresses of both ends. No link from outside this process has them."""
_DEFAULT_BUFFER_BYTES: Final = 64 * KIB


async def memory_pair(
    hello_a: Hello, hello_b: Hello | HelloAnswer, *, options: LinkOptions | None = None
) -> tuple[Link, Link]:
    """Connect a link and return both of its ends; the first is the initiator's.

    `socket_buffer_bytes` bounds the undelivered bytes of each end. Raises as `tcp.connect` does
    when the hellos do not agree.
    """
    options = options or LinkOptions()
    a = AsyncioLink(hello_a, initiator=True, options=options)
    b = AsyncioLink(hello_b, initiator=False, options=options)
    join(a, b, buffer_bytes=options.socket_buffer_bytes)
    await a.wait_up()
    await b.wait_up()
    return a, b


def join(
    a: asyncio.BufferedProtocol, b: asyncio.BufferedProtocol, *, buffer_bytes: int | None = None
) -> None:
    """Connect two protocols by a pair of memory transports.

    A protocol with more than `buffer_bytes` undelivered bytes is told to pause writing.
    """
    high_water = _DEFAULT_BUFFER_BYTES if buffer_bytes is None else buffer_bytes
    host_a, host_b = MEMORY_HOSTS
    end_a = _MemoryTransport(a, host_b, high_water)
    end_b = _MemoryTransport(b, host_a, high_water)
    end_a.other, end_b.other = end_b, end_a
    a.connection_made(end_a)
    b.connection_made(end_b)


class _MemoryTransport(asyncio.Transport):
    """One end of the pair.

    Keeps written bytes until they are copied into the other protocol's buffer, one buffer in each
    iteration of the event loop.
    """

    other: _MemoryTransport

    def __init__(self, protocol: asyncio.BufferedProtocol, peer: str, high_water: int) -> None:
        super().__init__(extra={"peername": (peer, 0)})
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._high_water = high_water
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._reading = True
        self._writing_paused = False
        self._eof_written = False
        self._eof_delivered = False
        self._closing = False
        self._lost = False

    # --- asyncio.Transport

    def write(self, data: Buffer) -> None:
        """Queue bytes; they are not copied before they are delivered."""
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Queue several buffers."""
        if self._closing:
            return
        for data in list_of_data:
            self._unsent.append(view := memoryview(data))
            self._unsent_bytes += view.nbytes
        if self._unsent_bytes > self._high_water and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()
        self._loop.call_soon(self._deliver)

    def write_eof(self) -> None:
        """Close the writing side once everything queued is delivered."""
        self._eof_written = True
        self._loop.call_soon(self._deliver)

    def can_write_eof(self) -> bool:
        """Return True: half-close works."""
        return True

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes not delivered yet."""
        return self._unsent_bytes

    def pause_reading(self) -> None:
        """Stop delivering the other end's bytes."""
        self._reading = False

    def resume_reading(self) -> None:
        """Deliver the other end's bytes again."""
        self._reading = True
        self._loop.call_soon(self.other._deliver)

    def is_closing(self) -> bool:
        """Return whether `close` or `abort` was called or the other end is gone."""
        return self._closing

    def close(self) -> None:
        """Deliver what is queued, then close; the other end receives end-of-file."""
        self._closing = self._eof_written = True
        self._loop.call_soon(self._deliver)

    def abort(self) -> None:
        """Close at once; the other end's connection is reset."""
        self._loop.call_soon(self._lose, None)
        self._loop.call_soon(self.other._lose, ConnectionResetError("reset in memory"))
        self._closing = self.other._closing = True

    # --- delivery

    def _deliver(self) -> None:
        """Copy what fits into one buffer of the other protocol, and schedule the rest."""
        if self._lost:
            return
        if self._unsent and (self.other._closing or self.other._lost):
            self._forget_unsent()
        if self._unsent and self.other._reading:
            self._copy_once()
            self._loop.call_soon(self._deliver)
        if self._unsent:
            return
        if self._eof_written and not self._eof_delivered and self.other._reading:
            self._eof_delivered = True
            if not self.other._closing and not self.other._protocol.eof_received():
                self.other.close()
        if self._closing and self._eof_delivered:
            self._lose(None)

    def _copy_once(self) -> None:
        target = memoryview(self.other._protocol.get_buffer(-1))
        data = self._unsent.popleft()
        n = min(len(target), len(data))
        target[:n] = data[:n]
        if n < len(data):
            self._unsent.appendleft(data[n:])
        self._unsent_bytes -= n
        self.other._protocol.buffer_updated(n)
        if self._writing_paused and self._unsent_bytes <= self._high_water // 4:
            self._writing_paused = False
            self._protocol.resume_writing()

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._forget_unsent()
        self._protocol.connection_lost(error)
