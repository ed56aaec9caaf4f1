"""A link whose transport is a TCP socket, with TLS between where there is a key.

Knows the options of a connected socket. Must not know addresses, nor who connects and who listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

from shardnet.errors import LinkClosedError
from shardnet.transport.asyncio_link import AsyncioLink
from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.link import DirectWriter, LinkOptions, Signers
from shardnet.transport.tls import TlsTransport
from shardnet.wire.connection.connection import HelloAnswer
from shardnet.wire.framing.frames import Buffer
from shardnet.wire.messages.handshake import Hello

_TCP_MAXRT: Final = 5
"""Of Windows, in seconds; Python does not name it."""


_LOOK_S: Final = 0.001
"""Between two looks whether the hello has gone."""


class TcpLink(AsyncioLink):
    """A link whose transport is a TCP socket."""

    def __init__(
        self, hello: Hello | HelloAnswer, *, initiator: bool, options: LinkOptions
    ) -> None:
        is_plain = options.identity is None
        super().__init__(hello, initiator=initiator, options=options, checked=is_plain)
        self._initiator = initiator

    async def take_over(self, sock: socket.socket) -> None:
        """Let the loop move the bytes of a connected socket; it alone closes it from now on.

        Not by `create_connection`, for either end: where the connection breaks at once, uvloop
        closes the descriptor and leaves `sock` to close it again, when somebody else may have that
        number.
        """
        await asyncio.get_running_loop().connect_accepted_socket(self._over_tcp, sock)

    def _over_tcp(self) -> asyncio.BufferedProtocol:
        """Return what TCP is to call: this link, or the TLS between."""
        identity = self._options.identity
        if identity is None:
            return self
        context = identity.client if self._initiator else identity.server
        own, oldest = identity.signer, identity.signers[-1]

        def shown(leaf: bytes) -> None:
            self.signers = Signers(own, identity.signer_of(leaf), oldest)

        return TlsTransport(self, context, initiator=self._initiator, on_shown=shown)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's remaining options, then begin the handshake."""
        tcp = transport.get_extra_info("socket")
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _limit_silence(tcp, self._options.user_timeout_s)
        super().connection_made(transport)
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # A free port that we try to connect to may be given to our own end.
            self.abort("nothing listens there; the connection met itself")

    async def detach(self) -> DirectConnection:
        """See `Link`."""
        self._raise_if_ended()
        transport = self._transport
        assert transport is not None
        while self._unsent_bytes():  # the hello
            await asyncio.sleep(_LOOK_S)
            self._raise_if_ended()
        tls = transport.take_engine() if isinstance(transport, TlsTransport) else None
        peer, meter = self.peer, self._meter
        sock = _taken(transport.get_extra_info("socket"))
        meter.tcp = lambda: sock
        who = f"{peer.name} ({self.peer_address})"
        self._error = LinkClosedError(f"{who}: the connection was handed over")
        self._lingering = True
        self._abort_transport()
        traffic = self._options.traffic

        def on_close(failed: bool) -> None:
            if traffic is not None:
                traffic.down(peer, meter, failed=failed)

        return DirectConnection(sock, tls, peer=who, meter=meter, on_close=on_close)

    def _direct_writer(self) -> DirectWriter | None:
        """See AsyncioLink. Not on Windows, whose sockets belong to the loop's completion port."""
        transport = self._transport
        if transport is None or sys.platform == "win32":
            return None
        writer = SocketWriter(transport.get_extra_info("tcp", transport))
        if isinstance(transport, TlsTransport):
            transport.use(writer)
            return transport
        return writer


class SocketWriter:
    """Writes to a transport's socket from any thread, while the transport has nothing to send.

    What the socket does not take at once, the transport sends before anything else.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        # A descriptor of its own: the loop may close the transport's during a call.
        self._socket = _duplicate(transport.get_extra_info("socket"))
        self._rest = b""

    def is_free(self) -> bool:
        """Say whether nothing waits to be sent. Under the lock."""
        return not (
            self._rest
            or self._socket.fileno() < 0
            or self._transport.is_closing()
            or self._transport.get_write_buffer_size()
        )

    def write_now(self, buffers: Sequence[Buffer]) -> bool:
        """See DirectWriter."""
        with self.lock:
            if sys.platform == "win32" or not self.is_free():
                return False
            try:
                n_sent = self._socket.sendmsg(buffers)
            except OSError:  # it is full, or broken: the transport learns how
                n_sent = 0
            if n_sent < sum(map(len, buffers)):
                self._rest = b"".join(buffers)[n_sent:]
                self._loop.call_soon_threadsafe(self.writelines, ())
        return True

    def writelines(self, buffers: Iterable[Buffer], /) -> None:
        """See DirectWriter."""
        with self.lock:
            if self._rest:
                self._transport.write(self._rest)
                self._rest = b""
            if buffers:
                self._transport.writelines(buffers)

    def stop(self) -> None:
        """See DirectWriter."""
        with self.lock:
            self._rest = b""
            self._socket.close()


def _taken(sock: Any) -> socket.socket:
    """Take the socket of a transport that is aborted next, without an end of its connection.

    asyncio's own for Windows ends that of a socket which it still has, whoever else has it too.
    uvloop closes its own descriptor, and nothing else.
    """
    own: socket.socket | None = getattr(sock, "_sock", None)
    return _duplicate(sock) if own is None else socket.socket(fileno=own.detach())


def _duplicate(sock: socket.socket) -> socket.socket:
    copy = socket.socket(fileno=os.dup(sock.fileno()))  # what uvloop gives has no dup
    copy.setblocking(False)
    return copy


def keep_port(sock: socket.socket) -> None:
    """Let a socket that will listen have a port for itself, also at once after the last one.

    On Windows SO_REUSEADDR would let two programs listen at one port, and each get what the other
    is sent.
    """
    kept = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    sock.setsockopt(socket.SOL_SOCKET, kept, 1)


def _limit_silence(tcp: socket.socket, allowed_s: float) -> None:
    """Have the system end a connection on which nothing sent is acknowledged for so long."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):
            tcp.setsockopt(socket.IPPROTO_TCP, _TCP_MAXRT, int(allowed_s))
    elif hasattr(socket, "TCP_USER_TIMEOUT"):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(allowed_s * 1000))


def set_buffers(sock: socket.socket, options: LinkOptions) -> None:
    """Set the size of the kernel's buffers of a socket that is not connected yet.

    Later would be too late: the window that TCP agrees on is never taken back.
    """
    if options.socket_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.socket_buffer_bytes)
