"""What a link is to everything above: frames out, frames in, a clean or a named end.

Knows the interface and the options every transport shares. Knows nothing of TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from shardnet.wire.framing.frames import MIB, Buffer, Frame
from shardnet.wire.messages.handshake import Hello

if TYPE_CHECKING:  # not every link needs the library behind it
    from shardnet.transport.direct_connection import DirectConnection
    from shardnet.transport.identity import Identity
    from shardnet.transport.traffic import Traffic


class Signers(NamedTuple):
    """The cluster keys of a link, each as `Identity.signer`: what we have shown, what the peer has,
    and the oldest one whose holders we believed then."""

    own: bytes
    peer: bytes
    oldest: bytes


def _no_progress() -> tuple[int, int]:
    return (0, 0)


HEARTBEAT_S: Final = 0.4
SILENCE_S: Final = 4.4
"""With these a link to a peer that says nothing fails after 3.6 to 4.8 s, and one to a peer that
stands still for 3 s does not: heartbeats are up to twice their interval apart."""
CLIENT_SILENCE_S: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How a link behaves.

    `identity`: with it TCP carries mutual TLS 1.3, and only holders of the same key are spoken to.
    `heartbeat_s`: a heartbeat goes out when nothing else did for this long.
    `silence_s`: a peer that sends no byte for this long fails the link (PeerSilentError): a node,
    or for `client_silence_s` a client, whose loop may serve other things too.
    `handshake_s`: from the first attempt to connect to the peer's hello.
    `close_s`: how long a last word may take to leave and the peer to answer it.
    `user_timeout_s`: how long a peer may read nothing of what waits to be sent, and on Linux
    TCP_USER_TIMEOUT. It counts also against a live peer that has stopped reading because it is
    busy, so it is far longer than `silence_s`.
    `unsent_bytes`: so much may wait on a control or bulk link when more is to be sent; a peer that
    lets more wait ends the link. It is more than two of the largest control frames: these wait for
    a moment though the peer reads. On data links every sender waits for `drain`.
    `receive_frames`: reading pauses while this many received frames wait; what one read of at most
    64 KiB has already brought still joins them.
    `socket_buffer_bytes`: size of the kernel's buffers each way, None for its own choice.
    `max_unfinished`: connections that a listener holds before their hello, fewer where the process
    may have few files open. `max_handshakes`: of these, handshakes under way at one time, TLS and
    hello, and of them `max_handshakes_per_host` from one host; the others wait for their turn.
    `progress`: gives (epoch, last completed step) for heartbeats.
    `traffic`: counts what links to other nodes carry.
    """

    identity: Identity | None = None
    heartbeat_s: float = HEARTBEAT_S
    silence_s: float = SILENCE_S
    client_silence_s: float = CLIENT_SILENCE_S
    handshake_s: float = 5.0
    close_s: float = 2.0
    user_timeout_s: float = 120.0
    unsent_bytes: int = 80 * MIB
    receive_frames: int = 64
    socket_buffer_bytes: int | None = None
    max_unfinished: int = 512
    max_handshakes: int = 128
    max_handshakes_per_host: int = 16
    progress: Callable[[], tuple[int, int]] = _no_progress
    traffic: Traffic | None = None


class DirectWriter(Protocol):
    """Writes to a connection from any thread, in order with what its transport sends."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by whoever writes; whoever holds it may take it again."""

    def write_now(self, buffers: Sequence[Buffer]) -> bool:
        """Write at once if nothing waits before; return whether that was done."""

    def writelines(self, buffers: Iterable[Buffer], /) -> None:
        """Write by the transport, after what `write_now` left. For the loop."""

    def stop(self) -> None:
        """Write nothing any more. For the loop."""


class Link(Protocol):
    """One connection between two nodes, or a client and a node, for one purpose.

    Every error names the peer. After a failure `receive` still gives the frames that came before.
    Whoever has a link ends it with `close` or `abort`, also when the peer has ended it: until both
    sides have said their last word, for up to `close_s`, the connection stays open.
    """

    @property
    def peer(self) -> Hello:
        """The peer's hello."""

    @property
    def peer_address(self) -> str:
        """`host:port` of the peer's end."""

    @property
    def signers(self) -> Signers | None:
        """By which cluster keys both ends have come, None without TLS."""

    @property
    def peer_progress(self) -> tuple[int, int]:
        """(epoch, last completed step) in the peer's last heartbeat."""

    @property
    def arrived_ns(self) -> int:
        """When the frame that `receive` gave last had come whole (time.perf_counter_ns)."""

    @property
    def closed(self) -> bool:
        """Whether the link has ended: nothing can be sent any more."""

    @property
    def was_left(self) -> bool:
        """Whether one side has ended it with a BYE."""

    def send(self, *frames: Frame) -> None:
        """Hand `frames` to the transport in one go, without copying or waiting.

        Their payloads must not change any more: the last part may wait to be sent even when `drain`
        has returned. Raises the error that ended the link, or LocalProtocolError when a frame is
        not allowed.
        """

    @property
    def is_full(self) -> bool:
        """Whether more waits to be sent than the transport likes: `drain` would wait."""

    def send_now(self, *frames: Frame) -> bool:
        """Write `frames` to the network from any thread, if nothing waits to be sent before them.

        Returns whether that was done; if not, nothing was sent, and `send` is left. Raises as
        `send`.
        """

    async def drain(self, *, shared: bool = False) -> None:
        """Wait while more waits to be sent than the transport likes; call it after `send`.

        The wait ends in PeerSilentError when the peer falls silent. Cancelling it aborts the link,
        since the frame may be half sent; not so if the link is `shared` with other senders: the
        transport then sends what it was given. Raises the error that ended the link.
        """

    async def receive(self) -> Frame:
        """Wait for the next frame. Only one task may wait at a time.

        Raises the error that ended the link: LinkClosedError after BYE or a lost connection,
        PeerSilentError, RemoteProtocolError, or what the peer reported in an ERROR frame.
        """

    def offer(self, take: Callable[[Frame], bool]) -> None:
        """Offer each frame that comes while `receive` waits to `take` first, at once.

        A frame that it returns False for is received. What it raises is raised by `receive`.
        """

    async def detach(self) -> DirectConnection:
        """Hand the connection of a PARTS link, which is up, to whoever moves its bytes from now on.

        The link is over then. Raises the error that ended it before, LocalProtocolError where there
        is no socket.
        """

    async def close(self) -> None:
        """Say goodbye and close; returns when the connection is gone, within `close_s`."""

    def abort(self, reason: str) -> None:
        """Drop the connection at once; what waits to be sent is lost."""
