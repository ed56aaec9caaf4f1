"""Links over TCP: connect, listen, and the socket options they need.

Knows addresses, sockets and what the errors of the operating system mean to a person. Knows nothing
of what travels on a link.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from shardnet.errors import (
    ConfigurationError,
    LinkError,
    PeerSilentError,
    PeerUnreachableError,
    ShardnetError,
    UsageError,
)
from shardnet.transport.link import Link, LinkOptions, format_address
from shardnet.transport.machine_link import MachineLink
from shardnet.wire.machine import HelloAnswer
from shardnet.wire.messages import Hello

_log = logging.getLogger(__name__)

OnLink = Callable[[Link], Awaitable[None]]
OnFailure = Callable[[ShardnetError], None]
"""Called with why a peer's link did not come up, or its handler failed. It names the peer."""


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
        async with asyncio.timeout(options.handshake_s):
            sock = await _dial(host, port, options)
            await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
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
    options: LinkOptions | None = None,
) -> Listener:
    """Accept links on the first address of `host`; port 0 takes a free one.

    `hello` is sent to every peer with purpose, ring and epoch of the peer's own, or is a function
    that makes the answer to the peer's hello and may refuse it by raising ShardnetError. `on_link`
    runs as a task for each link that is up and owns it: when it raises, the link is aborted, when
    it returns, the link goes on. Failed handshakes go to `on_failure` (default: the log).

    Raises UsageError for a port that cannot be, ConfigurationError when the address cannot be used.
    """
    _check_port(port, lowest=0)
    listener = Listener(hello, on_link, on_failure or _log_failure, options or LinkOptions())
    await listener.start(host, port)
    return listener


class Listener:
    """A listening socket, the handshakes in progress and the handlers of the links."""

    def __init__(
        self,
        hello: Hello | HelloAnswer,
        on_link: OnLink,
        on_failure: OnFailure,
        options: LinkOptions,
    ) -> None:
        self._hello = hello
        self._on_link = on_link
        self._on_failure = on_failure
        self._options = options
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._n_handshakes = 0
        self._host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return format_address(self._host, self.port)

    async def start(self, host: str, port: int) -> None:
        """Bind and listen. Raises ConfigurationError when the address cannot be used."""
        try:
            listening = await _bind(host, port, self._options)
        except OSError as error:
            where = format_address(host, port)
            raise ConfigurationError(_cannot_listen(where, error)) from error
        self._server = await asyncio.get_running_loop().create_server(self._accept, sock=listening)
        self._host, self.port = listening.getsockname()[:2]

    async def close(self) -> None:
        """Stop listening and cancel the handlers; their links are aborted."""
        if self._server is not None:
            self._server.close()
        for handler in self._handlers:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers)

    def _accept(self) -> _TcpLink:
        return _TcpLink(
            self._hello, initiator=False, options=self._options, on_connected=self._start_handler
        )

    def _start_handler(self, link: _TcpLink) -> None:
        handler = asyncio.get_running_loop().create_task(self._supervise(link))
        self._handlers.add(handler)
        handler.add_done_callback(self._finish_handler)

    def _finish_handler(self, handler: asyncio.Task[None]) -> None:
        self._handlers.discard(handler)
        if not handler.cancelled() and (error := handler.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the handler of a link failed", "exception": error, "task": handler}
            )

    async def _supervise(self, link: _TcpLink) -> None:
        """Run one link's handler; whatever ends it, the link does not outlive a failure."""
        try:
            await self._shake_hands(link)
            await self._on_link(link)
        except ShardnetError as error:
            link.abort("its handler failed")
            self._on_failure(error)
        except BaseException:
            link.abort("its handler was stopped")
            raise

    async def _shake_hands(self, link: _TcpLink) -> None:
        if self._n_handshakes >= self._options.max_handshakes:
            raise LinkError(
                f"{link.peer_address}: refused, {self._n_handshakes} other handshakes are open"
            )
        self._n_handshakes += 1
        try:
            async with asyncio.timeout(self._options.handshake_s):
                await link.wait_up()
        except TimeoutError:
            raise PeerSilentError(
                f"{link.peer_address}: no hello came within {self._options.handshake_s:g} s"
            ) from None
        except ShardnetError:
            await link.wait_lost()  # it may still be telling the peer why
            raise
        finally:
            self._n_handshakes -= 1


class _TcpLink(MachineLink):
    """A link whose transport is a TCP socket."""

    def __init__(
        self,
        hello: Hello | HelloAnswer,
        *,
        initiator: bool,
        options: LinkOptions,
        on_connected: Callable[[_TcpLink], None] | None = None,
    ) -> None:
        super().__init__(hello, initiator=initiator, options=options)
        self._on_connected = on_connected

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
        if self._on_connected is not None:
            self._on_connected(self)


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
            async with asyncio.timeout(options.handshake_s / len(infos)):
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


async def _bind(host: str, port: int, options: LinkOptions) -> socket.socket:
    infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, number, _, address = infos[0]
    listening = socket.socket(family, kind, number)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_buffers(listening, options)
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
            cause = f"the host is unknown ({error.strerror}); check the name or use its IP address"
        case TimeoutError(errno=None):
            cause = (
                f"no answer within {options.handshake_s:g} s; check that a node runs there "
                "and that no firewall is between"
            )
        case ConnectionRefusedError():
            cause = "nothing listens there; start `shardnet node` on that machine or check the port"
        case _:
            cause = f"it cannot be reached ({error}); check the address and the network"
    return PeerUnreachableError(f"{where}: {cause}")


def _cannot_listen(where: str, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            cause = "the port is in use; choose another with --port, or stop what holds it"
        case errno.EADDRNOTAVAIL | socket.EAI_NONAME:
            cause = "this machine has no such address; choose another with --host"
        case errno.EACCES:
            cause = "this user may not use that port; choose one above 1023 with --port"
        case _:
            cause = f"{error}; choose another with --host or --port"
    return f"cannot listen on {where}: {cause}"


def _log_failure(error: ShardnetError) -> None:
    _log.warning("a link failed: %s", error)
