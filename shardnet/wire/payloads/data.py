"""DATA and TOKENS frames: row groups, token ids and the raw activations; 4 bytes per token back.

Knows the byte layout of docs/protocol.md sections 9 and 10. Every number that a peer sends is
checked here, and the payload against shape and dtype to the byte. Knows nothing of tensors: the
payload stays the bytes that came.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import starmap
from typing import Final

import msgspec
from msgspec.structs import astuple

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.types import (
    MAX_ROWS_IN_FLIGHT,
    U32_MAX,
    Epoch,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)
from shardnet.wire.framing.frames import Buffer, Frame, FrameKind
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.messages.extras import MAX_MICROSECONDS, StageTiming

_HEAD: Final = struct.Struct("<HBBII")
"""n_groups, dtype code, n_timings, n_rows, width."""
_GROUP: Final = struct.Struct("<QIIIII")
"""sequence id, slot, position, n_rows, n_sampled, n_drafts."""
_ONE_ROW: Final = struct.Struct("<HBBIIQIIIIII")
"""The meta of a step of one row, up to its timings: head, group and token id in one call."""
_TIMING: Final = struct.Struct("<4Q")
"""The fields of a StageTiming: rank, and microseconds: computing, queued, when it arrived."""
TOKEN_BYTES: Final = 4
"""What the tail sends the head for each sampled row."""

CODE_OF_DTYPE: Final = {
    WireDType.FLOAT32: 1,
    WireDType.FLOAT16: 2,
    WireDType.BFLOAT16: 3,
    WireDType.INT8: 4,
}
DTYPE_OF_CODE: Final = {code: dtype for dtype, code in CODE_OF_DTYPE.items()}


class StepData(msgspec.Struct, frozen=True, kw_only=True):
    """What a DATA frame says: the micro-batch and its activations.

    `payload` is `batch.n_rows` rows of `width` columns, laid out as `dtype` says. `timings` are
    those of the stages before.
    """

    batch: MicroBatch
    dtype: WireDType
    width: int
    payload: Buffer
    timings: tuple[StageTiming, ...] = ()


def data_frame(step: StepData) -> Frame:
    """Make the DATA frame of `step`. The payload is not copied.

    Raises LocalProtocolError when the peer would refuse the frame.
    """
    batch = step.batch
    code, n_timings = CODE_OF_DTYPE[step.dtype], len(step.timings)
    if len(batch.token_ids) == 1:
        one = _one_row_frame(step, code)
        if one is not None:
            return one
    fault = _fault(batch, step.dtype, step.width, memoryview(step.payload).nbytes)
    if fault is not None:
        raise LocalProtocolError(f"step {batch.step}: {fault}")
    try:
        parts = [_HEAD.pack(len(batch.groups), code, n_timings, len(batch.token_ids), step.width)]
        for g in batch.groups:
            numbers = g.position, g.n_rows, g.n_sampled, g.n_drafts
            parts.append(_GROUP.pack(g.sequence_id, g.slot, *numbers))
        parts.append(_pack_tokens(batch.token_ids))
        parts += starmap(_TIMING.pack, map(astuple, step.timings))
    except struct.error as error:
        raise LocalProtocolError(f"step {batch.step}: a number does not fit: {error}") from error
    return Frame(
        kind=FrameKind.DATA,
        epoch=batch.epoch,
        step=batch.step,
        meta=b"".join(parts),
        payload=step.payload,
    )


def read_data(frame: Frame) -> StepData:
    """Read a DATA frame. The payload is the frame's own.

    Raises RemoteProtocolError when a length, count, dtype, slot or position is not allowed, or
    when rows x width x dtype is not the payload's length.
    """
    one = _read_one_row(frame)
    if one is not None:
        return one
    try:
        step = _read_meta(frame)
    except _MalformedMeta as error:
        raise RemoteProtocolError(f"the DATA frame of step {frame.step}: {error}") from None
    fault = _fault(step.batch, step.dtype, step.width, len(frame.payload))
    if fault is not None:
        raise RemoteProtocolError(f"the DATA frame of step {frame.step}: {fault}")
    return step


def tokens_frame(
    token_ids: Sequence[int], *, epoch: int, step: int, timings: Sequence[StageTiming] = ()
) -> Frame:
    """Make the TOKENS frame that answers a step: one id per sampled row, possibly none.

    `timings` are those of all stages. Raises LocalProtocolError when a number does not fit.
    """
    try:
        payload = _pack_tokens(token_ids)
        meta = b"".join(starmap(_TIMING.pack, map(astuple, timings)))
    except struct.error as error:
        raise LocalProtocolError(f"step {step}: a number does not fit: {error}") from error
    return Frame(kind=FrameKind.TOKENS, epoch=epoch, step=step, meta=meta, payload=payload)


def read_answer_timings(frame: Frame) -> tuple[StageTiming, ...]:
    """Read the stages' timings that came with a TOKENS frame. Raises RemoteProtocolError."""
    if len(frame.meta) % _TIMING.size:
        raise RemoteProtocolError(
            f"the TOKENS frame of step {frame.step} has {len(frame.meta)} bytes of meta; a timing "
            f"has {_TIMING.size}"
        )
    try:
        return _timings(frame.meta)
    except _MalformedMeta as error:
        raise RemoteProtocolError(f"the TOKENS frame of step {frame.step}: {error}") from None


