"""The head's collector of outputs: rows that count, each once and in order; room for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import BusyError, CapacityError, RemoteProtocolError, SamplingError
from shardnet.output_params import ALL_ROWS, OutputKind, OutputParams
from shardnet.runtime.engine.outputs import (
    OutputBudget,
    OutputCollector,
    OutputEvent,
    PromptLogprobsReady,
    RowsReady,
    output_bytes,
)
from shardnet.runtime.stage.compute import ScoredToken
from shardnet.sampling_params import TokenLogprobs
from shardnet.types import SequenceId
from shardnet.wire.payloads.rows import RowBlock

SEQUENCE = SequenceId(1)
WIDTH = 2


def block(start: int, end: int, kind: OutputKind = OutputKind.HIDDEN, offset: int = 0) -> RowBlock:
    """Rows that hold their position, plus `offset`."""
    values = [position + offset for position in range(start, end) for _ in range(WIDTH)]
    return RowBlock(
        sequence_id=SEQUENCE,
        kind=kind,
        position=start,
        width=WIDTH,
        payload=struct.pack(f"<{len(values)}f", *values),
    )


def rows_of(events: Sequence[OutputEvent], kind: OutputKind = OutputKind.HIDDEN) -> list[float]:
    """The first element of each row."""
    return [
        row[0]
        for event in events
        if isinstance(event, RowsReady) and event.block.kind is kind
        for row in struct.iter_unpack("<2f", event.block.payload)
    ]


def scored(position: int) -> ScoredToken:
    logprobs = TokenLogprobs(token_id=position, logprob=-1.0, top=())
    return ScoredToken(sequence_id=SEQUENCE, position=position, logprobs=logprobs)


@given(data=st.data())
def test_every_row_that_counts_comes_once(data: st.DataObject) -> None:
    """Chunks, wrong drafts behind the last right row, and replays from the beginning."""
    n_prompt, n_new = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    n_rows = data.draw(st.sampled_from([ALL_ROWS, 1, 3, 50]))
    collector = OutputCollector(OutputParams(hidden_rows=n_rows, logit_rows=2), n_prompt)
    first = 0 if n_rows == ALL_ROWS else max(0, n_prompt - n_rows)
    events: list[OutputEvent] = []
    done, last = 0, n_prompt + n_new - 1
    while done < last:
        start = data.draw(st.sampled_from([done, done, 0]))
        if done < n_prompt - 1:
            end = n_right = data.draw(st.integers(start + 1, max(start + 1, n_prompt - 1)))
        else:
            n_right = data.draw(st.integers(max(done, start) + 1, last))
            end = n_right + data.draw(st.integers(0, 4))
        blocks = [block(max(start, first), n_right)] if n_right > max(start, first) else []
        blocks += [block(n_right, end, offset=100)] if end > n_right else []
        first_logits = max(start, n_prompt - 2, 0)
        blocks += [block(first_logits, end, OutputKind.LOGITS)] if end > first_logits else []
        events += collector.arrive([], blocks)
        for stop in (max(start, done), n_right):
            events += collector.release(stop)
        done = max(done, n_right)
    events += collector.finish()
    want = list(range(first, last)) if n_rows == ALL_ROWS else list(range(last))[-n_rows:]
    assert rows_of(events) == want
    assert rows_of(events, OutputKind.LOGITS) == list(range(last))[-2:]


def test_a_mean_is_that_of_all_rows() -> None:
    collector = OutputCollector(OutputParams(hidden_rows=ALL_ROWS, hidden_mean=True), 5)
    assert not collector.arrive([], [block(0, 4)])
    assert not collector.release(4)
    collector.arrive([], [block(4, 9, offset=1)])
    assert not collector.release(5)
    (event,) = collector.finish()
    assert isinstance(event, RowsReady)
    assert rows_of([event]) == [pytest.approx((0 + 1 + 2 + 3 + 5) / 5)]
    assert event.block.n_rows == 1


def test_prompt_logprobs_come_once_and_in_order() -> None:
    collector = OutputCollector(OutputParams(n_prompt_logprobs=0), 6)
    events = collector.arrive([scored(1), scored(2)], [])
    events += collector.arrive([scored(1), scored(2), scored(3)], [])
    events += collector.arrive([], [])
    assert [
        logprobs.token_id
        for event in events
        if isinstance(event, PromptLogprobsReady)
        for logprobs in event.logprobs
    ] == [1, 2, 3]


def test_nothing_is_left_out_and_nothing_comes_unasked() -> None:
    wants_rows = OutputCollector(OutputParams(hidden_rows=ALL_ROWS), 3)
    wants_rows.arrive([], [block(1, 3)])
    with pytest.raises(RemoteProtocolError, match="hidden of position 1, not of 0"):
        wants_rows.release(3)
    wants_rows.arrive([], [block(0, 1, OutputKind.LOGITS)])
    with pytest.raises(RemoteProtocolError, match="logits, which were not requested"):
        wants_rows.release(3)
    with pytest.raises(RemoteProtocolError, match="prompt token 1"):
        wants_rows.arrive([scored(1)], [])
    with pytest.raises(RemoteProtocolError, match="prompt token 2, not of 1"):
        OutputCollector(OutputParams(n_prompt_logprobs=1), 3).arrive([scored(2)], [])


@pytest.mark.parametrize("mean", [False, True])
def test_rows_of_another_width_are_the_tails_fault(mean: bool) -> None:
    collector = OutputCollector(OutputParams(hidden_rows=ALL_ROWS, hidden_mean=mean), 3)
    collector.arrive([], [block(0, 2)])
    collector.release(2)
    collector.arrive([], [replace(block(2, 3), width=1, payload=bytes(4))])
    with pytest.raises(RemoteProtocolError, match="hidden 1 wide after others 2 wide"):
        collector.release(3)


def test_hidden_states_after_layers_are_one_row() -> None:
    """The part of each layer may come in pieces; all must be of the same rows."""
    collector = OutputCollector(OutputParams(hidden_rows=ALL_ROWS, hidden_layers=(0, 3)), 3)
    collector.arrive(
        [],
        [
            *(replace(block(start, start + 1, offset=10), layer=0) for start in (0, 1)),
            replace(block(0, 2, offset=30), layer=3),
            block(0, 2),
        ],
    )
    [ready] = collector.release(2)
    assert isinstance(ready, RowsReady)
    found = [*struct.iter_unpack("<6f", ready.block.payload)]
    assert found == [(10, 10, 30, 30, 0, 0), (11, 11, 31, 31, 1, 1)]
    for wrong in (
        [block(2, 3)],
        [replace(block(2, 3), layer=0), replace(block(2, 3), layer=4), block(2, 3)],
        [replace(block(2, 3), layer=0), replace(block(2, 4), layer=3), block(2, 3)],
        [replace(block(n, n + 1), layer=n) for n in (0, 3)] + [block(2, 3)],
        [*(replace(block(n, n + 1), layer=0) for n in (2, 4)), block(2, 4)],
    ):
        with pytest.raises(RemoteProtocolError, match="hidden states"):
            collector.arrive([], wrong)


def test_the_room_for_outputs_is_shared() -> None:
    budget = OutputBudget(100)
    with budget.room_for(60):
        with budget.room_for(40):
            pass
        with pytest.raises(BusyError, match="take 60 of 100"), budget.room_for(41):
            pass
        with pytest.raises(CapacityError, match=r"101 bytes, the head allows 100"):
            budget.room_for(101).__enter__()
    with budget.room_for(100):
        pass


@pytest.mark.parametrize(
    ("params", "n_bytes"),
    [
        (OutputParams(n_prompt_logprobs=5), 0),
        (OutputParams(logit_rows=ALL_ROWS), 4 * 1000 * 50),
        (OutputParams(logit_rows=7, hidden_rows=200), 4 * (1000 * 7 + 16 * 50)),
        (OutputParams(hidden_rows=ALL_ROWS, hidden_mean=True), 4 * 16),
        (OutputParams(routing=True, logit_rows=1), 2 * 12 * 50 + 4 * 1000),
    ],
)
def test_how_much_is_asked_for(params: OutputParams, n_bytes: int) -> None:
    assert output_bytes(params, 50, vocab_size=1000, width=16, routing=12) == n_bytes


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (OutputParams(n_prompt_logprobs=101), "prompt-logprobs must be from 0 to 100, not 101"),
        (OutputParams(n_prompt_logprobs=-1), "prompt-logprobs"),
        (OutputParams(logit_rows=-1), "logits must be of 1 row or more"),
        (OutputParams(hidden_rows=-3), "hidden must be of 1 row or more"),
        (OutputParams(hidden_rows=1, hidden_mean=True), "mean"),
        (OutputParams(hidden_mean=True), "mean"),
        (OutputParams(every_layer=True), "hidden-layers need rows"),
        (OutputParams(hidden_rows=0, hidden_mean=True, every_layer=True), "and no mean"),
        (OutputParams(hidden_rows=1, hidden_layers=(1,), every_layer=True), "named or all"),
        (OutputParams(hidden_rows=1, hidden_layers=(2, 1)), "ascending"),
        (OutputParams(hidden_rows=1, hidden_layers=(-1,)), "ascending"),
    ],
)
def test_outputs_that_cannot_be_are_refused(params: OutputParams, named: str) -> None:
    with pytest.raises(SamplingError, match=named):
        params.check()


def test_layers_are_those_of_the_model() -> None:
    every = OutputParams(hidden_rows=1, every_layer=True).for_layers(3)
    assert (every.hidden_layers, every.n_states) == ((0, 1, 2), 4)
    some = OutputParams(hidden_rows=1, hidden_layers=(0, 3))
    assert some.for_layers(3) is some
    with pytest.raises(SamplingError, match="from 0 to 2, the model's layers, not 3"):
        some.for_layers(2)
