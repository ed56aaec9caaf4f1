"""Prompt logprobs and rows as a program gets them: piece by piece, and whole in the result."""

from __future__ import annotations

import asyncio
import struct
from contextlib import aclosing

import numpy as np
import pytest
from support.cluster.scripted_node import NO_TIME, ScriptedNode, client_of

from shardnet.api import ALL_ROWS, GenerationEvent, OutputParams, RequestState
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import RemoteProtocolError, SamplingError
from shardnet.wire.messages.control import ControlMessage
from shardnet.wire.messages.generation import Finished, Generate, RowsPiece, TextPiece
from shardnet.wire.messages.generation import TokenDetail as Detail

EVERYTHING = OutputParams(n_prompt_logprobs=0, logit_rows=ALL_ROWS, hidden_rows=1)


def rows(position: int, *values: float, width: int = 2, kind: str = "logits") -> RowsPiece:
    data = struct.pack(f"<{len(values)}f", *values)
    return RowsPiece(request=0, kind=kind, position=position, width=width, data=data)  # type: ignore[arg-type]


def scored(*token_ids: int) -> TextPiece:
    details = [
        Detail(token_id=token_id, token="", bytes=[], logprob=-token_id, top=[])
        for token_id in token_ids
    ]
    return TextPiece(request=0, token_ids=[], tokens=[], text="", prompt_logprobs=details)


class OutputNode(ScriptedNode):
    """Answers with what it is given, and then the end."""

    def __init__(self, *answers: ControlMessage) -> None:
        super().__init__()
        self._answers = answers

    async def _answer(self, control: ControlLink, message: Generate) -> None:
        end = Finished(
            request=0, finish_reason="length", prompt_token_ids=[1, 2], text="", timing=NO_TIME
        )
        for answer in (*self._answers, end):
            fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
            control.send(type(answer)(**{**fields, "request": message.request}))


def told(node: OutputNode, outputs: OutputParams = EVERYTHING) -> list[GenerationEvent]:
    """The events of one request that is alone in its list."""

    async def main() -> list[GenerationEvent]:
        async with (
            client_of(node) as client,
            aclosing(client.generate(["a"], outputs=outputs)) as events,
        ):
            return [event async for event in events]

    return asyncio.run(main())


def test_pieces_come_as_events_and_whole_in_the_result() -> None:
    node = OutputNode(
        scored(4, 5),
        rows(0, 1, 2),
        scored(6),
        rows(1, 3, 4, 5, 6),
        rows(9, 7, kind="hidden", width=1),
    )
    events = told(node)
    assert node.asked[0].outputs == EVERYTHING
    assert [event.prompt_logprobs and len(event.prompt_logprobs) for event in events[:3]] == [
        2,
        None,
        1,
    ]
    assert events[3].logits is not None
    assert (events[3].logits.position, events[3].logits.n_rows) == (1, 2)
    result = events[-1].result
    assert result is not None
    assert result.logits is not None
    assert result.hidden is not None
    assert result.logits.array().tolist() == [[1, 2], [3, 4], [5, 6]]
    assert result.logits.array().dtype == np.float32
    assert (result.hidden.position, result.hidden.array().tolist()) == (9, [[7]])
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert [entry and entry.logprob for entry in others] == [-4, -5, -6]


def routing(position: int, *experts: int, top_k: int = 2, width: int = 4) -> RowsPiece:
    return RowsPiece(
        request=0,
        kind="routing",
        position=position,
        width=width,
        top_k=top_k,
        data=struct.pack(f"<{len(experts)}h", *experts),
    )


def test_routing_comes_by_row_and_layer() -> None:
    node = OutputNode(routing(0, 3, 0, -1, -1), routing(1, 2, 1, -1, -1, 0, 3, -1, -1))
    events = told(node, OutputParams(routing=True))
    assert node.asked[0].outputs.routing
    assert events[1].routing is not None
    assert (events[1].routing.position, events[1].routing.n_rows) == (1, 2)
    result = events[-1].result
    assert result is not None
    assert result.routing is not None
    assert result.routing.array().dtype == np.int16
    assert result.routing.array().tolist() == [
        [[3, 0], [-1, -1]],
        [[2, 1], [-1, -1]],
        [[0, 3], [-1, -1]],
    ]
    assert (result.logits, result.hidden) == (None, None)


def test_nothing_is_there_that_was_not_asked_for() -> None:
    result = told(OutputNode(), OutputParams())[-1].result
    assert result is not None
    assert (result.prompt_logprobs, result.logits, result.hidden) == (None, None, None)


@pytest.mark.parametrize(
    "pieces",
    [
        [rows(0, 1, 2), rows(2, 3, 4)],
        [rows(0, 1, 2), rows(0, 1, 2)],
        [rows(0, 1, 2), rows(1, 3, width=1)],
        [rows(0, 1, 2, 3)],
        [rows(0, width=0)],
        [routing(0, 1, 2, 3, 4), routing(2, 1, 2, 3, 4)],
        [routing(0, 1, 2, 3, 4), routing(1, 1, 2, 3, 4, top_k=4)],
        [routing(0, 1, 2, 3, 4, top_k=0)],
        [routing(0, 1, 2, 3, 4, top_k=3)],
        [routing(0, 1, 2, 3)],
    ],
)
def test_rows_out_of_turn_fail_the_request(pieces: list[RowsPiece]) -> None:
    end = told(OutputNode(*pieces))[-1]
    assert end.state is RequestState.FAILED
    assert isinstance(end.error, RemoteProtocolError)
    assert "came out of order" in str(end.error)


def test_outputs_that_cannot_be_are_refused_at_once() -> None:
    async def main() -> None:
        async with client_of(OutputNode()) as client:
            with pytest.raises(SamplingError, match="mean"):
                client.generate("a", outputs=OutputParams(hidden_mean=True))

    asyncio.run(main())
