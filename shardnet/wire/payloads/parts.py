"""What one shard of a stage has computed of some outputs; PART frames, between a stage's nodes.

Knows the byte layout of docs/protocol.md section 11. Every number that a peer sends is checked
here, and the payload to the byte. Knows nothing of tensors.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.types import WireDType
from shardnet.wire.framing.frames import Buffer, Frame, FrameKind
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.payloads.data import CODE_OF_DTYPE, DTYPE_OF_CODE

_META: Final = struct.Struct("<IHBxII")
"""number of the gather, shard, dtype code, reserved 0, rows, width."""
_RESERVED: Final = 7


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that `shard` has computed, for gather `number` of a step, counted from 0.

    `payload` is `n_rows` rows of `width` columns, laid out as `dtype` says.
    """

    number: int
    shard: int
    dtype: WireDType
    n_rows: int
    width: int
    payload: Buffer


def part_frame(part: ShardPart, *, epoch: int, step: int) -> Frame:
    """Make the PART frame. The payload is not copied.

    Raises LocalProtocolError when the peer would refuse the frame.
    """
    fault = _fault(part)
    if fault is not None:
        raise LocalProtocolError(f"step {step}: {fault}")
    code = CODE_OF_DTYPE[part.dtype]
    try:
        meta = _META.pack(part.number, part.shard, code, part.n_rows, part.width)
    except struct.error as error:
        raise LocalProtocolError(f"step {step}: a number does not fit: {error}") from None
    return Frame(kind=FrameKind.PART, epoch=epoch, step=step, meta=meta, payload=part.payload)


def read_part(frame: Frame) -> ShardPart:
    """Read a PART frame. The payload is the frame's own.

    Raises RemoteProtocolError when a number is not allowed, or when rows x width x dtype is not the
    payload's length.
    """
    if len(frame.meta) != _META.size:
        raise _malformed(frame, f"its meta has {len(frame.meta)} bytes, not {_META.size}")
    number, shard, code, n_rows, width = _META.unpack(frame.meta)
    if frame.meta[_RESERVED]:
        raise _malformed(frame, "its reserved byte is not 0")
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise _malformed(frame, f"dtype {code} is not one of {sorted(DTYPE_OF_CODE)}")
    part = ShardPart(
        number=number,
        shard=shard,
        dtype=dtype,
        n_rows=n_rows,
        width=width,
        payload=frame.payload,
    )
    fault = _fault(part)
    if fault is not None:
        raise _malformed(frame, fault)
    return part


def _fault(part: ShardPart) -> str | None:
    """Say what is wrong with a part, None if nothing is."""
    if part.shard >= MAX_STAGES:
        return f"shard {part.shard} is above {MAX_STAGES - 1}"
    if not part.n_rows or not part.width:
        return f"it has {part.n_rows} rows of {part.width} columns"
    expected, n_bytes = part.n_rows * part.dtype.row_bytes(part.width), len(part.payload)
    if n_bytes != expected:
        return (
            f"its payload has {n_bytes} bytes; {part.n_rows} rows x {part.width} of "
            f"{part.dtype.value} need {expected}"
        )
    return None


def _malformed(frame: Frame, fault: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the PART frame of step {frame.step}: {fault}")
