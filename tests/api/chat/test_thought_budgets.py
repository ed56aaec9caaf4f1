"""Reasoning ends at its budget, whatever drafts, batches, or a call in the middle of it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from support.servers.ring_server import THINK_MARKS, THINK_TEMPLATE, make_tool_model

from shardnet import api
from shardnet.constraints import Constraint

ASKED: list[api.Message] = [{"role": "user", "content": "Who is Emma?"}]
SAMPLED = api.SamplingParams(temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with marks of reasoning, with which its prompts end."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    return str(make_tool_model(folder, THINK_TEMPLATE, THINK_MARKS))


def close_id(described: Any) -> int:
    return next(int(one.token_id) for one in described.added if one.text == THINK_MARKS[0])


def test_the_mark_comes_at_the_budget_with_drafts_and_in_batches(model: str) -> None:
    async def main() -> None:
        async with api.in_process(model=model, threads=1) as client:
            close = close_id(await client.describe_tokenizer())
            [free] = await client.complete(ASKED, SAMPLED, max_tokens=40, keep_special_tokens=True)
            assert close not in free.token_ids
            for budget in (0, 5):
                thinking = await client.thinking(budget)
                texts = set()
                for options in ({}, {"speculate": "ngram"}):
                    told = await client.complete(
                        [ASKED] * 2, SAMPLED, max_tokens=12, thinking=thinking, **options
                    )
                    texts.add(told[0].token_ids)
                    assert all(one.token_ids.index(close) == budget for one in told)
                assert len(texts) == 1
                [ids] = texts
                assert ids[:budget] == free.token_ids[:budget]
                assert close not in ids[budget + 1 :]

    asyncio.run(main())


def test_a_message_goes_before_the_mark_and_json_follows_it(model: str) -> None:
    async def main() -> None:
        async with api.in_process(model=model, threads=1) as client:
            thinking = await client.thinking(5, message=" So be it.")
            [told] = await client.complete(
                ASKED, SAMPLED, max_tokens=40, thinking=thinking, keep_special_tokens=True
            )
            assert " So be it.</think>" in told.text
            grammar = Constraint(kind="lark", text='start: /(?s:.*)/ <[%d]> "yes"')
            close = close_id(await client.describe_tokenizer())
            grammar = Constraint(kind="lark", text=grammar.text % close)
            [told] = await client.complete(
                ASKED, SAMPLED, max_tokens=40, thinking=await client.thinking(5), constraint=grammar
            )
            assert told.token_ids[5] == close
            assert told.text.endswith("yes")

    asyncio.run(main())


def test_a_call_ends_the_reasoning_of_a_request_that_runs(model: str) -> None:
    async def main() -> None:
        async with api.in_process(model=model, threads=1) as client:
            close = close_id(await client.describe_tokenizer())
            [free] = await client.complete(ASKED, SAMPLED, max_tokens=40)
            made: list[int] = []
            text = ""
            events = client.generate(
                ASKED,
                SAMPLED,
                max_tokens=40,
                thinking=await client.thinking(),
                keep_special_tokens=True,
            )
            async with aclosing(events):
                async for event in events:
                    made += event.token_ids
                    text += event.text
                    if len(made) == 6 and event.token_ids:
                        await asyncio.sleep(0.1)  # more come, which nobody has taken
                        client.end_thought(event.request_id)
                    if event.result is not None:
                        assert event.result.token_ids == tuple(made)
                        assert event.result.text == text
            place = made.index(close)
            assert place == 6
            assert tuple(made[:6]) == free.token_ids[:6]
            assert len(made) == 40
            with pytest.raises(api.client.UsageError, match="runs"):
                client.end_thought(10**6)

    asyncio.run(main())
