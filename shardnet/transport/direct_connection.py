"""A TCP connection whose bytes one thread moves itself, past the loop: that of a stage's parts.

Knows sockets and the TLS engine that a link had. Must not know what travels, nor how long to wait.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from shardnet.errors import LinkClosedError, LinkError
from shardnet.transport.tls import TlsEngine, stream_error
from shardnet.transport.traffic import Meter
from shardnet.wire.framing.frames import KIB, Buffer

_SO_BUSY_POLL: Final = 46
"""Of Linux; Python does not name it."""
_BUSY_POLL_US: Final = 50
"""How long the kernel looks at the network card itself, where it does."""
_SMALL_BYTES: Final = 16 * KIB
"""Buffers up to this size are joined: every call of the system costs some µs."""
_PIECE_BYTES: Final = 256 * KIB
"""So much is encrypted at once."""
_RECEIVE_BYTES: Final = 64 * KIB


class DirectConnection:
    """A connection that has come up as a link. All but `cut` is for one thread at a time.

    Nothing waits: `send` and `receive` do what is possible at once. `peer` names who is at the
    other end, in errors.
    """

    def __init__(
        self,
        sock: socket.socket,
        tls: TlsEngine | None,
        *,
        peer: str,
        meter: Meter,
        on_close: Callable[[bool], None],
    ) -> None:
        sock.setblocking(False)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # only root may have more than the system's own
                sock.setsockopt(socket.SOL_SOCKET, _SO_BUSY_POLL, _BUSY_POLL_US)
        self.peer = peer
        self.is_encrypted = tls is not None
        self._socket = sock
        self._tls = tls
        self._meter = meter
        self._on_close: Callable[[bool], None] | None = on_close
        self._is_broken = False
        self._unsent: deque[Buffer] = deque()
        self._sealed = memoryview(b"")
        self._received = memoryview(bytearray(_RECEIVE_BYTES))
        self._may_hold = tls is not None
        """Whether the engine may have bytes that were not taken yet."""

    def send(self, *buffers: Buffer) -> None:
        """Send bytes after what waits. They must not change until `flush` has returned True, or
        `keep` was called. Raises LinkError when the connection is lost.
        """
        self._unsent.extend(buffers)
        self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as the system takes it; return whether all has gone."""
        while self._sealed or self._unsent:
            if not self._sealed:
                self._sealed = self._next()
            try:
                n = self._socket.send(self._sealed)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(error) from None
            self._meter.sent_bytes += n
            self._sealed = self._sealed[n:]
        return True

    def keep(self) -> None:
        """Copy what waits to be sent: its buffers may change from now on."""
        self._unsent = deque([b"".join(self._unsent)] if self._unsent else [])
        if self._tls is None:
            self._sealed = memoryview(bytes(self._sealed))

    def receive(self, into: memoryview) -> int:
        """Take bytes that have come, at most as many as fit; return how many, 0 for none.

        Raises LinkClosedError at the end, RemoteProtocolError for bytes that nobody with the keys
        of this connection has sent.
        """
        if self._tls is None:
            return self._read(into)
        n = self._decrypt(into)
        while not n and (n_came := self._read(self._received)):
            self._tls.incoming.write(self._received[:n_came])
            self._may_hold = True
            n = self._decrypt(into)
        return n

    def cut(self) -> None:
        """End both directions at once; from any thread. The other end and this one learn it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; `on_close` is told first whether something had broken it."""
        self.cut()
        if self._on_close is not None:
            self._on_close(self._is_broken)
            self._on_close = None
        self._socket.close()

    def _next(self) -> memoryview:
        """Return what is to be sent next, as it travels."""
        data = self._unsent.popleft()
        if len(data) <= _SMALL_BYTES:
            while self._unsent and len(data) + len(self._unsent[0]) <= _SMALL_BYTES:
                data = b"".join((data, self._unsent.popleft()))
        elif len(data) > _PIECE_BYTES:
            whole = memoryview(data)
            self._unsent.appendleft(whole[_PIECE_BYTES:])
            data = whole[:_PIECE_BYTES]
        if self._tls is None:
            return memoryview(data)
        view = memoryview(data)
        while view:
            view = view[self._tls.engine.write(view) :]
        return memoryview(self._tls.outgoing.read())

    def _decrypt(self, into: memoryview) -> int:
        if not self._may_hold:
            return 0
        assert self._tls is not None
        try:
            n = cast(int, self._tls.engine.read(len(into), into))
        except ssl.SSLWantReadError:
            self._may_hold = False
            return 0
        except ssl.SSLZeroReturnError:
            n = 0
        except ssl.SSLError as error:
            raise stream_error(error).at(self.peer) from None
        if not n:
            raise self._lost(None)
        return n

    def _read(self, into: memoryview) -> int:
        try:
            n = self._socket.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from None
        if not n:
            raise self._lost(None)
        self._meter.received_bytes += n
        return n

    def _lost(self, error: OSError | None) -> LinkError:
        self._is_broken = True
        how = "is closed" if error is None else f"broke ({error}); the peer may have crashed"
        return LinkClosedError(f"{self.peer}: the connection for parts {how}")
