"""Links over TCP: connect, listen, and the socket options they need.

Knows addresses, sockets and what the errors of the operating system mean to a person. Knows nothing
of what travels on a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from shardnet.errors import (
    ConfigurationError,
    LinkError,
    PeerSilentError,
    PeerUnreachableError,
    ShardnetError,
    UsageError,
)
from shardnet.transport.address import format_address
from shardnet.transport.admission import Admission
from shardnet.transport.asyncio_link import AsyncioLink
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.tls import TlsTransport
from shardnet.wire.connection.connection import HelloAnswer
from shardnet.wire.messages.handshake import Hello

_log = logging.getLogger(__name__)

ACCEPT_PAUSE_S: Final = 0.5
"""How long to wait when no connection can be accepted: the process has too many files open."""

OnLink = Callable[[Link], Awaitable[None]]
OnFailure = Callable[[ShardnetError], None]
"""Called with why a peer's link did not come up, or its handler failed. It names the peer."""
OnRefused = Callable[[str, ShardnetError], None]
"""Called with the host of each handshake that came to nothing, and why."""


async def connect(
    host: str, port: int, hello: Hello, *, options: LinkOptions | None = None
) -> Link:
    """Open a link to the node at `host` and `port`, and wait for its hello.

    Raises UsageError for a port that cannot be, PeerUnreachableError when nothing answers there
    within `handshake_s`, VersionMismatchError, RemoteProtocolError when something else answers, or
    whatever error the node refuses the link with.
    """
    _check_port(port, lowest=1)
    options = options or LinkOptions()
    where = format_address(host, port)
    link = _TcpLink(hello, initiator=True, options=options)
    up = False
    try:
        async with deadline(options.handshake_s):
            sock = await _dial(host, port, options)
            await _hand_over(sock, link)
            await link.wait_up()
            up = True
    except OSError as error:
        raise _unreachable(where, error, options) from error
    finally:
        if not up:
            link.abort("the link did not come up")
    return link


async def listen(
    host: str,
    port: int,
    hello: Hello | HelloAnswer,
    on_link: OnLink,
    *,
    on_failure: OnFailure | None = None,
    on_refused: OnRefused | None = None,
    options: LinkOptions | None = None,
) -> Listener:
    """Accept links on the first address of `host`, on all interfaces if it is empty; port 0 takes
    a free one.

    `hello` is sent to every peer with purpose, ring and epoch of the peer's own, or is a function
    that makes the answer to the peer's hello and may refuse it by raising ShardnetError. `on_link`
    runs as a task for each link that is up and owns it: when it raises, the link is aborted, when
    it returns, the link continues. What fails goes to `on_failure` (default: the log), a handshake
    once per host and kind of error.

    Raises UsageError for a port that cannot be, ConfigurationError when the address cannot be used.
    """
    _check_port(port, lowest=0)
    listener = Listener(
        hello,
        on_link,
        on_failure or _log_failure,
        on_refused or _tell_nobody,
        options or LinkOptions(),
    )
    await listener.start(host, port)
    return listener


