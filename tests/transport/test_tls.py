"""The TLS transport itself, between two protocols in memory: what waits where, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.transport_harness import IDENTITY, RawPeer

from shardnet.errors import LinkClosedError
from shardnet.transport.memory import join
from shardnet.transport.tls import Begun, TlsTransport, hello_begun
from shardnet.wire.framing.frames import KIB

LARGE = bytes(range(256)) * 4 * KIB


class Pair:
    """A client and a server and their transports, not yet connected."""

    def __init__(self) -> None:
        self.client, self.server = RawPeer(), RawPeer()
        self.client_tls = TlsTransport(self.client, IDENTITY.client, initiator=True)
        self.server_tls = TlsTransport(self.server, IDENTITY.server, initiator=False)

    async def connect(self) -> None:
        """Connect them, and wait until both can be heard."""
        join(self.client_tls, self.server_tls)
        self.client.send(b"c")
        self.server.send(b"s")
        assert await self.server.read(1) == b"c"
        assert await self.client.read(1) == b"s"


def on_pair(scenario: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await scenario(Pair())

    asyncio.run(run())


async def turns() -> None:
    """Let the loop do what it can do now."""
    for _ in range(200):
        await asyncio.sleep(0)


async def ended(*peers: RawPeer) -> None:
    for peer in peers:
        peer.transport.abort()
    for peer in peers:
        await peer.lost.wait()


def test_small_and_large_buffers_arrive_in_order() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.connect()
        parts = [b"", b"a" * 24, b"b" * 100, LARGE, b"", memoryview(LARGE), b"c", b"d" * 16385]
        pair.client.transport.writelines(parts)
        sent = b"".join(parts)
        assert await pair.server.read(len(sent)) == sent
        await ended(pair.client, pair.server)

    on_pair(scenario)


def test_a_paused_reader_gets_nothing_more_and_then_the_rest() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.connect()
        update, n_updates = pair.server.buffer_updated, 0

        def pause_after_the_first(nbytes: int) -> None:
            nonlocal n_updates
            n_updates += 1
            update(nbytes)
            if n_updates == 1:
                pair.server.transport.pause_reading()

        pair.server.buffer_updated = pause_after_the_first  # type: ignore[method-assign]
        pair.server._scratch = bytearray(1000)
        pair.client.send(LARGE)
        await turns()
        assert n_updates == 1
        assert len(pair.server.received) == 1000
        pair.server.transport.resume_reading()
        assert await pair.server.read(len(LARGE)) == LARGE
        await ended(pair.client, pair.server)

    on_pair(scenario)


def test_what_came_before_a_pause_is_given_when_reading_resumes_though_nothing_more_comes() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.connect()
        pair.server.transport.pause_reading()
        pair.server_tls._incoming.write(_sealed(pair, b"late"))
        await turns()
        assert pair.server.received == b""
        pair.server.transport.resume_reading()
        assert await pair.server.read(4) == b"late"
        await ended(pair.client, pair.server)

    on_pair(scenario)


def _sealed(pair: Pair, data: bytes) -> bytes:
    """What the client would send for `data`."""
    pair.client_tls._engine.write(data)
    return pair.client_tls._outgoing.read()


def test_bytes_wait_unencrypted_and_are_counted_while_the_peer_does_not_read() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.connect()
        pair.server.transport.pause_reading()
        pair.client.send(LARGE)
        await turns()
        waiting = pair.client.transport.get_write_buffer_size()
        encrypted = pair.client_tls._tcp.get_write_buffer_size()
        assert waiting >= len(LARGE)
        assert 0 < encrypted <= 200 * KIB
        pair.client.transport.write_eof()
        pair.server.transport.resume_reading()
        assert await pair.server.read(len(LARGE)) == LARGE
        await asyncio.gather(pair.server.lost.wait(), pair.client.lost.wait())

    on_pair(scenario)


def test_the_end_reaches_the_peer_behind_all_that_was_written() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.connect()
        pair.client.send(LARGE)
        pair.client.transport.close()
        assert await pair.server.read(len(LARGE)) == LARGE
        await asyncio.gather(pair.server.lost.wait(), pair.client.lost.wait())
        assert pair.server.error is pair.client.error is None

    on_pair(scenario)


def test_what_comes_after_our_end_is_dropped() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.connect()
        pair.server.eof_received = lambda: None  # type: ignore[method-assign]
        pair.server_tls.close = lambda: None  # type: ignore[method-assign]
        pair.client.transport.write_eof()
        await turns()
        pair.server.send(LARGE)
        await turns()
        assert pair.client.received == b""
        assert pair.client_tls._incoming.pending == 0
        await ended(pair.client, pair.server)

    on_pair(scenario)


def test_a_connection_that_breaks_in_the_handshake_is_named() -> None:
    async def scenario(pair: Pair) -> None:
        mute = RawPeer()
        join(pair.client_tls, mute)
        mute.transport.abort()
        await pair.client.lost.wait()
        assert isinstance(pair.client.error, LinkClosedError)
        assert "closed the connection during the TLS handshake" in str(pair.client.error)
        other = RawPeer()
        join(other, pair.server_tls)
        other.transport.abort()
        await pair.server.lost.wait()
        assert isinstance(pair.server.error, LinkClosedError)

    on_pair(scenario)


def test_an_aborted_handshake_blames_nobody() -> None:
    async def scenario(pair: Pair) -> None:
        mute = RawPeer()
        join(pair.client_tls, mute)
        pair.client.transport.abort()
        await asyncio.gather(pair.client.lost.wait(), mute.lost.wait())
        assert pair.client.error is None

    on_pair(scenario)


def test_a_foreign_member_sees_a_clean_end_and_gets_no_ticket() -> None:
    """Python's own TLS tells an end without close_notify from a clean one."""

    def talk(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=120) as tcp,
            IDENTITY.client.wrap_socket(tcp, suppress_ragged_eofs=False) as tls,
        ):
            tls.sendall(b"hello")
            answer = tls.recv(100) + tls.recv(100)
            assert tls.session is None or not tls.session.has_ticket
            return answer

    async def scenario(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: pair.server_tls, "127.0.0.1", 0)
        talking = asyncio.create_task(asyncio.to_thread(talk, server.sockets[0].getsockname()[1]))
        assert await pair.server.read(5) == b"hello"
        pair.server.send(b"bye")
        pair.server.transport.close()
        assert await talking == b"bye"
        await pair.server.lost.wait()
        server.close()
        await server.wait_closed()
        await loop.shutdown_default_executor()

    on_pair(scenario)


