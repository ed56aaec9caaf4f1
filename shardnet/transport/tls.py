"""TLS between a link and its TCP transport: to TCP a protocol, to the link a transport.

Why asyncio's own TLS is not used: docs/adr/0007-tls-between-tcp-and-link.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from shardnet.errors import (
    AuthenticationError,
    LinkClosedError,
    LinkError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.wire.framing.frames import KIB, PREAMBLE_MAGIC, TLS_RECORDS, Buffer

_OTHER_KEY: Final = "it holds another cluster key"
SHARE_KEY: Final = (
    "run `shardnet key show` on one of the two machines and `shardnet key join --replace` with "
    "that key on the other, then start its node again"
)
"""What to do about nodes that belong together and hold unlike keys."""
_REFUSALS: Final = (
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_REQUIRED",
    "CERTIFICATE_UNKNOWN",
    "DECRYPT_ERROR",
)
"""Alerts by which a peer says that it does not accept our certificate."""


def handshake_error(error: ssl.SSLError, *, initiator: bool, began_with: bytes) -> LinkError:
    """Return the error of a failed handshake; `began_with` are the peer's first bytes.

    On the acceptor's side only an error about a node of shardnet has a remedy: whoever else dials
    is a stranger, and `shardnet doctor` distinguishes them by it.
    """
    reason = error.reason or str(error)
    if began_with == PREAMBLE_MAGIC:
        return AuthenticationError("it has no cluster key", remedy="run `shardnet key join` there")
    if isinstance(error, ssl.SSLCertVerificationError) or _is_refusal(reason):
        return AuthenticationError(_OTHER_KEY, remedy=SHARE_KEY)
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return AuthenticationError("it showed no certificate; only holders of the key may connect")
    if (
        "PROTOCOL" in reason or "NO_SHARED_CIPHER" in reason
    ):  # UNSUPPORTED_PROTOCOL, alerts about it
        what = "it does not speak TLS 1.3, as every node of shardnet does"
        return AuthenticationError(
            what, remedy="install the same shardnet there" if initiator else ""
        )
    if began_with[:1] not in TLS_RECORDS:
        if not initiator:
            return AuthenticationError("it does not speak TLS; it is no node of this cluster")
        return AuthenticationError("it does not speak TLS", remedy="check the address and port")
    remedy = "check that it is a node of shardnet" if initiator else ""
    return AuthenticationError(f"the TLS handshake failed ({reason})", remedy=remedy)


def cut_short() -> LinkError:
    """Return the error of a connection that ends while the handshake is under way."""
    return LinkClosedError("the peer closed the connection during the TLS handshake")


def stream_error(error: ssl.SSLError) -> LinkError:
    """Return the error of an encrypted stream that cannot continue.

    An initiator whose certificate the acceptor refuses learns it only now.
    """
    reason = error.reason or str(error)
    if _is_refusal(reason):
        return AuthenticationError(f"it refuses our certificate: {_OTHER_KEY}", remedy=SHARE_KEY)
    return RemoteProtocolError(f"the encrypted stream is damaged ({reason})")


def _is_refusal(reason: str) -> bool:
    return "ALERT" in reason and reason.endswith(_REFUSALS)


_RECEIVE_BYTES: Final = 64 * KIB
_HANDSHAKE_BYTES: Final = 4 * KIB
"""The same until the handshake is done: strangers may have many under way."""
MAX_HELLO_BYTES: Final = 8 * KIB
"""The longest ClientHello: those of nodes take 2 KB at most."""
_PIECE_BYTES: Final = 64 * KIB
"""So much is encrypted at once; then TCP may say that it is full."""
_SMALL_BYTES: Final = 16 * KIB
"""Buffers up to this size are joined with their neighbours: every record costs a call."""

_RECORD_HEAD: Final = 5
_MESSAGE_HEAD: Final = 4
_HANDSHAKE: Final = 0x16
_CLIENT_HELLO: Final = 1
_CERTIFICATE_REQUIRED: Final = bytes.fromhex("15 03 03 0002 02 74")
"""The alert of that name, as a record that is not encrypted. A node without a key understands it:
docs/protocol.md section 2."""


class SecuredProtocol(Protocol):
    """What uses the transport: an asyncio.BufferedProtocol that also receives failures."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""

    def get_buffer(self, sizehint: int) -> Buffer:
        """See asyncio."""

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""

    def eof_received(self) -> bool | None:
        """See asyncio."""

    def pause_writing(self) -> None:
        """See asyncio."""

    def resume_writing(self) -> None:
        """See asyncio."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""

    def failed(self, error: ShardnetError) -> None:
        """Record that nothing more can be sent or received; call `write_eof` or `abort`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsEngine:
    """One end of a TLS connection, and the encrypted bytes on their way to it and from it."""

    engine: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


class CipherWriter(Protocol):
    """Writes to the TCP connection from any thread, in order with its transport."""

    def is_free(self) -> bool:
        """Say whether nothing waits to be sent."""

    def write_now(self, buffers: Sequence[Buffer]) -> bool:
        """Write at once if nothing waits before; return whether that was done."""

    def writelines(self, buffers: Iterable[Buffer], /) -> None:
        """Write by the transport. For the loop."""

    def stop(self) -> None:
        """Write nothing any more."""