class Listener:
    """A listening socket, the handshakes in progress and the handlers of the links."""

    def __init__(
        self,
        hello: Hello | HelloAnswer,
        on_link: OnLink,
        on_failure: OnFailure,
        on_refused: OnRefused,
        options: LinkOptions,
    ) -> None:
        self._hello = hello
        self._on_link = on_link
        self._on_failure = on_failure
        self._on_refused = on_refused
        self._options = options
        self._admission = Admission(
            total=options.max_handshakes, per_host=options.max_handshakes_per_host
        )
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return format_address(self.host, self.port)

    async def start(self, host: str, port: int) -> None:
        """Bind and listen. Raises ConfigurationError when the address cannot be used."""
        try:
            self._listening = await _bind(host, port, self._options)
        except OSError as error:
            where = format_address(host, port)
            raise _cannot_listen(where, error) from error
        self.host, self.port = self._listening.getsockname()[:2]
        self._accepting = self._start(self._accept_all(self._listening))

    async def close(self) -> None:
        """Stop listening and cancel the handlers; their links are aborted."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            await asyncio.sleep(0)  # the last one accepted has begun, and will close its socket
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._listening is not None:
            self._listening.close()

    async def _accept_all(self, listening: socket.socket) -> None:
        """Accept connections. One that may not shake hands is closed before it costs anything."""
        loop = asyncio.get_running_loop()
        while True:
            accepting = asyncio.ensure_future(loop.sock_accept(listening))
            try:
                sock, address = await asyncio.shield(accepting)
            except asyncio.CancelledError:
                await _give_up(accepting, listening)
                raise
            except OSError as error:
                _log.warning("no connection can be accepted for a moment: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                self._admission.enter(address[0], loop.time())
            except LinkError as error:
                sock.close()
                self._report(address, LinkError(f"{format_address(*address[:2])}: {error}"))
            else:
                self._start(self._supervise(sock, address))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the handler of a link failed", "exception": error, "task": task}
            )

    async def _supervise(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Run one link's handler; whatever ends it, the link does not outlive a failure."""
        link = _TcpLink(self._hello, initiator=False, options=self._options)
        try:
            if await self._shake_hands(link, sock, address):
                await self._on_link(link)
        except ShardnetError as error:
            link.abort("its handler failed")
            self._on_failure(error)
        except BaseException:
            link.abort("its handler was stopped")
            raise

    async def _shake_hands(
        self, link: _TcpLink, sock: socket.socket, address: tuple[str, int]
    ) -> bool:
        """Wait until the link is up. Returns whether it is, and reports why not."""
        loop = asyncio.get_running_loop()
        up = False
        try:
            await _hand_over(sock, link)
            async with deadline(self._options.handshake_s):
                await link.wait_up()
            up = True
        except TimeoutError:
            where = format_address(*address[:2])
            self._report(
                address,
                PeerSilentError(f"{where}: no hello came within {self._options.handshake_s:g} s"),
            )
            link.abort("no hello came")
        except ShardnetError as error:
            self._report(address, error)
            await link.wait_lost()  # it may still be telling the peer why
        finally:
            self._admission.leave(address[0], loop.time(), failed=not up)
        return up

    def _report(self, address: tuple[str, int], error: ShardnetError) -> None:
        where = format_address(*address[:2])
        bare = type(error)(error.message.removeprefix(f"{where}: "), remedy=error.remedy)
        self._on_refused(address[0], bare)
        if self._admission.is_news(address[0], error):
            self._on_failure(error)


class _TcpLink(AsyncioLink):
    """A link whose transport is a TCP socket."""

    def __init__(
        self, hello: Hello | HelloAnswer, *, initiator: bool, options: LinkOptions
    ) -> None:
        super().__init__(hello, initiator=initiator, options=options)
        self._initiator = initiator

    def over_tcp(self) -> asyncio.BufferedProtocol:
        """Return what TCP is to call: this link, or the TLS between."""
        identity = self._options.identity
        if identity is None:
            return self
        context = identity.client if self._initiator else identity.server
        return TlsTransport(self, context, initiator=self._initiator)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's remaining options, then begin the handshake."""
        tcp = transport.get_extra_info("socket")
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            user_timeout_ms = int(self._options.user_timeout_s * 1000)
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
        super().connection_made(transport)
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # A free port that we try to connect to may be given to our own end.
            self.abort("nothing listens there; the connection met itself")


async def _dial(host: str, port: int, options: LinkOptions) -> socket.socket:
    """Connect to the first address of `host` that answers; each has its share of the time."""
    loop = asyncio.get_running_loop()
    if "%" in host:  # a link-local address with its scope, which uvloop's own resolver loses
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    else:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for last, (family, kind, number, _, address) in enumerate(infos, start=1 - len(infos)):
        sock = socket.socket(family, kind, number)
        connected = False
        try:
            sock.setblocking(False)
            _set_buffers(sock, options)
            async with deadline(options.handshake_s / len(infos)):
                await _connect(sock, address)
            connected = True
            return sock
        except OSError:
            if last == 0:
                raise
        finally:
            if not connected:
                sock.close()
    raise PeerUnreachableError(f"{format_address(host, port)}: the host has no address")