HELLO = b"\x16\x03\x01\x00\x0c" + b"\x01\x00\x00\x08" + b"a hello!"
IN_TWO = b"\x16\x03\x01\x00\x02\x01\x00" + b"\x16\x03\x03\x00\x0a\x00\x08a hello!"


@pytest.mark.parametrize("hello", [HELLO, IN_TWO])
def test_a_hello_is_whole_with_its_last_byte_and_not_before(hello: bytes) -> None:
    assert {hello_begun(hello[:n]) for n in range(1, len(hello))} == {Begun.PARTLY}
    assert hello_begun(hello) is hello_begun(hello + b"more") is Begun.WHOLE


@pytest.mark.parametrize(
    ("came", "begun"),
    [
        (b"GET / HTTP/1.1", Begun.WHOLE),
        (b"\x15\x03\x03\x00\x02\x02\x74", Begun.WHOLE),
        (b"\x16\x03\x01\x00\x05\x02", Begun.PARTLY),
        (b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00", Begun.WHOLE),  # no ClientHello
        (b"\x16\x03\x01\x40\x00\x01", Begun.TOO_LONG),
        (b"\x16\x03\x01\x00\x05\x01\x01\x00\x00\x00", Begun.TOO_LONG),
        (b"\x16\x03\x01\x00\x02\x01\x00GET", Begun.WHOLE),
        (b"\x16\x03\x01\x00\x00" * 2000, Begun.TOO_LONG),
    ],
)
def test_what_is_no_hello_needs_no_more(came: bytes, begun: Begun) -> None:
    assert hello_begun(came) is begun