def read_tokens(frame: Frame, *, n_sampled: int) -> tuple[int, ...]:
    """Read a TOKENS frame that must answer `n_sampled` rows.

    Raises RemoteProtocolError when it holds another number of ids.
    """
    expected = n_sampled * TOKEN_BYTES
    if len(frame.payload) != expected:
        raise RemoteProtocolError(
            f"the TOKENS frame of step {frame.step} has {len(frame.payload)} bytes; "
            f"{n_sampled} sampled rows need {expected}"
        )
    return struct.unpack(f"<{n_sampled}I", frame.payload)


class _MalformedMeta(Exception):
    """The meta cannot be taken apart; the text says why."""


def _one_row_frame(step: StepData, code: int) -> Frame | None:
    """Make the frame of a decode step of one sequence; None where anything is wrong with it."""
    batch = step.batch
    group = batch.groups[0] if len(batch.groups) == 1 else None
    if group is None or group.n_rows != 1 or group.n_sampled > 1 or not step.width:
        return None
    if group.position >= U32_MAX or len(step.payload) != step.dtype.row_bytes(step.width):
        return None
    if group.n_drafts > min(group.position + 1, MAX_ROWS_IN_FLIGHT):
        return None
    try:
        meta = _ONE_ROW.pack(
            *(1, code, len(step.timings), 1, step.width),
            *(group.sequence_id, group.slot, group.position, 1, group.n_sampled),
            *(group.n_drafts, batch.token_ids[0]),
        )
        for timing in step.timings:
            meta += _TIMING.pack(*astuple(timing))
    except struct.error:
        return None
    return Frame(
        kind=FrameKind.DATA, epoch=batch.epoch, step=batch.step, meta=meta, payload=step.payload
    )


def _read_one_row(frame: Frame) -> StepData | None:
    """Read a decode step of one sequence, as most are; None for all that is not a right one."""
    meta = frame.meta
    if len(meta) < _ONE_ROW.size:
        return None
    fields = _ONE_ROW.unpack_from(meta)
    n_groups, code, n_timings, n_rows, width = fields[:5]
    sequence_id, slot, position, rows, n_sampled, n_drafts, token = fields[5:]
    dtype = DTYPE_OF_CODE.get(code)
    if not n_groups == n_rows == rows == 1 or n_sampled > 1 or dtype is None or not width:
        return None
    if len(meta) != _ONE_ROW.size + n_timings * _TIMING.size or position == U32_MAX:
        return None
    if len(frame.payload) != dtype.row_bytes(width):
        return None
    if n_drafts > min(position + 1, MAX_ROWS_IN_FLIGHT):
        return None
    group = RowGroup(
        sequence_id=SequenceId(sequence_id),
        slot=SlotId(slot),
        position=position,
        n_rows=1,
        n_sampled=n_sampled,
        n_drafts=n_drafts,
    )
    try:
        timings = _timings(meta[_ONE_ROW.size :]) if n_timings else ()
    except _MalformedMeta:
        return None
    return StepData(
        batch=MicroBatch(
            epoch=Epoch(frame.epoch), step=StepId(frame.step), groups=(group,), token_ids=(token,)
        ),
        dtype=dtype,
        width=width,
        payload=frame.payload,
        timings=timings,
    )