async def _connect(sock: socket.socket, address: tuple[Any, ...]) -> None:
    """Connect as `loop.sock_connect` does, to addresses with an IPv6 scope too: uvloop loses it."""
    loop = asyncio.get_running_loop()
    if not any(address[3:]):
        await loop.sock_connect(sock, address)
        return
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        writable = asyncio.Event()
        loop.add_writer(sock, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


async def _hand_over(sock: socket.socket, link: _TcpLink) -> None:
    """Let the loop move the bytes of a connected socket; it alone closes the socket from now on.

    Not by `create_connection`, for either end: where the connection breaks at once, uvloop closes
    the descriptor and leaves `sock` to close it again, when somebody else may have that number.
    """
    await asyncio.get_running_loop().connect_accepted_socket(link.over_tcp, sock)


async def _bind(host: str, port: int, options: LinkOptions) -> socket.socket:
    if not host:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, number, _, address = infos[0]
    listening = socket.socket(family, kind, number)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":  # IPv4 comes here too
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _set_buffers(listening, options)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen()  # of two that bind one port at once, the second fails only here
    except OSError:
        listening.close()
        raise
    return listening


def _check_port(port: int, *, lowest: int) -> None:
    if not lowest <= port <= 65535:  # the resolver would take it modulo 65536
        raise UsageError(f"port {port} is not a number from {lowest} to 65535")


def _set_buffers(sock: socket.socket, options: LinkOptions) -> None:
    # Before the connection stands: the window that TCP then agrees on is never taken back.
    if options.socket_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.socket_buffer_bytes)


def _unreachable(where: str, error: OSError, options: LinkOptions) -> PeerUnreachableError:
    match error:
        case socket.gaierror():
            cause = f"the host is unknown ({error.strerror})"
            remedy = "check the name or use its IP address"
        case TimeoutError(errno=None):
            cause = f"no answer within {options.handshake_s:g} s"
            remedy = "check that a node runs there and that no firewall is between"
        case ConnectionRefusedError():
            cause = "nothing listens there"
            remedy = "start `shardnet node` on that machine or check the port"
        case _:
            cause = f"it cannot be reached ({error})"
            remedy = "check the address and the network"
    return PeerUnreachableError(f"{where}: {cause}", remedy=remedy)


def _cannot_listen(where: str, error: OSError) -> ConfigurationError:
    match error.errno:
        case errno.EADDRINUSE:
            cause = "the port is in use"
            remedy = "choose another with --port, or stop what holds it"
        case errno.EADDRNOTAVAIL | socket.EAI_NONAME:
            cause, remedy = "this machine has no such address", "choose another with --host"
        case errno.EACCES:
            cause = "this user may not use that port"
            remedy = "choose one above 1023 with --port"
        case _:
            cause, remedy = str(error), "choose another with --host or --port"
    return ConfigurationError(f"cannot listen on {where}: {cause}", remedy=remedy)


def _log_failure(error: ShardnetError) -> None:
    _log.warning("a link failed: %s", error)


async def _give_up(
    accepting: asyncio.Future[tuple[socket.socket, Any]], listening: socket.socket
) -> None:
    """Accept no more; what has come at the last moment is closed."""
    with contextlib.suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().remove_reader(listening)
    await asyncio.sleep(0)  # what was accepted already becomes the result
    if not accepting.cancel() and not accepting.cancelled() and accepting.exception() is None:
        accepting.result()[0].close()


def _tell_nobody(host: str, error: ShardnetError) -> None:
    """Take no note of a refused handshake."""
