"""Data links: what the other end may send, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from support.strategies.wire_strategies import hello

from shardnet.constraints import MaskForm, RowMask, TokenMask
from shardnet.errors import CapacityError, RemoteProtocolError
from shardnet.output_params import OutputKind
from shardnet.runtime.ring import links
from shardnet.runtime.ring.links import LinkSink, LinkSource, TailLink
from shardnet.runtime.ring.pipeline import StepAnswer
from shardnet.runtime.stage.compute import (
    Activations,
    Samples,
    ScoredToken,
    StepArrived,
    StepComputed,
    StepFailed,
)
from shardnet.sampling_params import TokenLogprobs
from shardnet.slot_operations import CloseSequence
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.extras import (
    Extras,
    PromptLogprobs,
    RowLogprobs,
    RowTokenMask,
    StageTiming,
    extras_frame,
    read_masks,
    sequence_frame,
)
from shardnet.wire.messages.handshake import Purpose, error_frame
from shardnet.wire.payloads.data import tokens_frame
from shardnet.wire.payloads.rows import RowBlock, read_rows, rows_frames

EPOCH = Epoch(2)
TIMING = StageTiming(0, 5, 1, 7)
SCORED = RowLogprobs(row=1, token_id=8, logprob=-1.5, top=((8, -1.5),))


def received(
    kind: Callable[..., LinkSource | TailLink], *frames: Frame, n_before: int = 0
) -> object:
    """What the far end makes of `frames`."""

    async def main() -> object:
        said = hello("other", Purpose.DATA, ring="r", epoch=EPOCH)
        near, far = await memory_pair(said, said)
        try:
            for frame in frames:
                near.send(frame)
            end = kind(far, EPOCH)
            for _ in range(n_before):
                await end.receive()
            return await end.receive()
        finally:
            await asyncio.gather(near.close(), far.close())

    return asyncio.run(main())


def sent(output: StepComputed) -> list[Frame]:
    """The frames of an output."""
    frames: list[Frame] = []

    class Wire:
        def send(self, *more: Frame) -> None:
            frames.extend(more)

    LinkSink(cast("Link", Wire()), EPOCH).send(output)
    return frames


def extras(step: int, content: Extras = Extras(logprobs=[SCORED])) -> Frame:  # noqa: B008
    return extras_frame(content, epoch=EPOCH, step=step)


def tokens(step: int) -> Frame:
    return tokens_frame([7, 8], epoch=EPOCH, step=step, timings=[TIMING])


def test_an_answer_has_the_extras_that_came_before_it() -> None:
    answer = received(TailLink, extras(4), tokens(4))
    assert isinstance(answer, StepAnswer)
    assert answer.token_ids == (7, 8)
    assert answer.logprobs == [None, TokenLogprobs(token_id=8, logprob=-1.5, top=((8, -1.5),))]
    assert answer.timings == (TIMING,)


def rows(
    step: int, position: int = 5, payload: bytes = bytes(8), layer: int | None = None
) -> Frame:
    block = RowBlock(
        sequence_id=SequenceId(1),
        kind=OutputKind.HIDDEN,
        position=position,
        width=2,
        payload=payload,
        layer=layer,
    )
    return rows_frames(block, epoch=EPOCH, step=step)[0]


def test_an_answer_has_the_rows_and_prompt_logprobs_that_came_before_it() -> None:
    scored = PromptLogprobs(sequence_id=1, position=5, token_id=8, logprob=-1.5, top=((8, -1.5),))
    frames = [rows(4, 5), rows(4, 6, b"abcdefgh"), extras(4, Extras(prompt_logprobs=[scored]))]
    answer = received(TailLink, *frames, tokens(4))
    assert isinstance(answer, StepAnswer)
    assert [(block.position, bytes(block.payload)) for block in answer.blocks] == [
        (5, bytes(8)),
        (6, b"abcdefgh"),
    ]
    logprobs = TokenLogprobs(token_id=8, logprob=-1.5, top=((8, -1.5),))
    assert answer.prompt_logprobs == [
        ScoredToken(sequence_id=SequenceId(1), position=5, logprobs=logprobs)
    ]


def test_rows_of_a_step_that_failed_are_dropped() -> None:
    failure = error_frame(CapacityError("full"), epoch=EPOCH, step=4)
    assert isinstance(received(TailLink, rows(4), failure), StepFailed)


def test_more_rows_than_a_step_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_STEP_ROWS_BYTES", 16)
    with pytest.raises(RemoteProtocolError, match="more than 16 bytes of ROWS for step 4"):
        received(TailLink, rows(4, 5), rows(4, 6), rows(4, 7))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([rows(3), tokens(4)], "ROWS of step 3 and then TOKENS of step 4"),
        ([rows(3), rows(4)], "ROWS of step 3 and then ROWS of step 4"),
        ([rows(3), extras(4), tokens(4)], "ROWS of step 3 and then TOKENS of step 4"),
        ([extras(3), rows(3), tokens(3)], "EXTRAS of step 3 and then ROWS of step 3"),
        ([extras(3), tokens(4)], "EXTRAS of step 3 and then TOKENS of step 4"),
        ([extras(3), extras(3), tokens(3)], "EXTRAS of step 3 and then EXTRAS of step 3"),
        (
            [
                extras(3, Extras(logprobs=[RowLogprobs(row=2, token_id=1, logprob=-1.0, top=[])])),
                tokens(3),
            ],
            "logprobs of row 2 came with 2 tokens",
        ),
        (
            [sequence_frame(CloseSequence(sequence_id=SequenceId(1), slot=SlotId(0)), epoch=EPOCH)],
            "not travel",
        ),
    ],
)
def test_what_the_tail_may_not_send(frames: list[Frame], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        received(TailLink, *frames)


def test_hidden_states_of_earlier_stages_travel_with_their_step() -> None:
    group = RowGroup(sequence_id=SequenceId(1), slot=SlotId(0), position=5, n_rows=1, n_sampled=0)
    computed = StepComputed(
        batch=MicroBatch(epoch=EPOCH, step=StepId(3), groups=(group,), token_ids=(5,)),
        result=Activations(payload=bytes(8), dtype=WireDType.FLOAT32, width=2),
        timings=(),
        blocks=[read_rows(rows(3, layer=2)), read_rows(rows(3, layer=0))],
    )
    arrived = received(LinkSource, *sent(computed))
    assert isinstance(arrived, StepArrived)
    assert [(block.layer, block.position) for block in arrived.blocks] == [(2, 5), (0, 5)]
    failed = error_frame(CapacityError("full"), epoch=EPOCH, step=3)
    assert isinstance(received(LinkSource, rows(3, layer=2), failed), StepFailed)
    with pytest.raises(RemoteProtocolError, match="sent ROWS of step 2 and then ERROR of step 3"):
        received(LinkSource, rows(2, layer=2), failed)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (rows(3), "ROWS, which does not travel"),
        (tokens(3), "TOKENS, which does not travel"),
        (
            sequence_frame(CloseSequence(sequence_id=SequenceId(1), slot=SlotId(0)), epoch=1),
            "SEQUENCE of epoch 1",
        ),
    ],
)
def test_what_a_stage_may_not_send(frame: Frame, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        received(LinkSource, frame)


@pytest.mark.parametrize("second", [3, 5, 2])
def test_a_step_that_is_left_out_or_comes_twice_is_refused(second: int) -> None:
    frames = [error_frame(CapacityError("full"), epoch=EPOCH, step=s) for s in (3, second)]
    with pytest.raises(RemoteProtocolError, match=f"step {second} after step 3"):
        received(LinkSource, *frames, n_before=1)


def test_operations_and_failed_steps_pass() -> None:
    operation = sequence_frame(
        CloseSequence(sequence_id=SequenceId(9), slot=SlotId(4)), epoch=EPOCH
    )
    closed = received(LinkSource, operation)
    assert isinstance(closed, CloseSequence)
    assert (closed.sequence_id, closed.slot) == (9, 4)
    failed = received(LinkSource, error_frame(CapacityError("full"), epoch=EPOCH, step=6))
    assert isinstance(failed, StepFailed)
    assert failed.step == 6
    assert isinstance(failed.error, CapacityError)


def test_masks_travel_with_the_rows_of_their_step() -> None:
    group = RowGroup(sequence_id=SequenceId(1), slot=SlotId(0), position=4, n_rows=2, n_sampled=2)
    batch = MicroBatch(
        epoch=EPOCH,
        step=StepId(3),
        groups=(group,),
        token_ids=(5, 6),
        masks=(
            RowMask(0, TokenMask(MaskForm.BITS, b"\x05\x01")),
            RowMask(1, TokenMask(MaskForm.ALLOWED, bytes(8))),
        ),
    )
    activations = Activations(payload=bytes(16), dtype=WireDType.FLOAT32, width=2)
    arrived = received(
        LinkSource, *sent(StepComputed(batch=batch, result=activations, timings=(TIMING,)))
    )
    assert isinstance(arrived, StepArrived)
    assert (arrived.batch, arrived.timings) == (batch, (TIMING,))
    samples = Samples(token_ids=[1, 2], logprobs=[None] * 2)
    [frame] = sent(StepComputed(batch=batch, result=samples, timings=()))
    assert frame.kind is FrameKind.TOKENS  # the tail sends none back


@pytest.mark.parametrize(
    "masks",
    [
        [RowTokenMask(2, 0, b"")],
        [RowTokenMask(1, 0, b""), RowTokenMask(0, 0, b"")],
        [RowTokenMask(0, 0, b""), RowTokenMask(0, 0, b"")],
        [RowTokenMask(0, 1, bytes(3))],
    ],
    ids=["beyond", "order", "twice", "half"],
)
def test_masks_that_fit_no_row_are_the_peers_fault(masks: list[RowTokenMask]) -> None:
    with pytest.raises(RemoteProtocolError, match="mask of"):
        read_masks(masks, 2)
