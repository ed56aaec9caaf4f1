"""The link over any asyncio transport: a link state machine, a bounded queue and two clocks.

Knows asyncio transports, back-pressure, heartbeats and silence. Knows nothing of sockets, and
leaves every decision about bytes to wire/connection/connection.py.
"""

from __future__ import annotations

import asyncio
import errno
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

from msgspec import UNSET

from shardnet.errors import (
    LinkClosedError,
    LocalProtocolError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.transport.address import format_address
from shardnet.transport.deadline import IdleTimeout, SendTimeout
from shardnet.transport.link import DirectWriter, LinkOptions, Signers
from shardnet.transport.traffic import Meter
from shardnet.wire.connection import connection
from shardnet.wire.framing.frames import Buffer, Frame, FrameKind
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose, error_frame

if TYPE_CHECKING:
    from shardnet.transport.direct_connection import DirectConnection

_ANSWERS = frozenset({FrameKind.DATA, FrameKind.TOKENS, FrameKind.ERROR})
"""What a stage sends when it has completed a step."""


class AsyncioLink(asyncio.BufferedProtocol):
    """A `Link` whose bytes an asyncio transport moves.

    It lives in this order: `connection_made`, `wait_up`, frames, an end (`_end`, exactly once, with
    the error that later calls raise), `connection_lost`. Where it is `checked`, its frames carry
    checksums.
    """

    def __init__(
        self,
        hello: Hello | connection.HelloAnswer,
        *,
        initiator: bool,
        options: LinkOptions,
        checked: bool = False,
    ) -> None:
        self._options = options
        self._is_initiator = initiator
        self._loop = asyncio.get_running_loop()
        self._connection = connection.LinkConnection(hello, initiator=initiator, checked=checked)
        self._transport: asyncio.Transport | None = None
        self._peer: Hello | None = None
        self.peer_address = "?"
        self.signers: Signers | None = None
        self.peer_progress = (0, 0)
        self._came_step = 0
        self._frames: deque[tuple[Frame, int]] = deque()
        self.arrived_ns = 0
        """See `Link`; a plain attribute, as it is read for every frame."""
        self._error: ShardnetError | None = None
        self.was_cut_off = False
        """Whether the peer's end of the connection came before its hello, and before any reason."""
        self.was_left = False
        self._settled = asyncio.Event()
        self._lost = asyncio.Event()
        self._receiver: asyncio.Future[None] | None = None
        self._take: Callable[[Frame], bool] | None = None
        self._direct: DirectWriter | None = None
        self._drainers: list[asyncio.Future[None]] = []
        self._reading_paused = False
        self.is_full = False
        """See `Link`."""
        self._lingering = False
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s = options.silence_s
        self._idle = IdleTimeout(self._silence_s, self._loop.time())
        self._sending = SendTimeout(options.user_timeout_s, self._loop.time())
        self._tick_s = min(options.heartbeat_s, self._silence_s / 4)
        self._sent_since_tick = False
        socket_of = weakref.WeakMethod(self._socket)  # the meter must not keep the link
        self._meter = Meter(tcp=lambda: (of := socket_of()) and of())

    # --- what the link's user sees

    @property
    def peer(self) -> Hello:
        """See `Link`."""
        if self._peer is None:
            raise LocalProtocolError("the peer's hello has not come yet")
        return self._peer

    @property
    def closed(self) -> bool:
        """See `Link`."""
        return self._error is not None

    def send(self, *frames: Frame) -> None:
        """See `Link`."""
        self._raise_if_ended()
        self._check_unsent()
        if self._direct is None:
            self._write(self._packed(frames))
        else:
            with self._direct.lock:
                self._write(self._packed(frames))

    def send_now(self, *frames: Frame) -> bool:
        """See `Link`."""
        direct = self._direct
        if direct is None:
            return False
        with direct.lock:
            if self._error is not None:
                self._raise_if_ended()
            if self._lingering:
                return False
            buffers = self._packed(frames)
            if not direct.write_now(buffers):
                return False
            self._meter.sent_bytes += sum(map(len, buffers))
            self._sent_since_tick = True
        return True

    def offer(self, take: Callable[[Frame], bool]) -> None:
        """See `Link`."""
        self._take = take

    async def drain(self, *, shared: bool = False) -> None:
        """See `Link`."""
        self._raise_if_ended()
        if not self.is_full:
            return
        waiter = self._loop.create_future()
        self._drainers.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not shared:
                self.abort("a send was cancelled, perhaps in the middle of a frame")
            raise
        finally:
            self._drainers.remove(waiter)
        self._raise_if_ended()

    async def receive(self) -> Frame:
        """See `Link`."""
        if self._receiver is not None:
            raise LocalProtocolError("two tasks receive from one link")
        while not self._frames:
            self._raise_if_ended()
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        frame, self.arrived_ns = self._frames.popleft()
        if self._reading_paused and len(self._frames) <= self._options.receive_frames // 2:
            self._resume_reading()
        return frame

    async def detach(self) -> DirectConnection:
        """See `Link`: here there is no socket."""
        raise LocalProtocolError("this link has no socket that could be handed over")

    async def close(self) -> None:
        """See `Link`."""
        if self._error is None:
            if self._peer is not None:
                self._write(self._connection.send(Frame(kind=FrameKind.BYE)))
            self._end(LinkClosedError("this side has closed the link"), is_regular=True)
            self._linger()
        self._frames.clear()
        try:
            await self._lost.wait()
        except asyncio.CancelledError:
            self._abort_transport()
            raise

    def abort(self, reason: str) -> None:
        """See `Link`."""
        self._end(LinkClosedError(reason))
        self._frames.clear()
        self._abort_transport()

    async def wait_up(self) -> None:
        """Wait for the peer's hello. Raises the error that ended the link before it."""
        await self._settled.wait()
        if self._peer is None:
            self._raise_if_ended()

    async def wait_lost(self) -> None:
        """Wait until the connection is gone."""
        await self._lost.wait()

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        host, port = (transport.get_extra_info("peername") or ("a peer that left", 0))[:2]
        self.peer_address = format_address(host, port)
        if self._error is None:
            self._write(self._connection.start())
        else:
            self._abort_transport()  # we gave up before the connection stood

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the transport puts the next received bytes."""
        return self._connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what `nbytes` received bytes completed; after the end they are discarded."""
        if self._lingering:
            return
        self._idle.since = self._loop.time()
        self._meter.received_bytes += nbytes
        for event in self._connection.received(nbytes):
            self._handle(event)
        if self._connection.outgoing:
            self._write(self._connection.take_outgoing())
        if self._error is not None:
            self._linger()
        elif len(self._frames) >= self._options.receive_frames:
            self._pause_reading()

    def eof_received(self) -> None:
        """Note the end of the peer's bytes; the transport then closes itself."""
        self._note_cut_off()
        for event in self._connection.eof():
            self._handle(event)
        self._linger()

    def failed(self, error: ShardnetError) -> None:
        """Record that the transport is closed for sending; it has sent the peer what it could."""
        if isinstance(error, LinkClosedError):
            self._note_cut_off()
        self._end(error)
        self._linger()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        self._note_cut_off()
        self._end(_lost_error(exc))
        self._stop_timer()
        if self._direct is not None:
            self._direct.stop()
        self._transport = None  # which knows this link: nobody should have to look for such rings
        self._lost.set()

    def pause_writing(self) -> None:
        """Make `drain` wait."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Let `drain` return."""
        self.is_full = False
        self._wake(*self._drainers)

    # --- events and the end

    def _handle(self, event: connection.Event) -> None:
        if self._error is not None:
            return  # what comes after the end is for nobody
        match event:
            case connection.HelloReceived():
                self._peer = event.hello
                if self._peer.role is PeerRole.CLIENT:
                    self._silence_s = self._options.client_silence_s
                self._tick_s = min(self._options.heartbeat_s, self._silence_s / 4)
                self._idle = IdleTimeout(self._silence_s, self._loop.time())
                if self._options.traffic is not None:
                    self._options.traffic.up(self._peer, self._meter)
                self._settled.set()
                if self._peer.purpose is Purpose.PARTS:
                    self._pause_reading()  # what comes is for who takes the connection
                    return
                if self._peer.purpose is Purpose.DATA:
                    self._direct = self._direct_writer()
                self._timer = self._loop.call_later(self._tick_s, self._tick)
            case connection.FrameReceived():
                arrived_ns = time.perf_counter_ns()
                if event.frame.kind in _ANSWERS:
                    self._came_step = event.frame.step
                if not self._taken(event.frame, arrived_ns):
                    self._frames.append((event.frame, arrived_ns))
                    self._wake(self._receiver)
            case connection.ProgressReported():
                self.peer_progress = (event.epoch, event.step)
                if self._lacks_steps():
                    self._end(
                        RemoteProtocolError(
                            f"it has completed step {event.step} by its own account, and after "
                            f"step {self._came_step} none came"
                        )
                    )
                    self._abort_transport()
            case connection.PeerLeft():
                self._end(LinkClosedError("the peer has closed the link"), is_regular=True)
            case connection.LinkFailed():
                self._end(event.error)
            case _:
                assert_never(event)

    def _lacks_steps(self) -> bool:
        """Whether a stage before this one has completed steps and keeps them to itself.

        What it sends of a step comes before the heartbeat that tells of the step.
        """
        peer, (epoch, step) = self.peer, self.peer_progress
        is_before = peer.purpose is Purpose.DATA and not self._is_initiator and peer.shard is UNSET
        return is_before and epoch == peer.epoch and step > self._came_step

    def _taken(self, frame: Frame, arrived_ns: int) -> bool:
        """Offer a frame for which the receiver waits; return whether it needs to be received no
        more."""
        receiver = self._receiver
        if self._take is None or receiver is None or receiver.done() or self._frames:
            return False
        self.arrived_ns = arrived_ns
        try:
            return self._take(frame)
        except Exception as error:  # whoever receives handles it: this is the transport's call
            receiver.set_exception(error)
            return True

    def _note_cut_off(self) -> None:
        if self._error is None and self._peer is None:
            self.was_cut_off = True

    def _end(self, error: ShardnetError, *, is_regular: bool = False) -> None:
        """Settle how the link ended, once; everyone who waits learns it.

        `is_regular`: one side wanted it.
        """
        if self._error is not None:
            return
        self.was_left = is_regular
        if self._peer is not None and self._options.traffic is not None:
            self._options.traffic.down(self._peer, self._meter, failed=not is_regular)
        who = f"{self._peer.name} ({self.peer_address})" if self._peer else self.peer_address
        self._error = error.at(who)
        self._error.__cause__ = error.__cause__
        self._stop_timer()
        self._settled.set()
        self._wake(self._receiver, *self._drainers)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            error = self._error
            raise type(error)(error.message, remedy=error.remedy) from error.__cause__

    def _linger(self) -> None:
        """Send what is left, then wait for the peer to close first, within `close_s`.

        Closing over unread bytes would make the kernel reset the connection, and the peer might
        never read our last words.
        """
        if self._lingering:
            return
        self._lingering = True
        self._resume_reading()
        self._timer = self._loop.call_later(self._options.close_s, self._abort_transport)
        if self._transport is not None and not self._transport.is_closing():
            if self._direct is not None:
                self._direct.writelines(())
            try:
                self._transport.write_eof()
            except OSError:  # asyncio's own says so where the peer has reset the connection
                self._transport.abort()

    def _abort_transport(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- the clock

    def _tick(self) -> None:
        """Send a heartbeat if nothing else was sent, and fail the link if the peer is silent."""
        now = self._loop.time()
        unsent_bytes = self._unsent_bytes()
        if self._sending.is_over(now, unsent_bytes=unsent_bytes):
            self._end(
                PeerSilentError(f"it has read nothing for {self._options.user_timeout_s:g} s")
            )
            self._abort_transport()
            return
        if self._idle.is_over(now, reading=not self._reading_paused, unsent_bytes=unsent_bytes):
            self._cut_for_silence()
            return
        if not self._sent_since_tick and not self.is_full:
            epoch, step = self._options.progress()
            self._write(
                self._connection.send(Frame(kind=FrameKind.HEARTBEAT, epoch=epoch, step=step))
            )
        self._sent_since_tick = False
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _cut_for_silence(self) -> None:
        """End the link. Tell why to a peer that may come to itself and read on, but not on a data
        link: its ring is broken, and the next one must not wait.
        """
        silence_s = self._silence_s
        self._end(
            PeerSilentError(
                f"nothing came for {silence_s:g} s; the peer is frozen, or the network between "
                "is cut"
            )
        )
        if self.peer.purpose is Purpose.DATA:
            self._abort_transport()
            return
        told = PeerSilentError(
            f"nothing came from this side for {silence_s:g} s: it stood still, or the network "
            "between was cut"
        )
        self._write(self._connection.send(error_frame(told)))
        self._linger()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the transport

    def _direct_writer(self) -> DirectWriter | None:
        """Return what writes past the loop, if the transport can."""
        return None

    def _unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _check_unsent(self) -> None:
        """End a control or bulk link to a peer that does not read: not all wait for `drain` there.

        The frame that is being sent is lost with the link; the next one raises why.
        """
        if not self.is_full or self.peer.purpose is Purpose.DATA:
            return
        if self._unsent_bytes() > self._options.unsent_bytes:
            most = self._options.unsent_bytes
            self._end(PeerSilentError(f"it does not read: more than {most} bytes wait to be sent"))
            self._abort_transport()

    def _packed(self, frames: tuple[Frame, ...]) -> list[Buffer]:
        if len(frames) == 1:
            return self._connection.send(frames[0])
        return [part for frame in frames for part in self._connection.send(frame)]

    def _write(self, buffers: list[Buffer]) -> None:
        # A transport that is closing has lost its connection: what ended it comes by itself.
        # After the end of our own half nothing may follow.
        if self._lingering or self._transport is None or self._transport.is_closing():
            return
        if not buffers:
            return
        if self._direct is None:
            self._transport.writelines(buffers)
            self._meter.sent_bytes += sum(map(len, buffers))
        else:
            with self._direct.lock:
                self._direct.writelines(buffers)
                self._meter.sent_bytes += sum(map(len, buffers))
        self._sent_since_tick = True

    def _socket(self) -> Any:
        return self._transport.get_extra_info("socket") if self._transport is not None else None

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._idle.since = self._loop.time()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    @staticmethod
    def _wake(*waiters: asyncio.Future[None] | None) -> None:
        for waiter in waiters:
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


_NO_ANSWER: Final = 121
"""ERROR_SEM_TIMEOUT: what a completion port of Windows says in place of ETIMEDOUT."""


def _lost_error(exc: Exception | None) -> ShardnetError:
    match exc:
        case OSError() if exc.errno == errno.ETIMEDOUT or getattr(exc, "winerror", 0) == _NO_ANSWER:
            error: ShardnetError = PeerSilentError("the network acknowledged nothing any more")
        case OSError():
            error = LinkClosedError(f"the connection broke ({exc}); the peer may have crashed")
        case _:
            error = LinkClosedError("the connection is closed")
    error.__cause__ = exc
    return error
