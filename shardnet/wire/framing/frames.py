"""Frames: the header's 24 bytes, the kinds, and the caps that are checked before memory is taken.

Knows the layout of docs/protocol.md sections 2 to 4. Knows nothing of what meta and payload say,
and nothing of sockets.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from shardnet.errors import DamagedFrameError, LocalProtocolError, RemoteProtocolError

Buffer = bytes | bytearray | memoryview

PROTOCOL_VERSION: Final = 4
PREAMBLE_MAGIC: Final = b"shrdnt"
PREAMBLE: Final = PREAMBLE_MAGIC + PROTOCOL_VERSION.to_bytes(2, "little")

TLS_RECORDS: Final = (b"\x15", b"\x16")
"""How the bytes of a peer begin that answers or opens in TLS: an alert or a handshake."""

FRAME_MAGIC: Final = 0x4E53
HEADER: Final = struct.Struct("<HBBIIIQ")
"""magic, kind, reserved, meta length, payload length, epoch, step."""
CHECKSUMS: Final = struct.Struct("<II")
"""Behind the header where a link has them: of the header, of meta and payload."""
_LOW_HALF: Final = 0xFFFFFFFF

KIB: Final = 1024
MIB: Final = 1024 * KIB


class FrameKind(enum.IntEnum):
    """What a frame is. The numbers stand in docs/protocol.md section 4."""

    HELLO = 1
    ERROR = 2
    HEARTBEAT = 3
    BYE = 4
    CONTROL = 5
    DATA = 6
    TOKENS = 7
    EXTRAS = 8
    SEQUENCE = 9
    BULK = 10
    ROWS = 11
    PART = 12


_KIND_OF_NUMBER: Final = {int(kind): kind for kind in FrameKind}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One length-prefixed message on a link.

    `meta` and `payload` are flat bytes. The payload of a received frame is a writable memoryview
    which nobody else holds; from 16 KiB on its first byte is aligned to 64 bytes. The payload of a
    sent frame must not change any more.
    """

    kind: FrameKind
    epoch: int = 0
    step: int = 0
    meta: Buffer = b""
    payload: Buffer = b""


Limits = Mapping[FrameKind, tuple[int, int]]
"""Largest meta and payload of each kind, in bytes, while a link is up."""
LIMITS: Final[Limits] = dict.fromkeys(FrameKind, (0, 0)) | {
    FrameKind.HELLO: (4 * KIB, 0),
    FrameKind.ERROR: (4 * KIB, 0),
    FrameKind.CONTROL: (32 * MIB, 0),
    FrameKind.DATA: (1 * MIB, 256 * MIB),
    FrameKind.TOKENS: (8 * KIB, 64 * KIB),
    FrameKind.EXTRAS: (16 * MIB, 0),
    FrameKind.SEQUENCE: (64 * KIB, 0),
    FrameKind.BULK: (1 * MIB, 1 * MIB),
    FrameKind.ROWS: (24, 16 * MIB),
    FrameKind.PART: (16, 256 * MIB),
}


class Header(msgspec.Struct, frozen=True):
    """A frame's header, checked: kind known and lengths within the caps."""

    kind: FrameKind
    meta_length: int
    payload_length: int
    epoch: int
    step: int


def unpack_header(
    data: Buffer, *, allowed: frozenset[FrameKind], limits: Limits, state: str
) -> Header:
    """Read and check the 24 bytes at the start of `data`. Takes no memory for meta or payload.

    `allowed` are the kinds that may come now and `state` says when now is, for the message.

    Raises RemoteProtocolError when the magic, kind, reserved byte or a length is not allowed.
    """
    magic, number, reserved, meta_length, payload_length, epoch, step = HEADER.unpack_from(data)
    if magic != FRAME_MAGIC:
        raise RemoteProtocolError(
            f"a frame should start with {FRAME_MAGIC:#06x}, got {magic:#06x}: the stream is damaged"
        )
    kind = _KIND_OF_NUMBER.get(number)
    if kind is None:
        raise RemoteProtocolError(f"a frame of unknown kind {number} came {state}")
    if kind not in allowed:
        raise RemoteProtocolError(f"a {kind.name} frame is not allowed {state}")
    if reserved:
        raise RemoteProtocolError(f"a {kind.name} frame came with {reserved:#04x} where 0 belongs")
    max_meta, max_payload = limits[kind]
    if meta_length > max_meta:
        raise _above_cap(kind, "meta", meta_length, max_meta)
    if payload_length > max_payload:
        raise _above_cap(kind, "payload", payload_length, max_payload)
    return Header(kind, meta_length, payload_length, epoch, step)


def _above_cap(kind: FrameKind, part: str, length: int, cap: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"a {kind.name} frame claims {length} bytes of {part}; at most {cap} are allowed"
    )


def is_sound(part: Buffer, checksum: int) -> bool:
    """Say whether a header, or all that follows one, is that of its checksum."""
    return xxh3_64_intdigest(part) & _LOW_HALF == checksum


def check_body(meta: Buffer, payload: Buffer, checksum: int, what: Header) -> None:
    """Compare what came behind the header `what` with its checksum. Raises DamagedFrameError."""
    if body_checksum(meta, payload) != checksum:
        raise damaged(what, f"what followed its header ({len(meta)} + {len(payload)} bytes)")


def body_checksum(meta: Buffer, payload: Buffer) -> int:
    """Return the checksum of what follows a header, as CHECKSUMS has it."""
    if not len(payload):
        return xxh3_64_intdigest(meta) & _LOW_HALF
    whole = xxh3_64(meta)
    whole.update(payload)
    return whole.intdigest() & _LOW_HALF


def damaged(what: Header, part: str) -> DamagedFrameError:
    """Make the error of a frame whose `part` is not that of its checksum."""
    return DamagedFrameError(
        f"the {what.kind.name} frame of step {what.step} came damaged: {part} and the checksum "
        "that its sender made are not the same",
        remedy="check cables, network cards and memory, or use a cluster key: TLS is checked too",
    )


def pack_frame(frame: Frame, limits: Limits, *, checked: bool = False) -> list[Buffer]:
    """Return the buffers to write for `frame`: header and meta joined, then the payload as it is.

    The payload is not copied. With `checked`, checksums stand behind the header of every frame but
    HELLO. Raises LocalProtocolError when the frame breaks the caps or its numbers do not fit: the
    peer would refuse it.
    """
    payload = frame.payload
    if not isinstance(payload, bytes):
        payload = memoryview(payload)
        if payload.ndim != 1 or payload.format != "B":
            payload = payload.cast("B")
    max_meta, max_payload = limits[frame.kind]
    if len(frame.meta) > max_meta or len(payload) > max_payload:
        raise LocalProtocolError(
            f"a {frame.kind.name} frame of {len(frame.meta)} + {len(payload)} bytes is above "
            f"the caps of {max_meta} + {max_payload}"
        )
    try:
        header = HEADER.pack(
            FRAME_MAGIC,
            frame.kind,
            0,
            len(frame.meta),
            len(payload),
            frame.epoch,
            frame.step,
        )
    except struct.error as error:
        raise LocalProtocolError(
            f"epoch {frame.epoch} or step {frame.step} does not fit its field: {error}"
        ) from error
    if checked and frame.kind is not FrameKind.HELLO:
        of_header = xxh3_64_intdigest(header) & _LOW_HALF
        header += CHECKSUMS.pack(of_header, body_checksum(frame.meta, payload))
    head = header + frame.meta if frame.meta else header
    return [head, payload] if len(payload) else [head]