class _State(enum.Enum):
    SHAKING_HANDS = enum.auto()
    UP = enum.auto()
    OVER = enum.auto()  # nothing is encrypted or decrypted any more


class Begun(enum.Enum):
    """How far a connection's ClientHello has come."""

    PARTLY = enum.auto()
    WHOLE = enum.auto()
    TOO_LONG = enum.auto()


def hello_begun(came: bytes) -> Begun:
    """Say how much of a ClientHello is in `came`, the first bytes of a connection.

    What begins no TLS handshake counts as whole: the engine says what is wrong with it.
    """
    said, at = b"", 0
    while at + _RECORD_HEAD <= len(came) and came[at] == _HANDSHAKE:
        n_bytes = int.from_bytes(came[at + 3 : at + _RECORD_HEAD], "big")
        said += came[at + _RECORD_HEAD : at + _RECORD_HEAD + n_bytes]
        at += _RECORD_HEAD + n_bytes
        n_message = _MESSAGE_HEAD + int.from_bytes(said[1:_MESSAGE_HEAD], "big")
        if max(at, n_message) > MAX_HELLO_BYTES:
            return Begun.TOO_LONG
        if len(said) >= _MESSAGE_HEAD and (said[0] != _CLIENT_HELLO or len(said) >= n_message):
            return Begun.WHOLE
    is_handshake = came[min(at, len(came) - 1)] == _HANDSHAKE
    return Begun.PARTLY if is_handshake or at >= len(came) else Begun.WHOLE


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """One end of a TLS connection. What is written before the handshake is done waits for it.

    `on_shown` gets the peer's certificate (DER) then.
    """

    _tcp: asyncio.Transport

    def __init__(
        self,
        protocol: SecuredProtocol,
        context: ssl.SSLContext,
        *,
        initiator: bool,
        on_shown: Callable[[bytes], None] = lambda leaf: None,
    ) -> None:
        super().__init__()
        self._protocol = protocol
        self._on_shown = on_shown
        self._initiator = initiator
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._engine = context.wrap_bio(self._incoming, self._outgoing, server_side=not initiator)
        self._state = _State.SHAKING_HANDS
        self._received = memoryview(bytearray(_HANDSHAKE_BYTES))
        self._began_with = b""
        self._unsent: deque[memoryview] = deque()
        self._tcp_is_full = False
        self._reading = True
        self._peer_ended = False
        self._ending = False
        self._closing = False
        self._writer: CipherWriter | None = None
        self.lock = threading.RLock()
        """Held while the engine is used, which two threads must not do at once."""

    # --- past the loop

    def use(self, writer: CipherWriter) -> None:
        """Write to TCP by `writer` from now on, so that `write_now` works."""
        self._writer = writer

    def write_now(self, buffers: Sequence[Buffer]) -> bool:
        """Encrypt and write, from any thread, if nothing waits before; return whether it did."""
        with self.lock:
            writer = self._writer
            if writer is None or self._unsent or self._ending or not writer.is_free():
                return False
            if self._state is not _State.UP:
                return False
            data = memoryview(b"".join(buffers))
            while data:
                data = data[self._engine.write(data) :]
            return writer.write_now([self._outgoing.read()])

    def stop(self) -> None:
        """Write nothing any more."""
        if self._writer is not None:
            self._writer.stop()

    def take_engine(self) -> TlsEngine:
        """Hand over what encrypts and decrypts: this transport does so no more."""
        self._state = _State.OVER
        return TlsEngine(engine=self._engine, incoming=self._incoming, outgoing=self._outgoing)

    # --- what TCP calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._tcp = cast(asyncio.Transport, transport)
        self._protocol.connection_made(self)
        if not self.is_closing():
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where TCP puts the next received bytes."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what `nbytes` received bytes hold."""
        if self._state is _State.OVER:
            return
        missing = len(PREAMBLE_MAGIC) - len(self._began_with)
        if missing:
            self._began_with += bytes(self._received[: min(nbytes, missing)])
        self._incoming.write(self._received[:nbytes])
        if self._state is _State.SHAKING_HANDS:
            self._shake_hands()
        else:
            self._decrypt()

    def eof_received(self) -> bool:
        """Note the end of the peer's bytes. True: we close the connection ourselves."""
        if self._state is _State.SHAKING_HANDS:
            self._fail(cut_short())
        self._peer_ended = True
        self._decrypt()
        return True

    def pause_writing(self) -> None:
        """Encrypt no more for now."""
        self._tcp_is_full = True
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Encrypt what has waited."""
        self._tcp_is_full = False
        self._encrypt()
        if not self._tcp_is_full:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        if self._state is _State.SHAKING_HANDS and not self._closing:
            self._fail(cut_short())
        self._state = _State.OVER
        self._unsent.clear()
        self._protocol.connection_lost(exc)

    # --- what the link may ask of its transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Ask TCP: addresses and the socket; "tcp" is its transport."""
        return self._tcp if name == "tcp" else self._tcp.get_extra_info(name, default)

    def write(self, data: Buffer) -> None:
        """Take bytes to encrypt; many are not copied before."""
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None:
        """Take several buffers to encrypt."""
        small = bytearray()
        with self.lock:
            for data in list_of_data:
                if len(data) <= _SMALL_BYTES:
                    small += data
                else:
                    self._unsent.extend((memoryview(small), memoryview(data)))
                    small = bytearray()
            self._unsent.append(memoryview(small))
            self._encrypt()

    def write_eof(self) -> None:
        """Promise that nothing more will be written; what is received from then on is dropped."""
        with self.lock:
            self._ending = True
            self._encrypt()

    def can_write_eof(self) -> bool:
        """Say that half-close works."""
        return True

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that have not left, encrypted or not."""
        return sum(map(len, self._unsent)) + self._tcp.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Let the peer's bytes wait."""
        self._reading = False
        self._tcp.pause_reading()

    def resume_reading(self) -> None:
        """Take the peer's bytes again, first those that have already come."""
        self._reading = True
        self._tcp.resume_reading()
        asyncio.get_running_loop().call_soon(self._decrypt)

    def is_closing(self) -> bool:
        """Return whether `close` or `abort` was called, or the connection is gone."""
        return self._closing or self._tcp.is_closing()

    def close(self) -> None:
        """Send what waits, then end the connection."""
        self._closing = True
        self.write_eof()

    def abort(self) -> None:
        """End the connection at once; what waits is lost."""
        self._closing = True
        self._state = _State.OVER
        self._unsent.clear()
        self._tcp.abort()

    # --- the engine

    def _shake_hands(self) -> None:
        try:
            self._engine.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            failure = handshake_error(error, initiator=self._initiator, began_with=self._began_with)
            if not self._outgoing.pending:  # the engine says nothing to what is no TLS
                self._outgoing.write(_CERTIFICATE_REQUIRED)
            self._flush()
            self._fail(failure, error)
        else:
            self._state = _State.UP
            self._on_shown(self._engine.getpeercert(binary_form=True) or b"")
            self._received = memoryview(bytearray(_RECEIVE_BYTES))
            self._flush()
            self._encrypt()
            self._decrypt()

    def _decrypt(self) -> None:
        """Hand on what has come, until there is no more or the link wants no more."""
        while self._state is _State.UP and self._reading and self._decrypt_once():
            pass
        if self._peer_ended and (self._reading or self._state is _State.OVER):
            self._peer_ended = False
            self._protocol.eof_received()
            self.close()

    def _decrypt_once(self) -> bool:
        """Decrypt into one buffer of the link. Returns whether there may be more."""
        target = memoryview(self._protocol.get_buffer(-1))
        filled = 0
        failure: ssl.SSLError | None = None
        with self.lock:
            try:
                while filled < len(target):
                    n = cast(int, self._engine.read(len(target) - filled, target[filled:]))
                    if n == 0:  # close_notify
                        raise ssl.SSLZeroReturnError
                    filled += n
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                self._peer_ended = True
            except ssl.SSLError as error:
                failure = error
        full = filled == len(target)
        if filled:
            self._protocol.buffer_updated(filled)
        if failure is not None:
            self._flush()  # the alert that tells the peer
            self._fail(stream_error(failure), failure)
        return full

    def _encrypt(self) -> None:
        """Encrypt what waits, as long as TCP takes it; then, if that was all, say goodbye."""
        with self.lock:
            self._encrypt_all()

    def _encrypt_all(self) -> None:
        while self._unsent and self._state is _State.UP and not self._tcp_is_full:
            data = self._unsent.popleft()
            n = self._engine.write(data[:_PIECE_BYTES]) if data else 0
            if n < len(data):
                self._unsent.appendleft(data[n:])
            self._flush()
        if self._ending and not (self._unsent and self._state is _State.UP):
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """End our half of the connection, encrypted and below."""
        if self._state is not _State.OVER:
            with contextlib.suppress(ssl.SSLError):  # the peer's own goodbye is still to come
                self._engine.unwrap()
            self._flush()
            self._state = _State.OVER
        if self._closing:
            self._tcp.close()
        elif not self._tcp.is_closing():
            try:
                self._tcp.write_eof()
            except OSError:  # asyncio's own says so where the peer has reset the connection
                self._tcp.abort()

    def _fail(self, failure: ShardnetError, cause: ssl.SSLError | None = None) -> None:
        if self._state is _State.OVER:
            return
        self._state = _State.OVER
        self._unsent.clear()
        failure.__cause__ = cause and cause.with_traceback(None)  # whose frames know this transport
        self._protocol.failed(failure)

    def _flush(self) -> None:
        with self.lock:
            if not self._outgoing.pending or self._tcp.is_closing():
                return
            if self._writer is None:
                self._tcp.write(self._outgoing.read())
            else:
                self._writer.writelines([self._outgoing.read()])
