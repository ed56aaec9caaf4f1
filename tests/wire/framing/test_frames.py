"""The frame header: round trip, caps before memory, kinds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.wire.framing.frames import (
    HEADER,
    LIMITS,
    Frame,
    FrameKind,
    Header,
    pack_frame,
    unpack_header,
)

ALL_KINDS = frozenset(FrameKind)


def unpack(data: bytes, allowed: frozenset[FrameKind] = ALL_KINDS) -> Header:
    return unpack_header(data, allowed=allowed, limits=LIMITS, state="in this test")


def header_bytes(
    kind: int, *, magic: int = 0x4E53, reserved: int = 0, meta: int = 0, payload: int = 0
) -> bytes:
    return struct.pack("<HBBIIIQ", magic, kind, reserved, meta, payload, 0, 0)


@given(
    epoch=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**64 - 1),
    meta=st.binary(max_size=50),
    payload=st.binary(max_size=50),
)
def test_header_round_trip(epoch: int, step: int, meta: bytes, payload: bytes) -> None:
    frame = Frame(kind=FrameKind.DATA, epoch=epoch, step=step, meta=meta, payload=payload)
    data = b"".join(pack_frame(frame, LIMITS))
    assert unpack(data) == Header(
        kind=FrameKind.DATA,
        meta_length=len(meta),
        payload_length=len(payload),
        epoch=epoch,
        step=step,
    )
    assert data[HEADER.size :] == meta + payload


def test_header_is_24_bytes() -> None:
    assert HEADER.size == 24


@pytest.mark.parametrize("kind", FrameKind)
def test_a_length_may_reach_its_cap_and_not_one_byte_more(kind: FrameKind) -> None:
    max_meta, max_payload = LIMITS[kind]
    at_cap = unpack(header_bytes(kind, meta=max_meta, payload=max_payload))
    assert (at_cap.meta_length, at_cap.payload_length) == (max_meta, max_payload)
    with pytest.raises(RemoteProtocolError, match=f"{kind.name} frame claims {max_meta + 1} "):
        unpack(header_bytes(kind, meta=max_meta + 1))
    with pytest.raises(RemoteProtocolError, match=f"at most {max_payload} are allowed"):
        unpack(header_bytes(kind, payload=max_payload + 1))


def test_what_is_not_allowed_now_is_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match="DATA frame is not allowed in this test"):
        unpack(header_bytes(FrameKind.DATA), allowed=frozenset({FrameKind.HELLO}))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (header_bytes(0), "unknown kind 0"),
        (header_bytes(200), "unknown kind 200"),
        (header_bytes(FrameKind.BYE, magic=0x534E), "0x534e"),
        (header_bytes(FrameKind.DATA, reserved=2), "0x02 where 0 belongs"),
    ],
)
def test_a_damaged_header_is_the_peers_fault(data: bytes, what: str) -> None:
    with pytest.raises(RemoteProtocolError, match=what):
        unpack(data)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(kind=FrameKind.HEARTBEAT, meta=b"x"),
        Frame(kind=FrameKind.BYE, payload=b"x"),
        Frame(kind=FrameKind.HELLO, meta=bytes(LIMITS[FrameKind.HELLO][0] + 1)),
        Frame(kind=FrameKind.BYE, epoch=2**32),
        Frame(kind=FrameKind.BYE, step=-1),
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        pack_frame(frame, LIMITS)


def test_the_payload_is_not_copied_and_may_have_any_shape() -> None:
    payload = bytearray(48)
    frame = Frame(kind=FrameKind.DATA, payload=memoryview(payload).cast("f", (3, 4)))
    head, sent = pack_frame(frame, LIMITS)
    assert unpack(bytes(head)).payload_length == 48
    payload[0] = 7
    assert isinstance(sent, memoryview)
    assert sent[0] == 7
