"""Crowds at a listener, hostile and honest, on loopback: whoever can come up does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from support.transport_harness import HARNESSES, IDENTITY, OPTIONS, Harness, hello
from support.waiting import until

from shardnet.cluster.node.parts import Dialer
from shardnet.errors import LinkClosedError, LinkError, ShardnetError
from shardnet.transport import admission, listener, tcp
from shardnet.transport import listener as listener_module
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.tcp import connect, listen
from shardnet.transport.tcp_link import TcpLink
from shardnet.transport.tls import TlsTransport
from shardnet.types import NodeId

LOCAL = "127.0.0.1"


def client_hello() -> bytes:
    """The first words of a TLS handshake, of somebody who has the key."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        IDENTITY.client.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


BEGINNING = client_hello()
"""A handshake that begins, and never goes on."""
KEYED = replace(OPTIONS, identity=IDENTITY)

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have one loopback address"
)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let both ends of a crowd be in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if most < 2048:
        pytest.skip("this process may not have enough files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def keep(link: Link) -> None:
    """A handler that leaves the link to the test."""


async def until_closed(link: Link) -> None:
    """A handler that waits for the end of its link."""
    with contextlib.suppress(LinkError):
        await link.receive()
    await link.close()


@contextlib.asynccontextmanager
async def besieged(port: int, n: int, n_hosts: int, says: bytes) -> AsyncIterator[None]:
    """Keep `n` connections from `n_hosts` addresses open; every second one `says` something."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for number in range(n):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.bind((f"127.0.1.{1 + number % n_hosts}", 0))
            await loop.sock_connect(sock, (LOCAL, port))
            if number % 2:
                sock.send(says)
        yield


async def come_up(port: int, n: int) -> list[Link]:
    """Open `n` links at one moment."""
    opening = (connect(LOCAL, port, hello(), options=KEYED) for _ in range(n))
    return list(await asyncio.gather(*opening))


async def close_all(links: list[Link]) -> None:
    await asyncio.gather(*(link.close() for link in links))


@pytest.fixture
def harness() -> Harness:
    return HARNESSES["tls-uvloop"]


# --- strangers


@linux_only
@pytest.mark.usefixtures("many_files")
def test_members_come_up_while_500_connections_from_40_hosts_say_nothing_or_never_end(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them begin a handshake, more than may be under way at one time."""
    grace_s = admission.GRACE_S
    monkeypatch.setattr(admission, "GRACE_S", 1e9)  # until all are there

    async def scenario(harness: Harness) -> None:
        door = await harness.listen(until_closed)
        async with besieged(door.port, 500, 40, BEGINNING):
            await until(lambda: len(door._handshakes) + len(door._waiting) == 500)
            assert len(door._handshakes) == 96
            monkeypatch.setattr(admission, "GRACE_S", grace_s)
            links = await come_up(door.port, 10)
            assert len(door._handshakes) + len(door._waiting) >= 250  # the attack lasts
            await close_all(links)

    harness.run(scenario)


@linux_only
@pytest.mark.usefixtures("many_files")
def test_a_neighbour_comes_back_though_strangers_hold_all_places_for_ever(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has answered this node's own link. Without that it would wait for its turn."""
    monkeypatch.setattr(admission, "GRACE_S", 1e9)

    async def scenario(harness: Harness) -> None:
        dialer = Dialer(node=NodeId("us"), name="us", identity=IDENTITY, progress=lambda: (0, 0))
        neighbour = await harness.listen(until_closed)
        patient = replace(KEYED, handshake_s=3 * KEYED.handshake_s)
        door = await listen(LOCAL, 0, hello("b"), until_closed, known=dialer.known, options=patient)
        ours = await dialer.control(neighbour.address)
        async with besieged(door.port, 200, 40, BEGINNING):
            await until(lambda: len(door._handshakes) == 96)
            for _ in range(3):
                await close_all(await come_up(door.port, 2))
        await ours.close()
        await door.close()

    harness.run(scenario)


@linux_only
@pytest.mark.parametrize("identity", [IDENTITY, None], ids=["key", "no key"])
def test_more_silent_connections_than_may_wait_close_each_other(
    harness: Harness, identity: Identity | None
) -> None:
    async def scenario(harness: Harness) -> None:
        refused: list[tuple[str, str]] = []
        options = replace(OPTIONS, identity=identity, max_unfinished=20)
        door = await listen(
            LOCAL,
            0,
            hello("b"),
            until_closed,
            on_failure=lambda error: None,
            on_refused=lambda host, error: refused.append((host, error.message)),
            options=options,
        )
        async with besieged(door.port, 60, 4, b""):
            for _ in range(3):
                link = await connect(LOCAL, door.port, hello(), options=options)
                await link.close()
            assert len(door._waiting) <= 20
        assert len(refused) >= 40
        assert LOCAL not in dict(refused)
        assert {message.split(",")[0] for _, message in refused} == {"closed unanswered"}
        await door.close()

    harness.run(scenario)


def test_a_process_that_may_open_no_more_files_closes_who_waits_and_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(harness: Harness) -> None:
        door = await harness.listen(until_closed)
        with contextlib.ExitStack() as stack:
            crowd = [
                stack.enter_context(socket.create_connection((LOCAL, door.port))) for _ in range(10)
            ]
            await until(lambda: len(door._waiting) == len(crowd))
            monkeypatch.setattr(listener, "ACCEPT_PAUSE_S", 1e9)
            late = stack.enter_context(socket.socket())
            late.setblocking(False)
            with _no_more_files():
                late.connect_ex((LOCAL, door.port))
                await until(lambda: len(crowd) in door._waiting)
            assert door._waiting.keys() == set(range(1, 11))

    harness.run(scenario)


@contextlib.contextmanager
def _no_more_files() -> Iterator[None]:
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_listener_that_closes_leaves_no_connection_that_waits(harness: Harness) -> None:
    """The test fails for an open socket."""

    async def scenario(harness: Harness) -> None:
        door = await harness.listen(keep)
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection((LOCAL, door.port)))
            await until(lambda: len(door._waiting) == 20)
            await door.close()

    harness.run(scenario)


def _links() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, TcpLink | TlsTransport)]


