"""DATA and TOKENS frames: round trip, and every number checked."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies.wire_strategies import U32, U64, steps

from shardnet.errors import LocalProtocolError, RemoteProtocolError
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.extras import StageTiming
from shardnet.wire.payloads.data import (
    StepData,
    data_frame,
    read_answer_timings,
    read_data,
    read_tokens,
    tokens_frame,
)


def group(sequence_id: int = 1, slot: int = 0, **changes: int) -> RowGroup:
    fields = {"position": 10, "n_rows": 2, "n_sampled": 1} | changes
    return RowGroup(sequence_id=SequenceId(sequence_id), slot=SlotId(slot), **fields)


def step_of(*groups: RowGroup, width: int = 4, dtype: WireDType = WireDType.BFLOAT16) -> StepData:
    n_rows = sum(g.n_rows for g in groups)
    batch = MicroBatch(
        epoch=Epoch(1), step=StepId(2), groups=groups, token_ids=tuple(range(n_rows))
    )
    payload = bytes(n_rows * dtype.row_bytes(width))
    return StepData(batch=batch, dtype=dtype, width=width, payload=payload)


@given(steps())
def test_data_round_trip(step: StepData) -> None:
    assert read_data(data_frame(step)) == step


@given(st.lists(U32, max_size=20), U32, U64)
def test_tokens_round_trip(token_ids: list[int], epoch: int, step: int) -> None:
    timings = (StageTiming(0, 1, 2, 3), StageTiming(255, 10**15, 0, 7))
    frame = tokens_frame(token_ids, epoch=epoch, step=step, timings=timings)
    assert read_answer_timings(frame) == timings
    with pytest.raises(RemoteProtocolError, match="63 bytes of meta"):
        read_answer_timings(replace(frame, meta=frame.meta[:-1]))
    assert (frame.kind, frame.epoch, frame.step) == (FrameKind.TOKENS, epoch, step)
    assert len(frame.payload) == 4 * len(token_ids)
    assert read_tokens(frame, n_sampled=len(token_ids)) == tuple(token_ids)


@pytest.mark.parametrize("n_bytes", [0, 3, 4, 7, 9, 12])
def test_tokens_are_4_bytes_for_each_sampled_row(n_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="2 sampled rows need 8"):
        read_tokens(Frame(kind=FrameKind.TOKENS, payload=bytes(n_bytes)), n_sampled=2)


@pytest.mark.parametrize("more", [-1, 1])
def test_the_payload_is_checked_to_the_byte(more: int) -> None:
    frame = data_frame(step_of(group()))
    wrong = replace(frame, payload=bytes(len(frame.payload) + more))
    with pytest.raises(RemoteProtocolError, match=r"2 rows x 4 x bfloat16 need 16"):
        read_data(wrong)


HEAD = struct.Struct("<HBBII")
GROUP = struct.Struct("<QIIIII")
TIMING = struct.Struct("<4Q")
GOOD_HEAD = (1, 3, 0, 2, 4)
GOOD_GROUP = (1, 0, 10, 2, 1, 0)


def meta_of(
    head: tuple[int, ...] = GOOD_HEAD,
    groups: tuple[tuple[int, ...], ...] = (GOOD_GROUP,),
    n_tokens: int = 2,
) -> bytes:
    return HEAD.pack(*head) + b"".join(GROUP.pack(*g) for g in groups) + bytes(4 * n_tokens)


def test_the_meta_that_the_cases_below_break_is_good() -> None:
    assert read_data(Frame(kind=FrameKind.DATA, meta=meta_of(), payload=bytes(16))).width == 4


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        (b"", "the head alone has 12"),
        (meta_of()[:-1], "need 48"),
        (meta_of() + b"\0", "need 48"),
        (meta_of((1, 3, 1, 2, 4)), "1 timings need 80"),
        (meta_of((1, 3, 1, 2, 4)) + TIMING.pack(256, 1, 1, 1), "timing of rank 256"),
        (meta_of((1, 3, 1, 2, 4)) + TIMING.pack(0, 1, 1, 10**15 + 1), "rank 0 is out of range"),
        (meta_of((1, 0, 0, 2, 4)), "dtype code 0"),
        (meta_of((1, 9, 0, 2, 4)), "dtype code 9"),
        (meta_of((0, 3, 0, 0, 4), (), 0), "no row group"),
        (meta_of((1, 3, 0, 3, 4), n_tokens=3), "do not add up to 3 rows"),
        (meta_of((1, 3, 0, 0, 4), ((1, 0, 0, 0, 0, 0),), 0), "sequence 1 has no row"),
        (meta_of(groups=((1, 0, 10, 2, 3, 0),)), "3 of 2 rows cannot be sampled"),
        (meta_of(groups=((1, 0, 2**32 - 1, 2, 1, 0),)), "out of range"),
        (meta_of(groups=((1, 0, 10, 2, 1, 13),)), "13 drafts are more than can be"),
        (meta_of(groups=((1, 0, 999, 2, 1, 129),)), "129 drafts are more than can be"),
        (meta_of((2, 3, 0, 4, 4), (GOOD_GROUP, (2, 0, 10, 2, 1, 0)), 4), "one slot stands in two"),
        (meta_of((2, 3, 0, 4, 4), (GOOD_GROUP, (1, 1, 10, 2, 1, 0)), 4), "one sequence stands in"),
        (meta_of((1, 3, 0, 2, 0)), "width is 0"),
        (meta_of((1, 3, 0, 2, 2**32 - 1)), "need 17179869180"),
        (meta_of((65535, 3, 0, 2**32 - 1, 4)), "need 171817"),
    ],
)
def test_a_malformed_meta_is_the_peers_fault(meta: bytes, what: str) -> None:
    with pytest.raises(RemoteProtocolError, match=what):
        read_data(Frame(kind=FrameKind.DATA, step=2, meta=meta, payload=bytes(16)))


@pytest.mark.parametrize(
    "step",
    [
        step_of(),
        step_of(group(slot=1), group(sequence_id=2, slot=1)),
        step_of(group(n_sampled=3)),
        step_of(group(n_drafts=13)),
        step_of(group(n_rows=1, n_drafts=12)),
        step_of(group(position=-1)),
        step_of(group(sequence_id=2**64)),
        replace(step_of(group()), payload=b""),
        replace(step_of(group()), width=0),
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(step: StepData) -> None:
    with pytest.raises(LocalProtocolError, match="step 2"):
        data_frame(step)


ONE = (1, 0, 10, 1, 1, 0)


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        (meta_of((1, 3, 0, 1, 4), (ONE,), 2), "need 44"),
        (meta_of((1, 3, 1, 1, 4), (ONE,), 1) + TIMING.pack(256, 1, 1, 1), "timing of rank 256"),
        (meta_of((1, 9, 0, 1, 4), (ONE,), 1), "dtype code 9"),
        (meta_of((1, 3, 0, 1, 0), (ONE,), 1), "width is 0"),
        (meta_of((1, 3, 0, 1, 5), (ONE,), 1), "1 rows x 5 x bfloat16 need 10"),
        (meta_of((1, 3, 0, 1, 4), ((1, 0, 10, 1, 2, 0),), 1), "2 of 1 rows cannot be sampled"),
        (meta_of((1, 3, 0, 1, 4), ((1, 0, 2**32 - 1, 1, 1, 0),), 1), "out of range"),
        (meta_of((1, 3, 0, 1, 4), ((1, 0, 10, 2, 1, 0),), 1), "do not add up to 1 rows"),
        (meta_of((1, 3, 0, 1, 4), ((1, 0, 10, 1, 1, 12),), 1), "12 drafts are more than can be"),
    ],
)
def test_a_malformed_step_of_one_row_is_the_peers_fault(meta: bytes, what: str) -> None:
    with pytest.raises(RemoteProtocolError, match=what):
        read_data(Frame(kind=FrameKind.DATA, step=2, meta=meta, payload=bytes(8)))


def test_a_token_id_that_does_not_fit_is_our_bug() -> None:
    with pytest.raises(LocalProtocolError, match="step 5"):
        tokens_frame([2**32], epoch=0, step=5)
