"""A connection whose bytes one thread moves itself: after a link, and with or without TLS."""

from __future__ import annotations

import os
import socket
import sys
import time
from asyncio import selector_events
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.direct_pairs import direct_pair
from support.transport_harness import HARNESSES, OPTIONS, Harness

from shardnet.errors import LinkClosedError, LocalProtocolError, RemoteProtocolError
from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.traffic import Traffic
from shardnet.types import NodeId
from shardnet.wire.messages.handshake import Purpose

PARTS = Purpose.PARTS
LARGE = os.urandom(3 << 20)
BOTH = pytest.mark.parametrize("is_encrypted", [False, True])
OVER_TCP = [harness for name, harness in HARNESSES.items() if name != "memory"]


def moved(a: DirectConnection, b: DirectConnection, n_bytes: int) -> tuple[bytes, bytes]:
    """What each end gets of `n_bytes` when both move what they can, in turns."""
    got = {a: bytearray(), b: bytearray()}
    scratch = memoryview(bytearray(1 << 16))
    until_s = time.monotonic() + 60
    while min(map(len, got.values())) < n_bytes or not (a.flush() and b.flush()):
        for end, data in got.items():
            end.flush()
            data += scratch[: end.receive(scratch)]
        assert time.monotonic() < until_s
    return bytes(got[a]), bytes(got[b])


@pytest.mark.parametrize("harness", OVER_TCP)
def test_a_link_hands_its_connection_over_and_is_over(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        traffic = Traffic(NodeId("me"))
        links = await harness.pair(replace(OPTIONS, traffic=traffic), PARTS)
        a, b = [await link.detach() for link in links]
        assert a.is_encrypted is (harness.identity is not None)
        for link in links:
            assert link.closed
            await link.close()  # returns, and the connection stands
        a.send(b"head", LARGE)
        b.send(LARGE, b"tail")
        assert moved(a, b, len(LARGE) + 4) == (LARGE + b"tail", b"head" + LARGE)
        counts = {count.name: count for count in traffic.counts()}
        assert counts["a"].n_links == counts["b"].n_links == 1
        assert counts["a"].sent_bytes >= len(LARGE)
        a.close()
        with pytest.raises(LinkClosedError):
            b.receive(memoryview(bytearray(9)))
        b.close()
        after = {count.name: count for count in traffic.counts()}
        assert [count.n_links for count in after.values()] == [0, 0]
        # `a` is what `b` calls its peer: to that one the connection broke
        assert {name: count.n_failed for name, count in after.items()} == {"a": 1, "b": 0}
        if sys.platform == "linux":
            assert None not in [count.n_resent for count in after.values()]

    harness.run(scenario)


@pytest.mark.parametrize("name", ["tcp-asyncio", "tls-asyncio"])
def test_a_loop_that_ends_what_it_closes_does_not_end_what_was_handed_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asyncio's own for Windows does."""
    transport: Any = selector_events._SelectorTransport  # type: ignore[attr-defined]
    close = transport._call_connection_lost

    def end(self: Any, exc: Exception | None) -> None:
        if self._sock.fileno() != -1:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        close(self, exc)

    async def scenario(harness: Harness) -> None:
        links = await harness.pair(purpose=PARTS)
        a, b = [await link.detach() for link in links]
        for link in links:
            await link.close()
        a.send(LARGE)
        b.send(LARGE)
        assert moved(a, b, len(LARGE)) == (LARGE, LARGE)
        a.close()
        b.close()

    monkeypatch.setattr(transport, "_call_connection_lost", end)
    HARNESSES[name].run(scenario)


def test_without_a_socket_nothing_is_handed_over() -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(purpose=PARTS)
        with pytest.raises(LocalProtocolError, match="no socket"):
            await a.detach()
        a.abort("test")
        b.abort("test")

    HARNESSES["memory"].run(scenario)


@BOTH
def test_what_was_kept_may_change(is_encrypted: bool) -> None:
    with direct_pair(is_encrypted=is_encrypted) as (a, b):
        data = bytearray(LARGE)
        a.send(data)
        assert not a.flush()
        a.keep()
        data[:] = bytes(len(data))
        b.send(bytes(len(LARGE)))
        _, got = moved(a, b, len(LARGE))
        assert got == LARGE


@BOTH
def test_the_end_is_named(is_encrypted: bool) -> None:
    with direct_pair(is_encrypted=is_encrypted) as (a, b):
        a.send(b"last")
        a.cut()
        scratch = memoryview(bytearray(9))
        assert bytes(scratch[: b.receive(scratch)]) == b"last"
        with pytest.raises(LinkClosedError, match="zero: the connection for parts"):
            b.receive(scratch)
        with pytest.raises(LinkClosedError, match="zero: the connection for parts"):
            b.send(b"more")


@pytest.mark.parametrize("how", ["damaged", "replayed", "left out"])
def test_nothing_but_what_the_peer_has_sealed_is_received(how: str) -> None:
    with direct_pair(is_encrypted=True) as (a, b):
        tls, scratch = a._tls, memoryview(bytearray(9))
        assert tls is not None

        def sealed(data: bytes) -> bytes:
            tls.engine.write(data)
            return tls.outgoing.read()

        first, second = sealed(b"first"), sealed(b"second")
        match how:
            case "damaged":
                came = [first[:-1] + bytes([first[-1] ^ 1])]
            case "replayed":
                came = [first, first]
            case _:
                came = [second]
        for number, data in enumerate(came):
            a._socket.send(data)
            if number < len(came) - 1:
                assert bytes(scratch[: b.receive(scratch)]) == b"first"
        with pytest.raises(RemoteProtocolError, match="zero: the encrypted stream is damaged"):
            b.receive(scratch)
