"""ROWS frames: logits or hidden states, tail to head, and what pictures add to hidden states.

Knows the byte layout of docs/protocol.md section 11. Every number that a peer sends is checked
here, and the payload to the byte. Knows nothing of tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.output_params import OutputKind
from shardnet.types import MAX_LAYERS, U32_MAX, SequenceId
from shardnet.wire.framing.frames import LIMITS, Buffer, Frame, FrameKind

_META: Final = struct.Struct("<QIIIBxH")
"""sequence id, position of the first row, rows, width, kind, reserved 0, layer."""
_MOST_BYTES: Final = LIMITS[FrameKind.ROWS][1]

# routing comes from all stages, not only from the tail: it travels in EXTRAS
_CODE_OF_KIND: Final = {OutputKind.LOGITS: 1, OutputKind.HIDDEN: 2, OutputKind.STATES: 7}
_LAYER_CODE: Final = 3
"""Hidden states after a number of layers, which only they have."""
_DEEP_CODE: Final = 4
"""What is added to hidden states after a layer: features of pictures (DeepStack)."""
_PICTURE_CODE: Final = 5
"""What pictures have in the place of embedded token ids, between the shards of a first stage."""
_CHOICE_CODE: Final = 6
"""Positions that rows attend to, which layers of the next stage take from one before."""
_OF_LAYERS: Final = (_LAYER_CODE, _DEEP_CODE, _CODE_OF_KIND[OutputKind.STATES])
_KIND_OF_CODE: Final = {code: kind for kind, code in _CODE_OF_KIND.items()} | {
    _LAYER_CODE: OutputKind.HIDDEN,
    _DEEP_CODE: OutputKind.HIDDEN,
    _PICTURE_CODE: OutputKind.HIDDEN,
    _CHOICE_CODE: OutputKind.HIDDEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Consecutive rows of one sequence, the first at `position`.

    `payload` is little-endian, row after row of `width` elements, float32 or, of routing, int16,
    of states, bfloat16.
    Hidden states are the last ones, or those after so many layers as `layer` says; with `is_deep`
    they are added to what layer `layer` returns, without a layer in the place of embedded ids. With
    `is_choice` too they are no hidden states but positions, -1 behind the last.
    """

    sequence_id: SequenceId
    kind: OutputKind
    position: int
    width: int
    payload: Buffer
    layer: int | None = None
    is_deep: bool = False
    is_choice: bool = False

    @property
    def n_rows(self) -> int:
        """How many rows these are."""
        return memoryview(self.payload).nbytes // self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.kind.element_bytes

    def part(self, start: int, end: int) -> RowBlock:
        """Return the rows `[start, end)` of these, without a copy."""
        row_bytes = self.row_bytes
        payload = memoryview(self.payload)[start * row_bytes : end * row_bytes]
        return replace(self, position=self.position + start, payload=payload)

    def parts(self, most_bytes: int) -> Iterator[RowBlock]:
        """Cut into blocks of at most `most_bytes`, of one row at least."""
        step = max(1, most_bytes // self.row_bytes)
        for start in range(0, self.n_rows, step):
            yield self.part(start, min(start + step, self.n_rows))


def rows_frames(block: RowBlock, *, epoch: int, step: int) -> list[Frame]:
    """Make the ROWS frames of a block. The payload is not copied.

    Raises LocalProtocolError when a number does not fit.
    """
    return [_frame(part, epoch, step) for part in block.parts(_MOST_BYTES)]


def read_rows(frame: Frame) -> RowBlock:
    """Read a ROWS frame. The payload is the frame's own.

    Raises RemoteProtocolError when a number is not allowed, or when rows x width x 4 is not the
    payload's length.
    """
    if len(frame.meta) != _META.size:
        raise _malformed(frame, f"its meta has {len(frame.meta)} bytes, not {_META.size}")
    sequence_id, position, n_rows, width, code, layer = _META.unpack(frame.meta)
    if frame.meta[-3] or (layer and code not in _OF_LAYERS):
        raise _malformed(frame, "its reserved bytes are not 0")
    if code not in _KIND_OF_CODE:
        raise _malformed(frame, f"kind {code} is not one of {sorted(_KIND_OF_CODE)}")
    if layer > MAX_LAYERS:
        raise _malformed(frame, f"it is of layer {layer}, beyond {MAX_LAYERS}")
    if not n_rows or not width:
        raise _malformed(frame, f"it has {n_rows} rows of {width} elements")
    if position + n_rows > U32_MAX:
        raise _malformed(frame, f"position {position} + {n_rows} rows is out of range")
    kind = _KIND_OF_CODE[code]
    expected = n_rows * width * kind.element_bytes
    if len(frame.payload) != expected:
        raise _malformed(
            frame,
            f"its payload has {len(frame.payload)} bytes; {n_rows} rows x {width} need {expected}",
        )
    return RowBlock(
        sequence_id=SequenceId(sequence_id),
        kind=kind,
        position=position,
        width=width,
        payload=frame.payload,
        layer=layer if code in _OF_LAYERS else None,
        is_deep=code in (_DEEP_CODE, _PICTURE_CODE, _CHOICE_CODE),
        is_choice=code == _CHOICE_CODE,
    )


def _frame(block: RowBlock, epoch: int, step: int) -> Frame:
    try:
        meta = _META.pack(
            block.sequence_id,
            block.position,
            block.n_rows,
            block.width,
            _code(block),
            block.layer or 0,
        )
    except struct.error as error:
        raise LocalProtocolError(f"step {step}: a number does not fit: {error}") from error
    return Frame(kind=FrameKind.ROWS, epoch=epoch, step=step, meta=meta, payload=block.payload)


def _code(block: RowBlock) -> int:
    if block.is_choice:
        return _CHOICE_CODE
    if block.is_deep:
        return _PICTURE_CODE if block.layer is None else _DEEP_CODE
    is_plain = block.layer is None or block.kind is OutputKind.STATES
    return _CODE_OF_KIND[block.kind] if is_plain else _LAYER_CODE


def _malformed(frame: Frame, fault: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the ROWS frame of step {frame.step}: {fault}")
