"""SEQUENCE frames: slot operations (docs/protocol.md section 11), and the sampling of models.

Knows how they are framed. Knows nothing of what is done with a message.
"""

from __future__ import annotations

import msgspec

from shardnet.sampling_params import Probability, RepetitionPenalty, Temperature
from shardnet.slot_operations import SlotOperation
from shardnet.types import U32, Strict
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import decode, encode


class RecommendedSampling(Strict, frozen=True, kw_only=True):
    """The sampling that a model's makers recommend; null where they say nothing."""

    temperature: Temperature | None = None
    top_k: U32 | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None


_decoder: msgspec.msgpack.Decoder[SlotOperation] = msgspec.msgpack.Decoder(SlotOperation)


def sequence_frame(operation: SlotOperation, *, epoch: int) -> Frame:
    """Make a SEQUENCE frame: a slot operation, carried out in the order of the data frames."""
    return Frame(kind=FrameKind.SEQUENCE, epoch=epoch, meta=encode(operation))


def read_sequence(frame: Frame) -> SlotOperation:
    """Read a SEQUENCE frame; sampling and outputs are not checked beyond the bounds of their types.

    Raises RemoteProtocolError when it breaks the schema.
    """
    return decode(_decoder, frame)
