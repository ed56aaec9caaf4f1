"""A link whose transport is a TCP socket, with TLS between where there is a key.

Knows the options of a connected socket. Must not know addresses, nor who connects and who listens.
"""

from __future__ import annotations

import asyncio
import socket

from shardnet.transport.asyncio_link import AsyncioLink
from shardnet.transport.link import LinkOptions
from shardnet.transport.tls import TlsTransport
from shardnet.wire.connection.connection import HelloAnswer
from shardnet.wire.messages.handshake import Hello


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


def set_buffers(sock: socket.socket, options: LinkOptions) -> None:
    """Set the size of the kernel's buffers of a socket that is not connected yet.

    Later would be too late: the window that TCP agrees on is never taken back.
    """
    if options.socket_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.socket_buffer_bytes)
