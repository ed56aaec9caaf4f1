"""One face for every transport, and a raw peer that says what it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, cast

import uvloop
from msgspec.structs import replace

from shardnet.errors import ShardnetError
from shardnet.transport.asyncio_link import AsyncioLink
from shardnet.transport.identity import Identity, make_identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.listener import Listener
from shardnet.transport.memory import join, memory_pair
from shardnet.transport.tcp import connect, listen
from shardnet.transport.tls import TlsTransport
from shardnet.wire.framing.frames import (
    CHECKSUMS,
    HEADER,
    LIMITS,
    PREAMBLE,
    Frame,
    FrameKind,
    pack_frame,
    unpack_header,
)
from shardnet.wire.messages.handshake import (
    OF_RINGS,
    ErrorReport,
    Hello,
    PeerRole,
    Purpose,
    hello_frame,
    read_error,
)

OPTIONS = LinkOptions(handshake_s=20, silence_s=60, client_silence_s=60, close_s=20)
"""Generous, so that a slow machine fails no test; tests that wait for an end shorten theirs."""

SMALL_BUFFERS = changed(OPTIONS, receive_frames=1, socket_buffer_bytes=4096)


def hello(node: str = "a", purpose: Purpose = Purpose.DATA) -> Hello:
    ring = {"ring": "r1", "epoch": 3} if purpose in OF_RINGS else {}
    return Hello(purpose=purpose, role=PeerRole.NODE, node=node, name=node, version="0", **ring)


def raw(frame: Frame) -> bytes:
    return b"".join(pack_frame(frame, LIMITS))


class RawPeer(asyncio.BufferedProtocol):
    """The initiator's end of a connection, without a link: it sends bytes and notes bytes.

    On a `checked` one frames have checksums.
    """

    transport: asyncio.Transport

    def __init__(self, *, checked: bool = False) -> None:
        self.checked = checked
        self.received = bytearray()
        self.lost = asyncio.Event()
        self.error: Exception | None = None
        self._scratch = bytearray(65536)
        self._more = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._scratch[:nbytes]
        self._more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = self.error or exc
        self.lost.set()
        self._more.set()

    def failed(self, error: ShardnetError) -> None:
        self.error = error
        self.transport.abort()

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def packed(self, frame: Frame) -> bytes:
        """The bytes of a frame on a link that is up."""
        return b"".join(pack_frame(frame, LIMITS, checked=self.checked))

    @property
    def head_bytes(self) -> int:
        """The size of a header on a link that is up."""
        return HEADER.size + CHECKSUMS.size * self.checked

    async def read(self, n: int) -> bytes:
        """Wait for `n` bytes."""
        while len(self.received) < n:
            self._more.clear()
            await self._more.wait()
            assert len(self.received) >= n or not self.lost.is_set()
        data = bytes(self.received[:n])
        del self.received[:n]
        return data

    async def read_error(self) -> ErrorReport:
        """Wait for an ERROR frame; heartbeats may come before it."""
        kind = FrameKind.HEARTBEAT
        while kind is FrameKind.HEARTBEAT:
            header = unpack_header(
                memoryview(await self.read(self.head_bytes))[: HEADER.size],
                allowed=frozenset({FrameKind.HEARTBEAT, FrameKind.ERROR}),
                limits=LIMITS,
                state="in a test",
            )
            kind, meta = header.kind, await self.read(header.meta_length)
        return read_error(Frame(kind=kind, meta=meta))

    async def shake_hands(self, purpose: Purpose = Purpose.DATA) -> None:
        """Play the initiator, a node or for control links a client, until the link is up."""
        role = PeerRole.CLIENT if purpose is Purpose.CONTROL else PeerRole.NODE
        self.send(PREAMBLE)
        assert await self.read(len(PREAMBLE)) == PREAMBLE
        self.send(raw(hello_frame(replace(hello("raw", purpose), role=role))))
        await self.read(len(raw(hello_frame(hello("b", purpose)))))


@dataclass
class Harness:
    """How to make links of one transport on one kind of loop."""

    tcp: bool
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    identity: Identity | None = None

    @property
    def checked(self) -> bool:
        """Whether frames have checksums."""
        return self.tcp and self.identity is None

    def run(self, scenario: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
        """Run a scenario on a loop of its own, and close its listeners."""
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            runner.run(self._run(scenario))

    async def _run(self, scenario: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
        self._listeners: list[Listener] = []
        try:
            await scenario(self)
        finally:
            for listener in self._listeners:
                await listener.close()

    async def listen(
        self,
        on_link: Callable[[Link], Awaitable[None]],
        on_failure: Callable[[ShardnetError], None] | None = None,
        options: LinkOptions = OPTIONS,
    ) -> Listener:
        """A TCP listener that is closed at the end of the scenario."""
        options = changed(options, identity=self.identity)
        listener = await listen(
            "127.0.0.1", 0, hello("b"), on_link, on_failure=on_failure, options=options
        )
        self._listeners.append(listener)
        return listener

    async def pair(
        self, options: LinkOptions = OPTIONS, purpose: Purpose = Purpose.DATA
    ) -> tuple[Link, Link]:
        """Both ends of a link that is up."""
        if not self.tcp:
            return await memory_pair(hello("a", purpose), hello("b", purpose), options=options)
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener = await self.listen(accepted.put, options=options)
        return await self.connect(listener, options, purpose=purpose), await accepted.get()

    async def connect(
        self,
        listener: Listener,
        options: LinkOptions = OPTIONS,
        node: str = "a",
        purpose: Purpose = Purpose.DATA,
    ) -> Link:
        """A link to a listener of this harness."""
        options = changed(options, identity=self.identity)
        return await connect("127.0.0.1", listener.port, hello(node, purpose), options=options)

    async def raw_connect(self, listener: Listener) -> RawPeer:
        """A raw peer of a listener of this harness."""
        peer = RawPeer(checked=self.checked)
        below: asyncio.BufferedProtocol = peer
        if self.identity is not None:
            below = TlsTransport(peer, self.identity.client, initiator=True)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: below, "127.0.0.1", listener.port)
        return peer

    async def raw(self, options: LinkOptions = OPTIONS) -> tuple[RawPeer, Awaitable[Link]]:
        """A raw peer, and the link it talks to once that is up (or the error instead)."""
        if self.tcp:
            up: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

            async def on_link(link: Link) -> None:
                up.set_result(link)

            listener = await self.listen(on_link, up.set_exception, options)
            return await self.raw_connect(listener), up
        peer = RawPeer(checked=self.checked)
        link = AsyncioLink(hello("b"), initiator=False, options=options)
        join(peer, link, buffer_bytes=options.socket_buffer_bytes)

        async def wait_up() -> Link:
            await link.wait_up()
            return link

        return peer, wait_up()

    async def raw_up(
        self, options: LinkOptions = OPTIONS, purpose: Purpose = Purpose.DATA
    ) -> tuple[RawPeer, Link]:
        """A raw peer that has shaken hands, and the link."""
        peer, up = await self.raw(options)
        await peer.shake_hands(purpose)
        return peer, await up


IDENTITY = make_identity(bytes(16))

HARNESSES = {
    "memory": Harness(tcp=False, loop_factory=asyncio.new_event_loop),
    "tcp-asyncio": Harness(tcp=True, loop_factory=asyncio.new_event_loop),
    "tcp-uvloop": Harness(tcp=True, loop_factory=uvloop.new_event_loop),
    "tls-asyncio": Harness(tcp=True, loop_factory=asyncio.new_event_loop, identity=IDENTITY),
    "tls-uvloop": Harness(tcp=True, loop_factory=uvloop.new_event_loop, identity=IDENTITY),
}
