"""Checksums of frames on a link without TLS: whatever changes on the way is noticed and named."""

from __future__ import annotations

from support.strategies.wire_strategies import feed, hello, joined

from shardnet.errors import DamagedFrameError
from shardnet.slot_operations import FreeSlot
from shardnet.types import SlotId
from shardnet.wire.connection.connection import (
    FrameReceived,
    HelloReceived,
    LinkConnection,
    LinkFailed,
)
from shardnet.wire.framing.frames import (
    CHECKSUMS,
    HEADER,
    LIMITS,
    PREAMBLE,
    Frame,
    FrameKind,
    pack_frame,
)
from shardnet.wire.messages.extras import sequence_frame
from shardnet.wire.messages.handshake import Purpose, hello_frame
from shardnet.wire.payloads.data import tokens_frame

FRAMES = [
    sequence_frame(FreeSlot(slot=SlotId(3)), epoch=3),
    Frame(kind=FrameKind.DATA, epoch=3, step=7, meta=b"meta", payload=bytes(range(40))),
    Frame(kind=FrameKind.HEARTBEAT, epoch=3, step=7),
    tokens_frame([411, 31999], epoch=3, step=7),
    Frame(kind=FrameKind.DATA, epoch=3, step=8, payload=b"the last one"),
]
OPENING = PREAMBLE + joined(pack_frame(hello_frame(hello("a", Purpose.DATA)), LIMITS))


def acceptor(*, checked: bool) -> LinkConnection:
    connection = LinkConnection(hello("b", Purpose.DATA), initiator=False, checked=checked)
    assert any(isinstance(event, HelloReceived) for event in feed(connection, OPENING))
    return connection


def packed(frame: Frame, *, checked: bool = True) -> bytes:
    return joined(pack_frame(frame, LIMITS, checked=checked))


def test_frames_with_checksums_arrive_as_they_were_sent() -> None:
    stream = b"".join(map(packed, FRAMES))
    events = feed(acceptor(checked=True), stream, [1, 24, 30, 33, 100])
    came = [event.frame for event in events if isinstance(event, FrameReceived)]
    assert came == [frame for frame in FRAMES if frame.kind is not FrameKind.HEARTBEAT]


def test_a_flipped_bit_anywhere_lets_no_frame_through() -> None:
    """One in each byte of each frame: nobody gets any part of it, nor what follows."""
    tail = packed(FRAMES[-1])
    for frame in FRAMES[:-1]:
        good = packed(frame)
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            events = feed(acceptor(checked=True), bytes(bad) + tail)
            assert len(events) == 1
            [ended] = events
            assert isinstance(ended, LinkFailed)
            assert isinstance(ended.error, DamagedFrameError)


def test_a_damaged_frame_is_named_with_its_step_and_the_peer_is_told() -> None:
    connection = acceptor(checked=True)
    connection.take_outgoing()
    bad = bytearray(packed(FRAMES[1]))
    bad[-1] ^= 1
    [ended] = feed(connection, bytes(bad))
    assert isinstance(ended, LinkFailed)
    assert isinstance(ended.error, DamagedFrameError)
    assert "the DATA frame of step 7 came damaged: what followed its header (4 + 40 b" in str(
        ended.error
    )
    assert b"DATA frame of step 7 came damaged" in joined(connection.take_outgoing())


def test_a_header_is_checked_before_memory_is_taken_for_what_it_claims() -> None:
    """A length with one bit more would wait for what never comes, and eat what does."""
    bad = bytearray(packed(FRAMES[1]))
    bad[11] ^= 1 << 3  # 128 MiB more of payload, below its cap
    [ended] = feed(acceptor(checked=True), bytes(bad[: HEADER.size + CHECKSUMS.size]))
    assert isinstance(ended, LinkFailed)
    assert "its header" in str(ended.error)


def test_frames_without_checksums_are_refused_where_they_belong() -> None:
    stream = b"".join(packed(frame, checked=False) for frame in FRAMES)
    [ended] = feed(acceptor(checked=True), stream)
    assert isinstance(ended, LinkFailed)
    assert isinstance(ended.error, DamagedFrameError)
