"""A fuzzer: random and mutated streams end in frames, readers' refusals and documented errors only.

Everything that the connection allocates for a peer is recorded and compared with the caps.
"""

from __future__ import annotations

import random

import pytest
from support.soak import examples
from support.strategies.wire_strategies import feed, hello, joined, pair

from shardnet.errors import LinkError, RemoteProtocolError, ShardnetError
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType
from shardnet.wire.connection import connection as machine_module
from shardnet.wire.connection.connection import FrameReceived, LinkConnection, LinkFailed, LinkState
from shardnet.wire.connection.receive_buffer import FramePart
from shardnet.wire.framing.frames import (
    HEADER,
    LIMITS,
    PREAMBLE,
    Frame,
    FrameKind,
    pack_frame,
)
from shardnet.wire.messages.bulk import (
    FetchDigests,
    FetchPart,
    FetchRows,
    PartName,
    Piece,
    RowNumbers,
    bulk_frame,
    read_bulk,
)
from shardnet.wire.messages.control import control_frame, read_control
from shardnet.wire.messages.extras import (
    Extras,
    RowLogprobs,
    StageTiming,
    extras_frame,
    read_extras,
    read_sequence,
    sequence_frame,
)
from shardnet.wire.messages.generation import Cancel
from shardnet.wire.messages.handshake import Purpose, error_frame, hello_frame, read_error
from shardnet.wire.payloads.data import StepData, data_frame, read_data, read_tokens, tokens_frame
from shardnet.wire.payloads.parts import ShardPart, part_frame

ROUNDS = examples(1500)
SMALL = LIMITS | {
    FrameKind.HELLO: (500, 0),
    FrameKind.ERROR: (500, 0),
    FrameKind.CONTROL: (1000, 0),
    FrameKind.DATA: (2000, 50_000),
    FrameKind.TOKENS: (8192, 100),
    FrameKind.EXTRAS: (1000, 0),
    FrameKind.SEQUENCE: (1000, 0),
    FrameKind.BULK: (1000, 50_000),
    FrameKind.PART: (16, 50_000),
}


class RecordingPart(FramePart):
    """A part that notes how much memory it takes."""

    taken: list[int]

    def __init__(self, n: int, *, aligned: bool = False) -> None:
        self.taken.append(n)
        super().__init__(n, aligned=aligned)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    RecordingPart.taken = []
    monkeypatch.setattr(machine_module, "FramePart", RecordingPart)
    return RecordingPart.taken


def read(frame: Frame) -> None:
    """Read a frame as its receiver would."""
    match frame.kind:
        case FrameKind.CONTROL:
            read_control(frame)
        case FrameKind.DATA:
            read_data(frame)
        case FrameKind.TOKENS:
            read_tokens(frame, n_sampled=1)
        case FrameKind.EXTRAS:
            read_extras(frame)
        case FrameKind.SEQUENCE:
            read_sequence(frame)
        case FrameKind.BULK:
            read_bulk(frame)
        case FrameKind.ERROR:
            read_error(frame)


ROWS_OF_ONE = [RowNumbers("t", b"8" * 8)]


