"""PART frames: the columns that one shard of a stage has computed, for the others.

Knows the byte layout of docs/protocol.md section 11. Every number that a peer sends is checked
here. Knows nothing of tensors.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.types import WireDType
from shardnet.wire.framing.frames import (
    CHECKSUMS,
    FRAME_MAGIC,
    HEADER,
    LIMITS,
    Buffer,
    Frame,
    FrameKind,
    check_body,
    damaged,
    is_sound,
    pack_frame,
    unpack_header,
)
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.payloads.data import CODE_OF_DTYPE, DTYPE_OF_CODE

_META: Final = struct.Struct("<IHBxII")
"""number of the gather, shard, dtype code, reserved 0, rows, width."""
_RESERVED: Final = 7
_HEAD: Final = struct.Struct(HEADER.format + _META.format[1:])
"""Header and meta, where no checksums are between."""
_PARTS_ALONE: Final = frozenset({FrameKind.PART})


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that `shard` has computed, for gather `number` of a step, counted from 0.

    `payload` is `n_rows` rows of `width` columns, laid out as `dtype` says.
    """

    number: int
    shard: int
    dtype: WireDType
    n_rows: int
    width: int
    payload: Buffer = b""

    @property
    def n_bytes(self) -> int:
        """The bytes of a payload of this shape."""
        return self.n_rows * self.dtype.row_bytes(self.width)


def part_frame(part: ShardPart, *, epoch: int, step: int) -> Frame:
    """Make the PART frame. The payload is not copied.

    Raises LocalProtocolError when the peer would refuse the frame.
    """
    fault = _fault(part, len(part.payload))
    if fault is not None:
        raise LocalProtocolError(f"step {step}: {fault}")
    code = CODE_OF_DTYPE[part.dtype]
    try:
        meta = _META.pack(part.number, part.shard, code, part.n_rows, part.width)
    except struct.error as error:
        raise LocalProtocolError(f"step {step}: a number does not fit: {error}") from None
    return Frame(kind=FrameKind.PART, epoch=epoch, step=step, meta=meta, payload=part.payload)


class PartHeads:
    """What stands before the payloads of parts on one connection, in one epoch.

    With checksums where the connection `is_checked`, as those without TLS are.
    """

    def __init__(self, epoch: int, *, is_checked: bool) -> None:
        self._epoch = epoch
        self._is_checked = is_checked
        self.n_bytes = _HEAD.size + (CHECKSUMS.size if is_checked else 0)
        """The bytes of every head."""

    def packed(self, part: ShardPart, step: int) -> bytes:
        """Return the head of a part; its payload counts only in checksums."""
        if self._is_checked:
            frame = part_frame(part, epoch=self._epoch, step=step)
            head = pack_frame(frame, LIMITS, checked=True)[0]
            return bytes(head)
        return self.plain(part, step)

    def plain(self, part: ShardPart, step: int) -> bytes:
        """Return the head of a part without checksums."""
        return _HEAD.pack(
            FRAME_MAGIC,
            FrameKind.PART,
            0,
            _META.size,
            part.n_bytes,
            self._epoch,
            step,
            part.number,
            part.shard,
            CODE_OF_DTYPE[part.dtype],
            part.n_rows,
            part.width,
        )

    def is_of(self, head: Buffer, plain: bytes) -> bool:
        """Say whether `head` is what `plain` is, but for checksums."""
        if not self._is_checked:
            return head == plain
        start = HEADER.size
        return head[:start] == plain[:start] and head[start + CHECKSUMS.size :] == plain[start:]

    def read(self, head: Buffer) -> tuple[int, ShardPart]:
        """Read a head: the step, and the part without its payload.

        Raises RemoteProtocolError for what no shard may send, DamagedFrameError for a header that
        is not that of its checksum.
        """
        header = unpack_header(head, allowed=_PARTS_ALONE, limits=LIMITS, state="between parts")
        if self._is_checked:
            of_header, _ = CHECKSUMS.unpack_from(head, HEADER.size)
            if not is_sound(head[: HEADER.size], of_header):
                raise damaged(header, "its header")
        if header.meta_length != _META.size:
            fault = f"its meta has {header.meta_length} bytes, not {_META.size}"
            raise _malformed(header.step, fault)
        if header.epoch != self._epoch:
            raise RemoteProtocolError(
                f"a PART frame of epoch {header.epoch} came on a link of epoch {self._epoch}"
            )
        meta = bytes(head[self.n_bytes - _META.size :])
        return header.step, _read(meta, header.payload_length, header.step)

    def check(self, head: Buffer, payload: Buffer) -> None:
        """Compare what came with the checksum of its head, if it has one.

        Raises DamagedFrameError.
        """
        if self._is_checked:
            header = unpack_header(head, allowed=_PARTS_ALONE, limits=LIMITS, state="")
            _, of_body = CHECKSUMS.unpack_from(head, HEADER.size)
            check_body(head[HEADER.size + CHECKSUMS.size :], payload, of_body, header)


def _read(meta: Buffer, n_bytes: int, step: int) -> ShardPart:
    number, shard, code, n_rows, width = _META.unpack(meta)
    if meta[_RESERVED]:
        raise _malformed(step, "its reserved byte is not 0")
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise _malformed(step, f"dtype {code} is not one of {sorted(DTYPE_OF_CODE)}")
    part = ShardPart(number=number, shard=shard, dtype=dtype, n_rows=n_rows, width=width)
    fault = _fault(part, n_bytes)
    if fault is not None:
        raise _malformed(step, fault)
    return part


def _fault(part: ShardPart, n_bytes: int) -> str | None:
    """Say what is wrong with a part whose payload has `n_bytes`, None if nothing is."""
    if part.shard >= MAX_STAGES:
        return f"shard {part.shard} is above {MAX_STAGES - 1}"
    if not part.n_rows or not part.width:
        return f"it has {part.n_rows} rows of {part.width} columns"
    if n_bytes != part.n_bytes:
        return (
            f"its payload has {n_bytes} bytes; {part.n_rows} rows x {part.width} of "
            f"{part.dtype.value} need {part.n_bytes}"
        )
    return None


def _malformed(step: int, fault: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the PART frame of step {step}: {fault}")
