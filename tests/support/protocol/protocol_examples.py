"""The frames of the hex examples in docs/protocol.md, as the code makes them."""

from __future__ import annotations

import hashlib
import struct

from shardnet.errors import BusyError
from shardnet.output_params import OutputKind
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence, PicturePlace
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.bulk import (
    Digests,
    FetchDigests,
    FetchPart,
    PartName,
    Piece,
    bulk_frame,
)
from shardnet.wire.messages.control import control_frame
from shardnet.wire.messages.extras import (
    Extras,
    RowLogprobs,
    StageExperts,
    StageTiming,
    extras_frame,
    sequence_frame,
)
from shardnet.wire.messages.generation import Cancel
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose, error_frame, hello_frame
from shardnet.wire.payloads.data import StepData, data_frame, tokens_frame
from shardnet.wire.payloads.parts import ShardPart, part_frame
from shardnet.wire.payloads.rows import RowBlock, rows_frames

HELLO = Hello(
    purpose=Purpose.DATA,
    role=PeerRole.NODE,
    node="n1",
    name="nas",
    version="0.2.0",
    ring="r",
    epoch=3,
)

STEP = StepData(
    batch=MicroBatch(
        epoch=Epoch(3),
        step=StepId(7),
        groups=(
            RowGroup(
                sequence_id=SequenceId(1), slot=SlotId(0), position=256, n_rows=2, n_sampled=1
            ),
            RowGroup(
                sequence_id=SequenceId(9),
                slot=SlotId(4),
                position=12,
                n_rows=1,
                n_sampled=1,
                n_drafts=1,
            ),
        ),
        token_ids=(5, 6, 31999),
    ),
    dtype=WireDType.FLOAT32,
    width=2,
    payload=struct.pack("<6f", 0.0, 1.0, -1.0, 0.5, 2.0, -0.25),
    timings=(StageTiming(0, 1500, 20, 70_000),),
)
"""Two rows of a prompt's end and a draft in flight; the tail samples the last of each."""

INT8_STEP = StepData(
    batch=MicroBatch(
        epoch=Epoch(3),
        step=StepId(7),
        groups=(
            RowGroup(
                sequence_id=SequenceId(1), slot=SlotId(0), position=256, n_rows=3, n_sampled=1
            ),
        ),
        token_ids=(5, 6, 31999),
    ),
    dtype=WireDType.INT8,
    width=5,
    payload=struct.pack("<3f15b", 1.0, float("nan"), 0.0, 127, -64, 2, *[0] * 12),
)

INT8_ROWS = (
    (127.0, -63.5, 2.5, 0.0, 0.4),
    (1.0, float("inf"), -1.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 1e-37, 0.0),
)
"""What INT8_STEP carries, before it was rounded."""
WEIGHTS_SHA256 = hashlib.sha256(b"weights").hexdigest()

PICTURE = PicturePlace(
    position=12, n_positions=6, grid=(1, 2, 3), see_each_other=False, digest=bytes(range(16))
)
SAMPLING = SamplingParams(temperature=0.5, top_k=40, top_p=0.9, seed=42)

ROWS = RowBlock(
    sequence_id=SequenceId(9),
    kind=OutputKind.HIDDEN,
    position=12,
    width=2,
    payload=struct.pack("<2f", 2.0, -0.25),
)

PART = ShardPart(
    number=5,
    shard=1,
    dtype=WireDType.FLOAT32,
    n_rows=1,
    width=2,
    payload=struct.pack("<2f", 2.0, -0.25),
)

MODEL_ID = hashlib.sha256(b"model").hexdigest()

EXAMPLES: dict[str, Frame] = {
    "hello": hello_frame(HELLO),
    "error": error_frame(BusyError("another ring is running")),
    "error-remedy": error_frame(BusyError("another ring is running", remedy="ask again later")),
    "heartbeat": Frame(kind=FrameKind.HEARTBEAT, epoch=3, step=7),
    "bye": Frame(kind=FrameKind.BYE),
    "control": control_frame(Cancel(request=300)),
    "data": data_frame(STEP),
    "data-int8": data_frame(INT8_STEP),
    "tokens": tokens_frame([411, 31999], epoch=3, step=7, timings=[StageTiming(1, 1600, 35, 9)]),
    "tokens-none": tokens_frame([], epoch=3, step=8),
    "sequence": sequence_frame(
        OpenSequence(
            sequence_id=SequenceId(9), slot=SlotId(4), sampling=SAMPLING, pictures=(PICTURE,)
        ),
        epoch=3,
    ),
    "extras": extras_frame(
        Extras(
            logprobs=[RowLogprobs(1, 31999, -0.5, ((31999, -0.5),))],
            routing=[StageExperts(9, 0, 2, 2, struct.pack("<4h", 6, 1, -1, -1))],
        ),
        epoch=3,
        step=7,
    ),
    "bulk-digests": bulk_frame(
        FetchDigests(request=1, model_id=MODEL_ID, parts=[PartName("lm_head.weight", 0)])
    ),
    "bulk-digests-answer": bulk_frame(Digests(request=1, sha256=[WEIGHTS_SHA256])),
    "bulk-part": bulk_frame(
        FetchPart(request=2, model_id=MODEL_ID, tensor="lm_head.weight", part=0)
    ),
    "bulk-piece": bulk_frame(Piece(request=2), b"weights"),
    "rows": rows_frames(ROWS, epoch=3, step=7)[0],
    "part": part_frame(PART, epoch=3, step=7),
}
