"""The connection state machine: bytes in, events out, without IO.

Knows who may send which frame when (docs/protocol.md section 5), and where the next received bytes
belong. Knows nothing of sockets, time or what a frame is for; whoever drives it moves the bytes.

Received bytes go through one small scratch buffer, many frames to one read, except the rest of a
large meta or payload, which goes straight into its final buffer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from shardnet import errors
from shardnet.wire.connection.receive_buffer import FramePart, ReceiveBuffer, payload_copy
from shardnet.wire.framing import frames
from shardnet.wire.messages.handshake import (
    OF_RINGS,
    Hello,
    Purpose,
    error_frame,
    hello_frame,
    read_error,
    read_hello,
)

DIRECT_BYTES: Final = 16 * frames.KIB
"""A meta or payload that lacks at least this much is received straight into its own buffer."""

HelloAnswer = Callable[[Hello], Hello]
"""How an acceptor answers a hello. It raises ShardnetError to refuse; the peer gets that error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReceived:
    """The link is up: the peer's hello came, and ours is sent or waits in `take_outgoing`."""

    hello: Hello


class FrameReceived(msgspec.Struct, frozen=True, kw_only=True):
    """A whole frame arrived for the user of the link."""

    frame: frames.Frame


class ProgressReported(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat came: the peer is alive and has completed `step` of `epoch`."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """BYE came: a clean end. Nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFailed:
    """The link cannot go on. Nothing follows; `take_outgoing` may hold a last word to the peer."""

    error: errors.ShardnetError


Event = HelloReceived | FrameReceived | ProgressReported | PeerLeft | LinkFailed


class LinkState(enum.StrEnum):
    """What may be received next, as error messages say it."""

    PREAMBLE = "before the preamble"
    HELLO = "before the hello"
    UP = "on a link that is up"
    ENDED = "after the end of the link"


_HANDSHAKE_KINDS: Final = frozenset({frames.FrameKind.HELLO, frames.FrameKind.ERROR})
_COMMON_KINDS: Final = frozenset(
    {frames.FrameKind.HEARTBEAT, frames.FrameKind.ERROR, frames.FrameKind.BYE}
)
_DATA_KINDS: Final = frozenset(
    {
        frames.FrameKind.DATA,
        frames.FrameKind.TOKENS,
        frames.FrameKind.EXTRAS,
        frames.FrameKind.SEQUENCE,
        frames.FrameKind.ROWS,
    }
)
_STEP_KINDS: Final = {int(kind): kind for kind in (frames.FrameKind.DATA, frames.FrameKind.TOKENS)}
_PURPOSE_KINDS: Final[Mapping[Purpose, frozenset[frames.FrameKind]]] = {
    Purpose.CONTROL: _COMMON_KINDS | {frames.FrameKind.CONTROL},
    Purpose.DATA: _COMMON_KINDS | _DATA_KINDS,
    Purpose.BULK: _COMMON_KINDS | {frames.FrameKind.BULK},
    Purpose.PARTS: _COMMON_KINDS | {frames.FrameKind.PART},
}
"""What may travel on a link that is up, both ways."""


class LinkConnection:
    """One side of one link.

    The initiator gives its own hello. The acceptor gives a hello too, whose purpose, ring and
    epoch are then set to the initiator's, or a function that makes one from the initiator's. On a
    `checked` link every frame but HELLO has checksums, as where there is no TLS below.
    """

    def __init__(
        self,
        hello: Hello | HelloAnswer,
        *,
        initiator: bool,
        limits: frames.Limits = frames.LIMITS,
        checked: bool = False,
    ) -> None:
        if initiator and not isinstance(hello, Hello):
            raise errors.LocalProtocolError("the initiator of a link has no hello to answer")
        self._greeting = hello if initiator and isinstance(hello, Hello) else None
        self._answer = _answer_with(hello) if isinstance(hello, Hello) else hello
        self._limits = limits
        self._checked = checked
        self._body_checksum: int | None = None
        self._state = LinkState.PREAMBLE
        self._allowed = _HANDSHAKE_KINDS
        self._said_last_word = False
        self.outgoing: list[frames.Buffer] = []
        """What `take_outgoing` would return."""
        self._received = ReceiveBuffer()
        self._target: ReceiveBuffer | FramePart = self._received
        self._header: frames.Header | None = None
        self._meta = self._payload = _NOTHING

    @property
    def state(self) -> LinkState:
        """What may be received next."""
        return self._state

    # --- sending

    def start(self) -> list[frames.Buffer]:
        """Return what is to be sent when the connection stands: the initiator's preamble."""
        return [frames.PREAMBLE] if self._greeting else []

    def send(self, frame: frames.Frame) -> list[frames.Buffer]:
        """Return the buffers to write for `frame`, in one go; its payload is not copied.

        Raises LocalProtocolError when the frame is not allowed on this link now or breaks a cap,
        and LinkClosedError after the end.
        """
        if self._state is LinkState.ENDED or self._said_last_word:
            raise errors.LinkClosedError("the link has ended; nothing can be sent on it")
        if self._state is not LinkState.UP:
            raise errors.LocalProtocolError(
                f"a {frame.kind.name} frame cannot be sent {self._state}"
            )
        if frame.kind not in self._allowed:
            raise errors.LocalProtocolError(f"a {frame.kind.name} frame has no place on this link")
        buffers = frames.pack_frame(frame, self._limits, checked=self._checked)
        self._said_last_word = frame.kind is frames.FrameKind.BYE
        return buffers

    def take_outgoing(self) -> list[frames.Buffer]:
        """Return what the connection itself has to send by now: preambles, hellos, last words."""
        outgoing, self.outgoing = self.outgoing, []
        return outgoing

    # --- receiving

    def get_buffer(self) -> memoryview:
        """Return the place where the next received bytes belong; it is never empty."""
        if self._header is None:
            self._target = self._received
            return self._received.room()
        part = self._meta if self._meta.missing else self._payload
        self._target = part if part.missing >= DIRECT_BYTES else self._received
        return self._target.room()

    def received(self, n: int) -> list[Event]:
        """Record `n` bytes put where `get_buffer` said; return the events they complete."""
        self._target.filled(n)
        events: list[Event] = []
        while self._header is None and (frame := self._whole_frame()) is not None:
            events.append(FrameReceived(frame=frame))
            if not self._received:
                return events
        try:
            while self._state is not LinkState.ENDED and self._advance(events):
                pass
        except errors.ShardnetError as error:
            self._fail(error, events)
        if self._state is LinkState.ENDED:
            self._received.clear()
        return events

    def eof(self) -> list[Event]:
        """Record that the peer's bytes have ended; return the events that follow."""
        match self._state:
            case LinkState.ENDED:
                return []
            case LinkState.UP if self._header or self._received:
                when = "in the middle of a frame"
            case LinkState.UP:
                when = "without saying goodbye"
            case _:
                when = "during the handshake"
        self._state = LinkState.ENDED
        error = errors.LinkClosedError(
            f"the peer closed the connection {when}", remedy="its log may say why"
        )
        return [LinkFailed(error=error)]

    def _whole_frame(self) -> frames.Frame | None:
        """Take a DATA or TOKENS frame that has come whole with one read, as those of decode steps.

        None for any other, and for one that is not right: `_advance` says what is wrong.
        """
        if self._allowed is not _PURPOSE_KINDS[Purpose.DATA] or self._state is not LinkState.UP:
            return None
        waiting = self._received.waiting
        start = frames.HEADER.size + frames.CHECKSUMS.size if self._checked else frames.HEADER.size
        if len(waiting) < start:
            return None
        magic, number, reserved, n_meta, n_payload, epoch, step = frames.HEADER.unpack_from(waiting)
        kind = _STEP_KINDS.get(number)
        if kind is None or magic != frames.FRAME_MAGIC or reserved:
            return None
        max_meta, max_payload = self._limits[kind]
        middle = start + n_meta
        end = middle + n_payload
        if end > len(waiting) or n_meta > max_meta or n_payload > max_payload:
            return None
        if self._checked:
            of_header, of_body = frames.CHECKSUMS.unpack_from(waiting, frames.HEADER.size)
            if not frames.is_sound(waiting[: frames.HEADER.size], of_header):
                return None
            if not frames.is_sound(waiting[start:end], of_body):
                return None
        meta = bytes(waiting[start:middle])
        payload = payload_copy(waiting[middle:end])
        self._received.skip(end)
        return frames.Frame(kind=kind, epoch=epoch, step=step, meta=meta, payload=payload)

    def _advance(self, events: list[Event]) -> bool:
        """Take the next thing out of the received bytes. False when it is not whole yet."""
        if self._state is LinkState.PREAMBLE:
            return self._take_preamble()
        header = self._header or self._take_header()
        if header is None:
            return False
        if not (self._meta.fill_from(self._received) and self._payload.fill_from(self._received)):
            return False
        if self._body_checksum is not None:
            frames.check_body(self._meta.view, self._payload.view, self._body_checksum, header)
        frame = frames.Frame(
            kind=header.kind,
            epoch=header.epoch,
            step=header.step,
            meta=self._meta.view,
            payload=self._payload.view,
        )
        self._header, self._meta, self._payload = None, _NOTHING, _NOTHING
        events.append(self._accept(frame))
        return True

    def _take_preamble(self) -> bool:
        data = self._received.peek(len(frames.PREAMBLE))
        if bytes(data[:1]) in frames.TLS_RECORDS:
            if self._greeting is None:
                self.outgoing.append(frames.PREAMBLE)  # by which a holder of a key learns why
            raise errors.AuthenticationError(
                "the peer speaks TLS, as holders of a cluster key do, and this side holds none",
                remedy="run `shardnet key join` here",
            )
        if data[: len(frames.PREAMBLE_MAGIC)] != frames.PREAMBLE_MAGIC[: len(data)]:
            # Without its bytes: who had us connect there may have no business to read them.
            error = "the peer does not speak the protocol of shardnet"
            if self._greeting is None:
                raise errors.RemoteProtocolError(error)
            raise errors.RemoteProtocolError(
                f"{error}, something else answers there", remedy="check the address and port"
            )
        if len(data) < len(frames.PREAMBLE):
            return False
        version = int.from_bytes(data[len(frames.PREAMBLE_MAGIC) :], "little")
        self._received.take(len(frames.PREAMBLE))
        if self._greeting is None:
            self.outgoing.append(frames.PREAMBLE)
        if version != frames.PROTOCOL_VERSION:
            raise errors.VersionMismatchError(
                f"the peer speaks protocol version {version}, we speak {frames.PROTOCOL_VERSION}",
                remedy="update the older one: a release speaks with the one before it",
            )
        self._state = LinkState.HELLO
        if self._greeting is not None:
            self._say(hello_frame(self._greeting))
        return True

    def _take_header(self) -> frames.Header | None:
        if len(self._received) < frames.HEADER.size:
            return None
        data = self._received.peek(frames.HEADER.size)
        try:
            header = frames.unpack_header(
                data, allowed=self._allowed, limits=self._limits, state=self._state
            )
        except errors.RemoteProtocolError as error:
            if self._checked and self._state is LinkState.UP and not self._is_header_sound():
                raise errors.DamagedFrameError(error.message) from None
            raise
        self._body_checksum = None
        if self._checked and header.kind is not frames.FrameKind.HELLO:
            if len(self._received) < frames.HEADER.size + frames.CHECKSUMS.size:
                return None
            checksums = self._received.peek(frames.HEADER.size + frames.CHECKSUMS.size)[
                frames.HEADER.size :
            ]
            of_header, self._body_checksum = frames.CHECKSUMS.unpack(checksums)
            if not frames.is_sound(data, of_header):
                raise frames.damaged(header, "its header")
            self._received.take(frames.CHECKSUMS.size)
        self._received.take(frames.HEADER.size)
        self._header = header
        self._meta = FramePart(header.meta_length) if header.meta_length else _NOTHING
        self._payload = (
            FramePart(header.payload_length, aligned=True) if header.payload_length else _NOTHING
        )
        return header

    def _is_header_sound(self) -> bool:
        """Say whether the header's checksum has come and is right."""
        whole = self._received.peek(frames.HEADER.size + frames.CHECKSUMS.size)
        if len(whole) < frames.HEADER.size + frames.CHECKSUMS.size:
            return False
        return frames.is_sound(
            whole[: frames.HEADER.size], frames.CHECKSUMS.unpack(whole[frames.HEADER.size :])[0]
        )

    def _accept(self, frame: frames.Frame) -> Event:
        """Carry out what a whole frame does to the link, and say what happened."""
        if frame.kind in _DATA_KINDS:
            return FrameReceived(frame=frame)
        match frame.kind:
            case frames.FrameKind.HELLO:
                return self._accept_hello(read_hello(frame))
            case frames.FrameKind.HEARTBEAT:
                return ProgressReported(epoch=frame.epoch, step=frame.step)
            case frames.FrameKind.BYE:
                self._state = LinkState.ENDED
                return PeerLeft()
            case frames.FrameKind.ERROR:
                report = read_error(frame)
                about_link = frame.step == 0 and report.sequence is None
                if about_link or self._state is LinkState.HELLO:
                    self._state = LinkState.ENDED
                    message = f"the peer reports: {report.message}"
                    remedy = report.remedy or ""
                    return LinkFailed(
                        error=errors.error_for_code(report.code, message, remedy=remedy)
                    )
        return FrameReceived(frame=frame)

    def _accept_hello(self, peer: Hello) -> Event:
        if peer.purpose in OF_RINGS and not peer.ring:
            raise errors.RemoteProtocolError(
                f"the peer wants a {peer.purpose.value} link but names no ring"
            )
        ours = self._greeting or self._answer(peer)
        if _subject(ours) != _subject(peer):
            raise errors.RemoteProtocolError(
                f"we are here for {_subject(ours)}, the peer's hello is for {_subject(peer)}"
            )
        if self._greeting is None:
            self._say(hello_frame(ours))
        self._allowed = _PURPOSE_KINDS[peer.purpose]
        self._state = LinkState.UP
        return HelloReceived(hello=peer)

    def _say(self, frame: frames.Frame) -> None:
        self.outgoing.extend(frames.pack_frame(frame, self._limits, checked=self._checked))

    def _fail(self, error: errors.ShardnetError, events: list[Event]) -> None:
        if self._state in (LinkState.HELLO, LinkState.UP):
            self._say(error_frame(error))
        self._state = LinkState.ENDED
        events.append(LinkFailed(error=error))


_NOTHING: Final = FramePart(0)
"""The meta or payload of a frame that has none."""


def _answer_with(hello: Hello) -> HelloAnswer:
    return lambda peer: replace(hello, purpose=peer.purpose, ring=peer.ring, epoch=peer.epoch)


def _subject(hello: Hello) -> str:
    if hello.purpose in OF_RINGS:
        what = "" if hello.purpose is Purpose.DATA else f"{hello.purpose.value} of "
        return f"{what}ring {hello.ring!r} in epoch {hello.epoch}"
    return f"a {hello.purpose.value} link"
