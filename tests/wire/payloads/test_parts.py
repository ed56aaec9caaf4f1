"""PART frames: what is written is read, and checked to the byte."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from msgspec import structs
from support.strategies.part_frames import read_part
from support.strategies.wire_strategies import shard_parts

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.types import WireDType
from shardnet.wire.payloads.parts import ShardPart, part_frame

PART = ShardPart(
    number=2,
    shard=1,
    dtype=WireDType.FLOAT32,
    n_rows=2,
    width=3,
    payload=struct.pack("<6f", *range(6)),
)


@given(part=shard_parts())
def test_what_is_written_is_read(part: ShardPart) -> None:
    frame = part_frame(part, epoch=3, step=9)
    assert (frame.epoch, frame.step) == (3, 9)
    assert read_part(frame) == part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({6: 5}, "dtype 5 is not one of"),
        ({7: 1}, "reserved"),
        ({5: 1}, "shard 257 is above 255"),
        ({8: 0}, "0 rows of 3 columns"),
        ({12: 0}, "2 rows of 0 columns"),
        ({8: 3}, "24 bytes; 3 rows x 3 of float32 need 36"),
        ({6: 3}, "24 bytes; 2 rows x 3 of bfloat16 need 12"),
        ({11: 255, 15: 255}, "24 bytes"),
    ],
)
def test_a_frame_that_breaks_the_document_is_refused(change: dict[int, int], message: str) -> None:
    frame = part_frame(PART, epoch=1, step=1)
    meta = bytearray(frame.meta)
    for place, value in change.items():
        meta[place] = value
    with pytest.raises(RemoteProtocolError, match=f"PART frame of step 1: .*{message}"):
        read_part(structs.replace(frame, meta=bytes(meta)))


def test_a_meta_of_another_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="its meta has 3 bytes"):
        read_part(structs.replace(part_frame(PART, epoch=1, step=1), meta=b"abc"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (structs.replace(PART, number=1 << 32), "a number does not fit"),
        (structs.replace(PART, n_rows=1), "24 bytes; 1 rows"),
    ],
)
def test_a_part_that_would_be_refused_is_not_sent(wrong: ShardPart, message: str) -> None:
    with pytest.raises(LocalProtocolError, match=f"step 1: .*{message}"):
        part_frame(wrong, epoch=1, step=1)