def _read_meta(frame: Frame) -> StepData:
    meta = memoryview(frame.meta)
    if len(meta) < _HEAD.size:
        raise _MalformedMeta(f"its meta has {len(meta)} bytes, the head alone has {_HEAD.size}")
    n_groups, code, n_timings, n_rows, width = _HEAD.unpack_from(meta)
    timings_start = _HEAD.size + n_groups * _GROUP.size + n_rows * TOKEN_BYTES
    expected = timings_start + n_timings * _TIMING.size
    if len(meta) != expected:
        raise _MalformedMeta(
            f"its meta has {len(meta)} bytes; {n_groups} groups, {n_rows} rows and {n_timings} "
            f"timings need {expected}"
        )
    if code not in DTYPE_OF_CODE:
        raise _MalformedMeta(f"dtype code {code} is not one of {sorted(DTYPE_OF_CODE)}")
    tokens_start = _HEAD.size + n_groups * _GROUP.size
    groups = []
    for unpacked in _GROUP.iter_unpack(meta[_HEAD.size : tokens_start]):
        sequence_id, slot, position, rows, n_sampled, n_drafts = unpacked
        groups.append(
            RowGroup(
                sequence_id=SequenceId(sequence_id),
                slot=SlotId(slot),
                position=position,
                n_rows=rows,
                n_sampled=n_sampled,
                n_drafts=n_drafts,
            )
        )
    batch = MicroBatch(
        epoch=Epoch(frame.epoch),
        step=StepId(frame.step),
        groups=tuple(groups),
        token_ids=struct.unpack_from(f"<{n_rows}I", meta, tokens_start),
    )
    if batch.n_rows != n_rows:
        raise _MalformedMeta(f"its groups do not add up to {n_rows} rows")
    return StepData(
        batch=batch,
        dtype=DTYPE_OF_CODE[code],
        width=width,
        payload=frame.payload,
        timings=_timings(meta[timings_start:]),
    )


def _timings(data: Buffer) -> tuple[StageTiming, ...]:
    """Read whole timings. Raises _MalformedMeta for a rank or a time out of range."""
    timings = []
    for fields in _TIMING.iter_unpack(data):
        if fields[0] >= MAX_STAGES or max(fields) > MAX_MICROSECONDS:
            raise _MalformedMeta(f"a timing of rank {fields[0]} is out of range")
        timings.append(StageTiming(*fields))
    return tuple(timings)


def _fault(batch: MicroBatch, dtype: WireDType, width: int, payload_bytes: int) -> str | None:
    """Describe what is wrong with a step, whoever made it; None when all is well."""
    if not batch.groups:
        return "it has no row group"
    n_rows = 0
    slots, sequences = set(), set()
    for group in batch.groups:
        n_rows += group.n_rows
        slots.add(group.slot)
        sequences.add(group.sequence_id)
        if group.n_rows < 1:
            return f"sequence {group.sequence_id} has no row"
        if group.n_sampled > group.n_rows:
            return f"{group.n_sampled} of {group.n_rows} rows cannot be sampled"
        if group.position + group.n_rows > U32_MAX:
            return f"position {group.position} + {group.n_rows} rows is out of range"
        if group.n_drafts > min(group.position + group.n_rows, MAX_ROWS_IN_FLIGHT):
            return f"{group.n_drafts} drafts are more than can be in flight"
    if len(slots) != len(batch.groups):
        return "one slot stands in two row groups"
    if len(sequences) != len(batch.groups):
        return "one sequence stands in two row groups"
    if len(batch.token_ids) != n_rows:
        return f"it has {len(batch.token_ids)} token ids for {n_rows} rows"
    if width < 1:
        return "its width is 0"
    expected = n_rows * dtype.row_bytes(width)
    if payload_bytes != expected:
        return (
            f"its payload has {payload_bytes} bytes; {n_rows} rows x {width} x "
            f"{dtype.value} need {expected}"
        )
    return None


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
