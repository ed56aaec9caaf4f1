"""A chat request on its way through a parser: deltas, calls too many, the reason of the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from support.cluster.scripted_node import ScriptedNode, client_of

from shardnet.api.chat.request import ChatRequest, ChatTurn
from shardnet.api.chat.run import Accepted, ChatEvent, Ended, Piece, run_chat
from shardnet.api.chat_formats.deltas import (
    ContentDelta,
    OutputDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.types import SamplingParams
from shardnet.wire.messages.plans import ModelChoice


class OneCallACharacter:
    """A parser for which each character is a call, and which holds the last one back."""

    def __init__(self) -> None:
        self._n_calls = 0
        self._held = ""

    def feed(self, token_ids: Sequence[int], text: str) -> list[OutputDelta]:
        self._held, told = text, self._held
        return [delta for character in told for delta in self._call(character)]

    def finish(self) -> list[OutputDelta]:
        return [*self._call(self._held), ContentDelta("end")]

    def _call(self, character: str) -> list[OutputDelta]:
        index, self._n_calls = self._n_calls, self._n_calls + 1
        return [ToolCallStarted(index, None, character), ToolCallDelta(index, "{}")]


def chat(text: str, **fields: Any) -> ChatRequest:
    return ChatRequest(
        turns=(ChatTurn(role="user", content=text),),
        model=ModelChoice(model="m"),
        sampling=SamplingParams(),
        options={"max_tokens": 5},
        **fields,
    )


async def collected(events: AsyncGenerator[ChatEvent, None]) -> list[ChatEvent]:
    return [event async for event in events]


def test_calls_are_the_reason_of_the_end_and_one_at_most_if_wanted() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            for parallel, names in ((True, ["a", "b"]), (False, ["a"])):
                asked = chat("ab", parallel_tool_calls=parallel)
                events = await collected(run_chat(client, asked, OneCallACharacter))
                assert isinstance(events[0], Accepted)
                deltas = [d for e in events if isinstance(e, Piece) for d in e.deltas]
                started = [d.name for d in deltas if isinstance(d, ToolCallStarted)]
                assert started == names
                assert deltas[-1] == ContentDelta("end")
                end = events[-1]
                assert isinstance(end, Ended)
                assert end.finish_reason == "tool_calls"

    asyncio.run(main())


def test_samples_have_their_own_parsers() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            events = await collected(run_chat(client, chat("abc", n=3)))
            texts = ["", "", ""]
            for event in events:
                if isinstance(event, Piece):
                    for delta in event.deltas:
                        assert isinstance(delta, ContentDelta)
                        texts[event.sample] += delta.text
            assert texts == ["abc"] * 3
            assert sorted(e.sample for e in events if isinstance(e, Ended)) == [0, 1, 2]
            assert sum(isinstance(event, Accepted) for event in events) == 1

    asyncio.run(main())