@pytest.mark.parametrize(
    "began",
    [BEGINNING, BEGINNING[:20], b"no TLS at all", b""],
    ids=["hello", "half a hello", "no TLS", "nothing"],
)
def test_handshakes_that_come_to_nothing_leave_nothing_to_collect(
    harness: Harness, began: bytes
) -> None:
    """Else strangers fill the memory with what only the collector finds, which has no hurry."""

    async def scenario(harness: Harness) -> None:
        failures: list[ShardnetError] = []
        door = await harness.listen(until_closed, failures.append, options=KEYED)
        gc.collect()
        before = _links()  # of tests before
        gc.disable()
        try:
            for _ in range(20):
                with socket.create_connection((LOCAL, door.port)) as sock:
                    sock.sendall(began)
                    await until(lambda: bool(door._waiting or door._handshakes))
                await until(lambda: not door._waiting and not door._handshakes)
                await asyncio.sleep(0.01)  # the connection is lost
            left = [one for one in _links() if one not in before]
        finally:
            gc.enable()
        assert len(left) <= 1  # the last may not be forgotten yet

    harness.run(scenario)


# --- members


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(("kind", "options"), [("tls-uvloop", KEYED), ("tcp-uvloop", OPTIONS)])
def test_300_members_that_connect_at_one_moment_are_all_served(
    kind: str, options: LinkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them says anything before all are there: on one loop they would come one by one."""
    monkeypatch.setattr(admission, "GRACE_S", 60.0)  # a busy machine is slow
    options = replace(options, handshake_s=60.0)

    async def scenario(harness: Harness) -> None:
        failures: list[ShardnetError] = []
        door = await harness.listen(until_closed, failures.append, options)
        socks = [socket.create_connection((LOCAL, door.port), timeout=60) for _ in range(300)]
        await until(lambda: len(door._waiting) == 300)
        links = [TcpLink(hello(), initiator=True, options=options) for _ in socks]
        for link, sock in zip(links, socks, strict=True):
            sock.setblocking(False)
            await link.take_over(sock)
        for link in links:
            await link.wait_up()
        await asyncio.gather(*(link.close() for link in links))
        assert failures == []

    HARNESSES[kind].run(scenario)


def test_a_node_that_is_too_busy_is_asked_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "RETRY_PAUSES_S", (0.0,) * 5)

    async def scenario(harness: Harness) -> None:
        with socket.create_server((LOCAL, 0)) as server:
            server.setblocking(False)
            connecting = asyncio.create_task(
                connect(LOCAL, server.getsockname()[1], hello(), options=KEYED)
            )
            loop = asyncio.get_running_loop()
            for _ in range(5):
                (await loop.sock_accept(server))[0].close()
            far = TcpLink(hello("b"), initiator=False, options=KEYED)
            await far.take_over((await loop.sock_accept(server))[0])
            near = await connecting
            await asyncio.gather(near.close(), far.close())

    harness.run(scenario)


@pytest.mark.parametrize("options", [KEYED, OPTIONS], ids=["key", "no key"])
def test_a_node_that_stays_too_busy_is_named_so(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, options: LinkOptions
) -> None:
    monkeypatch.setattr(tcp, "RETRY_PAUSES_S", (0.0,) * 2)

    async def scenario(harness: Harness) -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), LOCAL, 0)
        port = server.sockets[0].getsockname()[1]
        match = f"^{LOCAL}:{port}: .* 3 times in .* it is busy, or too many connect to it"
        with pytest.raises(LinkClosedError, match=match) as raised:
            await connect(LOCAL, port, hello(), options=options)
        assert "key" not in str(raised.value)
        server.close()
        await server.wait_closed()

    harness.run(scenario)


def test_the_time_to_connect_is_not_longer_for_a_node_that_is_busy(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "RETRY_PAUSES_S", (1e9,))

    async def scenario(harness: Harness) -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), LOCAL, 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LinkClosedError, match="it is busy"):
            await connect(LOCAL, port, hello(), options=replace(OPTIONS, handshake_s=0.2))
        server.close()
        await server.wait_closed()

    harness.run(scenario)


def test_a_port_that_windows_keeps_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    error = listener_module._cannot_listen("localhost:5000", PermissionError(13, "forbidden"))
    assert error.message == (
        "cannot listen on localhost:5000: another program or Windows itself keeps that port"
    )
    assert "excludedportrange" in error.remedy