def good_frames() -> dict[Purpose, list[Frame]]:
    groups = tuple(
        RowGroup(sequence_id=SequenceId(i), slot=SlotId(i), position=7, n_rows=2, n_sampled=i % 2)
        for i in range(3)
    )
    batch = MicroBatch(epoch=Epoch(1), step=StepId(9), groups=groups, token_ids=tuple(range(6)))
    sampling = SamplingParams(temperature=0.5)
    logprobs = [RowLogprobs(0, 5, -0.5, ((5, -0.5), (6, -1.5)))]
    return {
        Purpose.CONTROL: [
            control_frame(Cancel(request=1)),
            error_frame(LinkError("x"), step=1),
            Frame(kind=FrameKind.HEARTBEAT, epoch=1, step=2),
            Frame(kind=FrameKind.BYE),
        ],
        Purpose.DATA: [
            data_frame(
                StepData(
                    batch=batch, dtype=WireDType.FLOAT32, width=1500, payload=bytes(6 * 1500 * 4)
                )
            ),
            sequence_frame(
                OpenSequence(sequence_id=SequenceId(1), slot=SlotId(2), sampling=sampling), epoch=1
            ),
            extras_frame(Extras(logprobs=logprobs), epoch=1, step=9),
            tokens_frame([5], epoch=1, step=9, timings=[StageTiming(0, 1, 2, 3)]),
            Frame(kind=FrameKind.BYE),
        ],
        Purpose.BULK: [
            bulk_frame(FetchPart(request=1, model_id="ab" * 32, tensor="t", part=2)),
            bulk_frame(FetchRows(request=2, model_id="ab" * 32, tables=ROWS_OF_ONE)),
            bulk_frame(FetchDigests(request=2, model_id="ab" * 32, parts=[PartName("t", 0)])),
            bulk_frame(Piece(request=3), bytes(40_000)),
            Frame(kind=FrameKind.BYE),
        ],
        Purpose.PARTS: [
            part_frame(
                ShardPart(
                    number=1,
                    shard=1,
                    dtype=WireDType.FLOAT32,
                    n_rows=2,
                    width=5,
                    payload=bytes(40),
                ),
                epoch=1,
                step=9,
            )
        ],
    }


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change a few bytes, cut something out, repeat something or add rubbish."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(5):
            case 0:
                result[at : at + 1] = rng.randbytes(1)
            case 1:
                del result[at : at + rng.randint(1, 20)]
            case 2:
                result[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                result[at:at] = result[at : at + rng.randint(1, 60)]
            case 4:
                result[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80"])
    return bytes(result)


def drive(connection: LinkConnection, data: bytes, rng: random.Random) -> bool:
    """Feed a stream, read what comes. Gives whether anything was refused."""
    events = feed(connection, data, [rng.randrange(1 << 20) for _ in range(3)])
    events += connection.eof()
    refused = False
    for event in events:
        match event:
            case LinkFailed():
                assert event is events[-1]
                assert isinstance(event.error, ShardnetError)
                refused |= isinstance(event.error, RemoteProtocolError)
            case FrameReceived():
                try:
                    read(event.frame)
                except RemoteProtocolError:
                    refused = True
    assert connection.state is LinkState.ENDED
    return refused


def check_memory(taken: list[int]) -> None:
    assert taken, "the fuzzer never got as far as a body"
    assert max(taken) <= SMALL[FrameKind.DATA][1]


@pytest.mark.parametrize("purpose", list(Purpose))
def test_mutated_frames_on_a_link_that_is_up(purpose: Purpose, taken: list[int]) -> None:
    rng = random.Random(1)
    stream = joined([b for f in good_frames()[purpose] for b in pack_frame(f, SMALL)])
    assert not drive(pair(purpose, SMALL).b, stream, rng), "the unmutated stream is good"
    n_refused = sum(drive(pair(purpose, SMALL).b, mutated(stream, rng), rng) for _ in range(ROUNDS))
    assert n_refused > ROUNDS // 4, "mutations that nothing notices test nothing"
    check_memory(taken)


@pytest.mark.parametrize("initiator", [True, False])
def test_mutated_handshakes(initiator: bool, taken: list[int]) -> None:
    rng = random.Random(2)
    stream = PREAMBLE + joined(pack_frame(hello_frame(hello("b")), SMALL))
    n_refused = 0
    for _ in range(ROUNDS):
        connection = LinkConnection(hello(), initiator=initiator, limits=SMALL)
        n_refused += drive(connection, mutated(stream, rng), rng)
    assert n_refused > ROUNDS // 4
    assert taken
    assert max(taken) <= SMALL[FrameKind.HELLO][0]


@pytest.mark.parametrize("purpose", list(Purpose))
def test_random_metas_behind_good_headers(purpose: Purpose, taken: list[int]) -> None:
    rng = random.Random(3)
    for _ in range(ROUNDS):
        kind = rng.choice(list(FrameKind))
        meta, payload = rng.randbytes(rng.randrange(60)), rng.randbytes(rng.choice([0, 4, 40]))
        header = HEADER.pack(
            0x4E53, kind, rng.choice([0, 0, 1]), len(meta), len(payload), 1, rng.choice([0, 5])
        )
        drive(pair(purpose, SMALL).b, header + meta + payload, rng)
    check_memory(taken)


def test_random_bytes() -> None:
    rng = random.Random(4)
    for _ in range(ROUNDS):
        drive(pair(Purpose.DATA, SMALL).b, rng.randbytes(rng.randrange(1, 80)), rng)


def test_the_fuzzer_sees_what_is_refused() -> None:
    """A stream cut short is not refused; one wrong length is."""
    rng = random.Random(5)
    good = joined(pack_frame(good_frames()[Purpose.DATA][0], SMALL))
    up = pair(Purpose.DATA, SMALL)
    assert not drive(up.b, good[:-1], rng)
    assert drive(pair(Purpose.DATA, SMALL).b, good[:4] + b"\xff" * 4 + good[8:], rng)
