"""TCP: addresses that do not answer, ports in use, listeners and their limits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from support.transport_harness import HARNESSES, OPTIONS, Harness, hello

from shardnet.errors import (
    BusyError,
    ConfigurationError,
    LinkClosedError,
    LinkError,
    PeerSilentError,
    PeerUnreachableError,
    PlanError,
    ShardnetError,
    UsageError,
)
from shardnet.transport import asyncio_link, tcp_link
from shardnet.transport import loop as loop_module
from shardnet.transport.link import Link
from shardnet.transport.tcp import connect, listen
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.handshake import Hello

LOCAL = "127.0.0.1"


@pytest.fixture(params=["tcp-asyncio", "tcp-uvloop", "tls-asyncio", "tls-uvloop"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return HARNESSES[request.param]


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which nothing listens. It is taken all the same, so that nobody else gets it."""
    with socket.socket() as sock:
        sock.bind((LOCAL, 0))
        yield sock.getsockname()[1]


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port that accepts connections and never says anything."""
    with socket.create_server((LOCAL, 0)) as sock:
        yield sock.getsockname()[1]


async def keep(link: Link) -> None:
    """A handler that leaves the link to the test."""


async def until_lost(link: Link) -> None:
    """A handler that waits for the end of its link."""
    with pytest.raises(LinkError):
        await link.receive()
    await link.close()


def raises(
    error: type[Exception], match: str, action: Callable[[], Coroutine[Any, Any, Any]]
) -> Any:
    async def scenario(harness: Harness) -> None:
        with pytest.raises(error, match=match):
            await action()

    return scenario


# --- connect


def test_nothing_listens(harness: Harness, free_port: int) -> None:
    match = f"{LOCAL}:{free_port}: nothing listens there; start `shardnet node`"
    harness.run(raises(PeerUnreachableError, match, lambda: connect(LOCAL, free_port, hello())))


def test_an_unknown_host(harness: Harness) -> None:
    match = r"no\.such\.host\.invalid:1: the host is unknown .*check the name"
    harness.run(
        raises(PeerUnreachableError, match, lambda: connect("no.such.host.invalid", 1, hello()))
    )


def test_something_that_never_answers(harness: Harness, mute_port: int) -> None:
    options = replace(OPTIONS, handshake_s=0.1)
    match = f"{LOCAL}:{mute_port}: no answer within 0.1 s"
    harness.run(
        raises(
            PeerUnreachableError,
            match,
            lambda: connect(LOCAL, mute_port, hello(), options=options),
        )
    )


def test_a_cancelled_connect_leaves_nothing(harness: Harness, mute_port: int) -> None:
    async def scenario(harness: Harness) -> None:
        connecting = asyncio.create_task(connect(LOCAL, mute_port, hello(), options=OPTIONS))
        for _ in range(20):
            await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    harness.run(scenario)


@pytest.mark.parametrize("gives_up", ["connect", "listen", "both"])
def test_a_link_that_is_given_up_at_any_moment_leaves_nothing(
    harness: Harness, gives_up: str
) -> None:
    """The test fails for an open socket, and for a socket object whose number is closed already:
    it would close that again, when it may be somebody else's.
    """

    async def give_up_after(n_turns: int) -> None:
        options = replace(OPTIONS, identity=harness.identity)
        listener = await listen(LOCAL, 0, hello("b"), until_lost, options=options)
        connecting = asyncio.create_task(harness.connect(listener))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        if gives_up != "listen":
            connecting.cancel()
        if gives_up != "connect":
            await listener.close()
        with contextlib.suppress(asyncio.CancelledError, LinkError):
            await (await connecting).close()
        await listener.close()

    async def scenario(harness: Harness) -> None:
        for n_turns in range(24):
            await give_up_after(n_turns)

    harness.run(scenario)
    gc.collect()


def test_every_address_of_a_host_is_tried(
    harness: Harness, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(harness: Harness) -> None:
        listener = await harness.listen(keep)

        async def two_addresses(*_: object, **__: object) -> list[Any]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (LOCAL, port))
                for port in (free_port, listener.port)
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses, raising=False)
        options = replace(OPTIONS, identity=harness.identity)
        link = await connect("two.addresses", 1, hello(), options=options)
        assert link.peer_address == f"{LOCAL}:{listener.port}"
        await link.close()

    if harness.loop_factory is not asyncio.new_event_loop:
        pytest.skip("uvloop's loop takes no patches")
    harness.run(scenario)


def test_a_host_with_an_address_of_a_family_that_is_switched_off_is_reached(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `localhost` on a Linux that was started with ipv6.disable=1: no such socket can be had."""

    async def scenario(harness: Harness) -> None:
        listener = await harness.listen(keep)

        async def two_families(*_: object, **__: object) -> list[Any]:
            return [
                (65000, socket.SOCK_STREAM, 6, "", ("::1", listener.port, 0, 0)),
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (LOCAL, listener.port)),
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_families, raising=False)
        options = replace(OPTIONS, identity=harness.identity)
        link = await connect("two.families", listener.port, hello(), options=options)
        assert link.peer_address == f"{LOCAL}:{listener.port}"
        await link.close()

    if harness.loop_factory is not asyncio.new_event_loop:
        pytest.skip("uvloop's loop takes no patches")
    harness.run(scenario)


