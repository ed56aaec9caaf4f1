"""A chat request on its way: what the nodes are sent, and what becomes of what the model writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.cluster.scripted_node import ScriptedNode, client_of
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api.chat.request import ChatRequest, ChatTurn, Tool
from shardnet.api.chat.run import Accepted, ChatEvent, Ended, Piece, run_chat
from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.events import GenerationEvent, RequestState
from shardnet.api.server.settings import Settings
from shardnet.constraints import Constraint
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages import generation
from shardnet.wire.messages.chat import ToolCall
from shardnet.wire.messages.plans import ModelChoice

CALL = '<tool_call>{"name": "weather", "arguments": {"at": 1}}</tool_call>'
WEATHER = Tool(name="weather", description="of today", parameters={"type": "object"})


def chat(*turns: ChatTurn, **fields: Any) -> ChatRequest:
    return ChatRequest(
        turns=turns,
        model=ModelChoice(model="m"),
        sampling=SamplingParams(),
        options={"max_tokens": 5},
        **fields,
    )


def user(text: str) -> ChatTurn:
    return ChatTurn(role="user", content=text)


async def collected(events: AsyncGenerator[ChatEvent, None]) -> list[ChatEvent]:
    return [event async for event in events]


def deltas_of(events: Sequence[ChatEvent], sample: int = 0) -> list[OutputDelta]:
    pieces = [event for event in events if isinstance(event, Piece) and event.sample == sample]
    return [delta for piece in pieces for delta in piece.deltas]


def test_reasoning_content_and_calls_are_told_apart() -> None:
    async def main() -> None:
        other = CALL.replace("1}}", "2}}")
        text = f"<think>hm</think>Hi{5 * CALL}{other}"  # of equal ones three are kept
        async with client_of(ScriptedNode()) as client:
            for parallel, n_calls in ((True, 4), (False, 1)):
                asked = chat(user(text), tools=(WEATHER,), parallel_tool_calls=parallel, n=2)
                events = await collected(run_chat(client, asked, is_streamed=True))
                assert isinstance(events[0], Accepted)
                assert sum(isinstance(event, Accepted) for event in events) == 1
                for sample in (0, 1):
                    deltas = deltas_of(events, sample)
                    told = {
                        kind: "".join(d.text for d in deltas if isinstance(d, kind))
                        for kind in (ReasoningDelta, ContentDelta)
                    }
                    assert told == {ReasoningDelta: "hm", ContentDelta: "Hi"}
                    started = [d for d in deltas if isinstance(d, ToolCallStarted)]
                    assert [d.name for d in started] == ["weather"] * n_calls
                    assert [d.index for d in started] == [*range(n_calls)]
                    assert len({d.call_id for d in started}) == n_calls
                    assert None not in {d.call_id for d in started}
                    assert [d.text for d in deltas if isinstance(d, ToolCallDelta)]
                ends = [event for event in events if isinstance(event, Ended)]
                assert [end.finish_reason for end in ends] == ["tool_calls"] * 2
            # Without tools a call is text.
            events = await collected(run_chat(client, chat(user(CALL)), is_streamed=False))
            assert "".join(d.text for d in deltas_of(events) if isinstance(d, ContentDelta)) == CALL
            assert isinstance(events[-1], Ended)
            assert events[-1].finish_reason == "stop"

    asyncio.run(main())


LONG = CALL.replace("1}", f'"{600 * "x"}"}}')
"""A call of more characters than are held back."""


def test_an_end_is_judged_by_what_is_whole() -> None:
    """A call of which only a part was given is none, streamed or not."""

    async def main() -> None:
        cut, broken, again = LONG[:-20], LONG.replace("}}", "}]"), 3 * LONG + LONG[:-20]
        async with client_of(ScriptedNode()) as client:
            for text, is_parallel, streamed, whole in (
                (LONG, True, "tool_calls", "tool_calls"),
                (cut, True, "stop", "stop"),
                (broken, True, "stop", "stop"),
                (CALL + cut, True, "stop", "tool_calls"),
                (CALL + cut, False, "tool_calls", "tool_calls"),  # the second is not given
                (again, True, "tool_calls", "tool_calls"),  # nor is what may be equal once more
            ):
                for is_streamed, reason in ((True, streamed), (False, whole)):
                    asked = chat(user(text), tools=(WEATHER,), parallel_tool_calls=is_parallel)
                    events = await collected(run_chat(client, asked, is_streamed=is_streamed))
                    assert isinstance(events[-1], Ended)
                    assert events[-1].finish_reason == reason

    asyncio.run(main())


def test_reasoning_is_counted_and_found_behind_a_lost_ring() -> None:
    """The end of the prompt, in which reasoning began, may come with a later state."""
    fields: dict[str, Any] = {"request_id": 1, "index": 0, "sample": 0}
    running = {**fields, "state": RequestState.RUNNING}
    told = [
        GenerationEvent(**fields, state=RequestState.RECOVERING, why="lost"),
        GenerationEvent(**running, prompt_tail="<think>"),
        *(
            GenerationEvent(**running, token_ids=(1,), text=text)
            for text in ("h", "m ", "</think>")
        ),
    ]

    class Lost:
        """A client whose ring is lost before the first state."""

        def __init__(self, client: Any) -> None:
            self.client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self.client, name)

        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[GenerationEvent, None]:
            for event in told:
                yield event
            async for event in self.client.generate("Hi", SamplingParams(), model="m"):
                yield replace(event, **fields)

    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            events = await collected(run_chat(Lost(client), chat(user("a")), is_streamed=True))
        deltas = deltas_of(events)
        assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)).strip() == "hm"
        assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == "Hi"
        [end] = [event for event in events if isinstance(event, Ended)]
        assert end.n_thought == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "tool", "sign"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "roll"}}, '"id":"call_'),
        ("/v1/messages", {"name": "roll", "input_schema": {}}, '"type":"tool_use"'),
        ("/v1/responses", {"type": "function", "name": "roll"}, '"type":"function_call"'),
        ("/api/chat", {"type": "function", "function": {"name": "roll"}}, '"function":{"index":'),
    ],
)
def test_equal_calls_are_kept_up_to_a_number_in_every_form(
    path: str, tool: dict[str, Any], sign: str
) -> None:
    async def main() -> None:
        told = [{"role": "user", "content": 5 * CALL.replace("weather", "roll")}]
        body = {"messages": told, "input": told, "tools": [tool], "max_tokens": 999}
        for settings, n_calls in (
            (Settings(), 3),
            (Settings(most_equal_calls=1), 1),
            (Settings(most_equal_calls=0), 5),
        ):
            async with served(settings) as server:
                answer = (await ask(server.app, path, {**body, "stream": False})).content.decode()
                assert answer.count(sign) == n_calls

    asyncio.run(main())


def test_the_nodes_are_sent_the_whole_conversation() -> None:
    async def main() -> None:
        call = ToolCall(id="c1", name="weather", arguments='{"at": 1}')
        turns = (
            ChatTurn(role="assistant", reasoning="hm", tool_calls=(call,)),
            ChatTurn(role="tool", content="sun", tool_call_id="c1", name="weather"),
        )
        asked = chat(*turns, tools=(WEATHER,), template_options={"enable_thinking": False})
        node = ScriptedNode()
        async with client_of(node) as client:
            await collected(run_chat(client, asked, is_streamed=True))
            sent = node.asked[-1]
            assert sent.messages is not None
            first, second = sent.messages
            assert (first.content, first.reasoning_content) == (None, "hm")
            assert (first.tool_calls[0].id, first.tool_calls[0].name) == ("c1", "weather")
            assert (second.content, second.tool_call_id, second.name) == ("sun", "c1", "weather")
            assert '"name": "weather"' in sent.tools
            assert sent.template_options == [("enable_thinking", False)]
            assert sent.keep_special_tokens
            none = chat(*turns, tools=(WEATHER,), tool_choice="none")
            await collected(run_chat(client, none, is_streamed=True))
            assert node.asked[-1].tools == ""

    asyncio.run(main())


def test_a_call_that_must_come_is_a_constraint() -> None:
    async def main() -> None:
        node = ScriptedNode()

        async def sent(text: str, **fields: Any) -> Constraint | None:
            asked = chat(user(text), tools=(WEATHER,), **fields)
            await collected(run_chat(client, asked, is_streamed=True))
            message = node.asked[-1].constraint
            return None if message is None else message.params()

        async with client_of(node) as client:
            assert await sent("hi") is None
            forced = await sent("hi", tool_choice="required")
            assert forced is not None
            assert (forced.kind, "weather" in forced.text) == ("lark", True)
            assert forced.text.startswith("start: (")  # reasoning may come first
            begun = await sent("hi <think>\n", tool_choice="required", forced_tool="weather")
            assert begun is not None
            assert begun.text.startswith("start: r")  # or goes on
            answer = Constraint(kind="json")
            asked = chat(user("hi"), tools=(WEATHER,))
            asked.options["constraint"] = answer
            await collected(run_chat(client, asked, is_streamed=True))
            either = node.asked[-1].constraint
            assert either is not None
            assert either.kind == "lark"
            alone = chat(user("hi"))
            alone.options["constraint"] = answer
            await collected(run_chat(client, alone, is_streamed=True))
            assert node.asked[-1].constraint == generation.Constraint(
                kind=answer.kind, text=answer.text
            )

    asyncio.run(main())
