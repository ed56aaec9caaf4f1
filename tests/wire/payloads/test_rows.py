"""ROWS frames: what is written is read, cut where it is large, and checked to the byte."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.strategies.wire_strategies import row_blocks

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.output_params import OutputKind
from shardnet.types import SequenceId
from shardnet.wire.framing.frames import LIMITS, Frame, FrameKind, pack_frame
from shardnet.wire.payloads.rows import RowBlock, read_rows, rows_frames

BLOCK = RowBlock(
    sequence_id=SequenceId(4),
    kind=OutputKind.LOGITS,
    position=7,
    width=3,
    payload=struct.pack("<6f", *range(6)),
)


@given(block=row_blocks())
def test_what_is_written_is_read(block: RowBlock) -> None:
    (frame,) = rows_frames(block, epoch=3, step=9)
    assert (frame.epoch, frame.step) == (3, 9)
    assert replace(read_rows(frame), payload=bytes(frame.payload)) == block


@given(block=row_blocks(), most_bytes=st.integers(1, 300_000))
def test_parts_are_the_block_in_order(block: RowBlock, most_bytes: int) -> None:
    parts = list(block.parts(most_bytes))
    assert b"".join(part.payload for part in parts) == block.payload
    position = block.position
    for part in parts:
        assert part.position == position
        assert part.n_rows == 1 or len(part.payload) <= most_bytes
        position += part.n_rows


def test_large_blocks_take_several_frames() -> None:
    width = 1 << 20
    block = replace(BLOCK, width=width, payload=bytes(4 * width * 9))
    frames = rows_frames(block, epoch=1, step=1)
    assert [read_rows(frame).n_rows for frame in frames] == [4, 4, 1]
    assert [read_rows(frame).position for frame in frames] == [7, 11, 15]
    for frame in frames:
        pack_frame(frame, LIMITS)


def test_a_number_that_does_not_fit_is_ours() -> None:
    with pytest.raises(LocalProtocolError, match="step 1: a number does not fit"):
        rows_frames(replace(BLOCK, position=2**32), epoch=1, step=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({20: 8}, "kind 8 is not one of"),
        ({20: 3, 22: 255, 23: 255}, "layer 65535, beyond 10000"),
        ({20: 0}, "kind 0 is not one of"),
        ({21: 1}, "reserved"),
        ({22: 1}, "reserved"),
        ({12: 0}, "0 rows of 3 elements"),
        ({16: 0}, "2 rows of 0 elements"),
        ({12: 3}, "24 bytes; 3 rows x 3 need 36"),
        ({8: 255, 9: 255, 10: 255, 11: 255}, "position 4294967295 [+] 2 rows is out of range"),
    ],
)
def test_a_frame_that_breaks_the_document_is_refused(change: dict[int, int], message: str) -> None:
    (frame,) = rows_frames(BLOCK, epoch=1, step=1)
    meta = bytearray(frame.meta)
    for place, value in change.items():
        meta[place] = value
    with pytest.raises(RemoteProtocolError, match=f"ROWS frame of step 1: .*{message}"):
        read_rows(structs.replace(frame, meta=bytes(meta)))


def test_a_meta_of_another_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="its meta has 3 bytes, not 24"):
        read_rows(Frame(kind=FrameKind.ROWS, meta=b"abc"))