def test_an_ipv6_address_is_written_in_brackets(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        listener = await listen("::1", 0, hello("b"), keep, options=OPTIONS)
        link = await connect("::1", listener.port, hello(), options=OPTIONS)
        assert link.peer_address == listener.address == f"[::1]:{listener.port}"
        await link.close()
        await listener.close()

    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    harness.run(scenario)


def test_a_link_local_address_keeps_its_scope(harness: Harness) -> None:
    """The machine's own, so that nothing leaves it. uvloop alone would lose the scope."""
    entries = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    scoped = [address for address in entries if address.startswith("fe80:") and "%" in address]
    if not scoped:
        pytest.skip("no interface of this machine has a link-local IPv6 address")

    async def scenario(harness: Harness) -> None:
        listener = await listen("::", 0, hello(), keep)
        try:
            link = await connect(scoped[0], listener.port, hello())
            await link.close()
        finally:
            await listener.close()

    harness.run(scenario)
    harness.run(
        raises(
            PeerUnreachableError, "nothing listens there", lambda: connect(scoped[0], 1, hello())
        )
    )


@pytest.mark.parametrize("port", [-1, 0, 65536, 70000])
def test_a_port_that_cannot_be(port: int) -> None:
    with pytest.raises(UsageError, match=f"port {port} is not a number from 1 to 65535"):
        asyncio.run(connect(LOCAL, port, hello()))
    if port != 0:
        with pytest.raises(UsageError, match=f"port {port} is not a number from 0 to 65535"):
            asyncio.run(listen(LOCAL, port, hello(), keep))


# --- listen


def test_a_port_in_use(harness: Harness, mute_port: int) -> None:
    match = f"cannot listen on {LOCAL}:{mute_port}: the port is in use; choose another with --port"
    harness.run(raises(ConfigurationError, match, lambda: listen(LOCAL, mute_port, hello(), keep)))


def test_an_address_of_another_machine(harness: Harness) -> None:
    match = "this machine has no such address; choose another with --host"
    harness.run(raises(ConfigurationError, match, lambda: listen("192.0.2.1", 0, hello(), keep)))


def test_a_closed_listener_gives_its_port_back(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        host = "127.0.0.8" if sys.platform == "linux" else LOCAL  # where nobody else asks for ports
        first = await listen(host, 0, hello(), keep)
        await first.close()
        await asyncio.sleep(0)
        second = await listen(host, first.port, hello(), keep)
        await second.close()

    harness.run(scenario)


@pytest.mark.parametrize("n_turns", range(4))
def test_a_listener_that_closes_while_somebody_connects_leaves_nothing(
    harness: Harness, n_turns: int
) -> None:
    """However far the loop has come with the connection: the test fails for an open socket."""

    async def scenario(harness: Harness) -> None:
        listener = await listen(LOCAL, 0, hello(), keep)
        await asyncio.sleep(0)
        with socket.create_connection((LOCAL, listener.port)):
            for _ in range(n_turns):
                await asyncio.sleep(0)
            await listener.close()

    harness.run(scenario)


def test_every_handshake_that_fails_is_told_of_with_its_host(harness: Harness) -> None:
    """People are told of the first alone."""

    async def scenario(harness: Harness) -> None:
        refused: asyncio.Queue[tuple[str, ShardnetError]] = asyncio.Queue()
        reported: list[ShardnetError] = []
        listener = await listen(
            LOCAL,
            0,
            hello(),
            keep,
            on_failure=reported.append,
            on_refused=lambda host, error: refused.put_nowait((host, error)),
        )
        for _ in range(3):
            socket.create_connection((LOCAL, listener.port)).close()
            host, error = await refused.get()
            assert host == LOCAL
            assert isinstance(error, LinkClosedError)
        assert len(reported) == 1
        await listener.close()

    harness.run(scenario)


def test_an_answer_may_refuse_the_link_by_name(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        def answer(peer: Hello) -> Hello:
            raise BusyError(f"no room for {peer.node}")

        failures: list[ShardnetError] = []
        options = replace(OPTIONS, identity=harness.identity)
        listener = await listen(LOCAL, 0, answer, keep, on_failure=failures.append, options=options)
        with pytest.raises(BusyError, match=f"{listener.port}: the peer reports: no room for a"):
            await harness.connect(listener)
        await listener.close()

    harness.run(scenario)


def test_a_silent_client_is_given_up_and_reported(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        failed: asyncio.Future[ShardnetError] = asyncio.get_running_loop().create_future()
        listener = await harness.listen(keep, failed.set_result, replace(OPTIONS, handshake_s=0.1))
        peer = await harness.raw_connect(listener)
        error = await failed
        assert isinstance(error, PeerSilentError)
        assert "127.0.0.1:" in str(error)
        assert "no hello came within 0.1 s" in str(error)
        await peer.lost.wait()

    harness.run(scenario)


def test_a_handler_that_fails_by_name_is_reported_and_its_link_aborted(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        async def fail(link: Link) -> None:
            raise PlanError("no plan")

        failed: asyncio.Future[ShardnetError] = asyncio.get_running_loop().create_future()
        listener = await harness.listen(fail, failed.set_result)
        link = await harness.connect(listener)
        assert isinstance(await failed, PlanError)
        with pytest.raises(LinkClosedError):
            await link.receive()
        await link.close()

    harness.run(scenario)


def test_a_bug_in_a_handler_reaches_the_loop_and_aborts_its_link(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        async def fail(link: Link) -> None:
            raise ZeroDivisionError

        reported: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.set_result(context)
        )
        listener = await harness.listen(fail)
        link = await harness.connect(listener)
        assert isinstance((await reported)["exception"], ZeroDivisionError)
        with pytest.raises(LinkClosedError):
            await link.receive()
        await link.close()

    harness.run(scenario)


def test_closing_a_listener_stops_its_handlers_and_keeps_links_without_one(
    harness: Harness,
) -> None:
    async def scenario(harness: Harness) -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()

        async def serve_the_second(link: Link) -> None:
            await accepted.put(link)
            if link.peer.node == "second":
                await link.receive()

        listener = await harness.listen(serve_the_second)
        first = await harness.connect(listener, node="first")
        kept = await accepted.get()
        second = await harness.connect(listener, node="second")
        stopped = await accepted.get()
        await listener.close()
        with pytest.raises(LinkClosedError):
            await second.receive()
        assert stopped.closed
        first.send(Frame(kind=FrameKind.TOKENS, step=1))
        assert (await kept.receive()).step == 1
        await asyncio.gather(first.close(), second.close(), kept.close())

    harness.run(scenario)


def test_the_sockets_options_are_set(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(replace(OPTIONS, user_timeout_s=7, socket_buffer_bytes=20_000))
        for link in (a, b):
            sock = link._transport.get_extra_info("socket")  # type: ignore[attr-defined]
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
            for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                assert sock.getsockopt(socket.SOL_SOCKET, direction) in (20_000, 40_000)
        await asyncio.gather(a.close(), b.close())

    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no TCP_USER_TIMEOUT")
    harness.run(scenario)


def test_all_interfaces_are_ipv4_and_ipv6_and_addresses_are_written_plainly(
    harness: Harness,
) -> None:
    async def scenario(harness: Harness) -> None:
        options = replace(OPTIONS, identity=harness.identity)
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener = await listen("", 0, hello("b"), accepted.put, options=options)
        for host, shown in ((LOCAL, f"{LOCAL}:"), ("::1", "[::1]:")):
            link = await connect(host, listener.port, hello(), options=options)
            far = await accepted.get()
            assert far.peer_address.startswith(shown)
            await asyncio.gather(link.close(), far.close())
        await listener.close()

    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    harness.run(scenario)


# --- the loop


def test_run_uses_uvloop_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    async def module() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert loop_module.run(module()) == "uvloop"
    monkeypatch.setitem(__import__("sys").modules, "uvloop", None)
    assert loop_module.run(module()).startswith("asyncio")


def test_datagram_endpoints_on_windows_outlive_ports_that_nothing_listens_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    monkeypatch.setattr(loop_module, "_ignore_unreachable", told.append)

    async def open_one() -> int:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((LOCAL, 0))
        endpoint, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, sock=sock)
        endpoint.close()
        return int(sock.fileno())

    with asyncio.Runner(loop_factory=loop_module.windows_loop(asyncio.SelectorEventLoop)) as runner:
        assert told == [runner.run(open_one())]


@pytest.mark.parametrize("system", ["win32", "linux"])
def test_a_silent_network_ends_connections_by_the_systems_own_option(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tcp:
        def setsockopt(self, level: int, option: int, value: int) -> None:
            options.append((level, option, value))

    options: list[tuple[int, int, int]] = []
    monkeypatch.setattr("sys.platform", system)
    tcp_link._limit_silence(Tcp(), 120.0)  # type: ignore[arg-type]
    expected = (5, 120) if system == "win32" else (socket.TCP_USER_TIMEOUT, 120_000)
    assert options == [(socket.IPPROTO_TCP, *expected)]


def test_two_programs_never_listen_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which SO_REUSEADDR lets them on Windows."""
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with socket.socket() as sock:
        tcp_link.keep_port(sock)
        set_ones = (socket.SO_REUSEADDR, socket.SO_KEEPALIVE)
        assert [sock.getsockopt(socket.SOL_SOCKET, one) for one in set_ones] == [0, 1]


@pytest.mark.parametrize(
    ("error", "is_silence"),
    [
        (OSError(errno.ETIMEDOUT, "timed out"), True),
        (OSError(errno.ECONNRESET, "reset"), False),
    ],
)
def test_what_the_system_says_of_silence(error: OSError, is_silence: bool) -> None:
    assert isinstance(asyncio_link._lost_error(error), PeerSilentError) is is_silence
    error.winerror = 121  # type: ignore[attr-defined]  # Windows' word for it
    assert isinstance(asyncio_link._lost_error(error), PeerSilentError)
