"""PART frames read by what reads them on the compute thread."""

from __future__ import annotations

from msgspec import structs

from shardnet.wire.framing.frames import LIMITS, Frame, pack_frame
from shardnet.wire.payloads.parts import PartHeads, ShardPart


def read_part(frame: Frame) -> ShardPart:
    """Read a frame as a part of its epoch, as it would come without checksums."""
    head, *_ = pack_frame(frame, LIMITS)
    step, part = PartHeads(frame.epoch, is_checked=False).read(head)
    assert step == frame.step
    return structs.replace(part, payload=frame.payload)
