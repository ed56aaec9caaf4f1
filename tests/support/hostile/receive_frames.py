"""Mutated frames through the connection and all decoders.

Only documented errors may come of them, quickly and in little memory. `scripts/fuzz` calls
`fuzz_frames`; a round that fails raises Finding, which has the bytes.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from support.hostile.mutate_frames import good_frames, mutated, noise, sealed
from support.strategies.part_frames import read_part
from support.strategies.wire_strategies import feed, hello

from shardnet.errors import RemoteProtocolError, ShardnetError
from shardnet.wire.connection.connection import (
    Event,
    FrameReceived,
    LinkConnection,
    LinkFailed,
    LinkState,
)
from shardnet.wire.framing.frames import LIMITS, PREAMBLE, Frame, FrameKind, pack_frame
from shardnet.wire.messages.bulk import read_bulk
from shardnet.wire.messages.control import read_control
from shardnet.wire.messages.extras import read_extras, read_sequence
from shardnet.wire.messages.handshake import Purpose, hello_frame, read_error, read_hello
from shardnet.wire.payloads.data import read_data, read_tokens
from shardnet.wire.payloads.rows import read_rows

SLOW_S: Final = 0.5
"""A frame that takes more processor time than this is a finding."""
MOST_GROWTH_BYTES: Final = 512 << 20
"""And so is one after which the process has grown by more."""
MOST_TEXT: Final = 3000
"""And an error that repeats more of what came."""
MOST_SAID: Final = 64
"""Frames that one link receives, if none ends it."""

READERS: Final[dict[FrameKind, Callable[[Frame], object]]] = {
    FrameKind.HELLO: read_hello,
    FrameKind.ERROR: read_error,
    FrameKind.CONTROL: read_control,
    FrameKind.DATA: read_data,
    FrameKind.TOKENS: lambda frame: read_tokens(frame, n_sampled=len(frame.payload) // 4),
    FrameKind.EXTRAS: read_extras,
    FrameKind.SEQUENCE: read_sequence,
    FrameKind.BULK: read_bulk,
    FrameKind.ROWS: read_rows,
    FrameKind.PART: read_part,
}
PURPOSES: Final[dict[int, Purpose]] = {
    FrameKind.CONTROL: Purpose.CONTROL,
    FrameKind.BULK: Purpose.BULK,
    FrameKind.PART: Purpose.PARTS,
}
"""The purpose of the links that a kind of frame travels on, where it is not data."""
_KINDS: Final = [*READERS]


class Finding(Exception):
    """A frame that did what no frame may do. `data` is what was received after the handshake."""

    def __init__(self, what: str, data: bytes) -> None:
        super().__init__(f"{what}: {len(data)} bytes, {data[:64].hex()}")
        self.data = data


@dataclass(slots=True)
class Figures:
    """What became of mutated frames."""

    n_frames: int = 0
    n_read: int = 0
    n_refused: int = 0
    slowest_s: float = 0.0
    n_pings: int = 0
    slowest_ping_s: float = 0.0
    grown_bytes: int = 0
    slow: list[bytes] = field(default_factory=list)
    """Frames that took longer than SLOW_S."""


class Receiver:
    """The side of a link of `purpose` that receives frames, and reads every one.

    A link on which frame after frame comes whole stays up for MOST_SAID of them. On a `checked` one
    frames have checksums.
    """

    def __init__(self, purpose: Purpose, *, checked: bool) -> None:
        self._purpose = purpose
        self._checked = checked
        self._connection: LinkConnection | None = None
        self._said: list[bytes] = []

    def take(self, data: bytes, *, is_last: bool = False) -> tuple[int, int]:
        """Receive the bytes of a frame; returns how many were (read, refused).

        Raises Finding for whatever is not a documented error.
        """
        self._said.append(data)
        try:
            connection = self._connection or self._opened()
            events = feed(connection, data)
            is_whole = len(events) == 1 and isinstance(events[0], FrameReceived)
            if is_last or not is_whole or len(self._said) == MOST_SAID:
                events += connection.eof()
                if connection.state is not LinkState.ENDED:
                    raise self._finding("the link has not ended with its stream")
            n_read, n_refused = self._read(events)
        except Finding:
            raise
        except (MemoryError, Exception) as error:
            raise self._finding(f"{type(error).__name__}: {error}") from error
        if connection.state is LinkState.ENDED:
            self._connection, self._said = None, []
        return n_read, n_refused + (not n_read)

    def _opened(self) -> LinkConnection:
        connection = self._connection = LinkConnection(
            _HELLO[self._purpose], initiator=False, limits=LIMITS, checked=self._checked
        )
        feed(connection, _OPENING[self._purpose])
        return connection

    def _read(self, events: Sequence[Event]) -> tuple[int, int]:
        n_read = n_refused = 0
        for event in events:
            if isinstance(event, LinkFailed) and not isinstance(event.error, ShardnetError):
                raise self._finding(f"a link failed with {event.error!r}")
            if isinstance(event, FrameReceived):
                is_good = self._is_read(event.frame)
                n_read, n_refused = n_read + is_good, n_refused + (not is_good)
        return n_read, n_refused

    def _is_read(self, frame: Frame) -> bool:
        """Read a frame as its own kind, and as another one. Says whether it was read as its own."""
        is_good = False
        for kind in {frame.kind, _KINDS[len(self._said[-1]) % len(_KINDS)]} & READERS.keys():
            try:
                READERS[kind](frame)
            except RemoteProtocolError as error:
                if len(str(error)) > MOST_TEXT:
                    raise self._finding(f"an error has {len(str(error))} characters") from error
            else:
                is_good |= kind is frame.kind
        return is_good

    def _finding(self, what: str) -> Finding:
        return Finding(what, b"".join(self._said))


_HELLO: Final = {purpose: hello("b", purpose) for purpose in Purpose}
_OPENING: Final = {
    purpose: PREAMBLE + b"".join(pack_frame(hello_frame(hello("a", purpose)), LIMITS))
    for purpose in Purpose
}


def receive(data: bytes, purpose: Purpose) -> tuple[int, int]:
    """Let a new link of `purpose` receive `data` alone. As `Receiver.take`."""
    return Receiver(purpose, checked=False).take(data, is_last=True)


def fuzz_frames(n: int, seed: int, frames: list[Frame] | None = None) -> Figures:
    """Mutate `n` frames, receive and read them. Raises Finding.

    `frames` are those to begin with, by default `good_frames`. The figures tell of frames that took
    more than SLOW_S, and by how much the process grew.
    """
    rng, figures = random.Random(seed), Figures()
    frames = frames or good_frames()
    receivers = {
        (purpose, checked): Receiver(purpose, checked=checked)
        for purpose in Purpose
        for checked in (True, False)
    }
    grown_from = 0
    for number in range(n):
        frame = rng.choice(frames)
        data = mutated(frame, rng)
        purpose = PURPOSES.get(frame.kind, Purpose.DATA)
        began = time.process_time()
        if checked := number % 4 == 3:
            data = sealed(data)
            data = noise(data, rng) if rng.random() < 0.1 else data
        n_read, n_refused = receivers[purpose, checked].take(data)
        took_s = time.process_time() - began
        figures.n_frames += 1
        figures.n_read += n_read
        figures.n_refused += n_refused
        figures.slowest_s = max(figures.slowest_s, took_s)
        if took_s > SLOW_S:
            figures.slow.append(data)
        if number == min(1000, n // 10):
            grown_from = most_bytes()
        elif grown_from and number % 64 == 0:
            figures.grown_bytes = most_bytes() - grown_from
            if figures.grown_bytes > MOST_GROWTH_BYTES:
                raise Finding(f"the process grew by {figures.grown_bytes} bytes", data)
    return figures


def most_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
