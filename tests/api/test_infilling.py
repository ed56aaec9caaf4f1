"""Prompts for the middle of a text, as families were trained on them."""

from __future__ import annotations

import asyncio

import pytest
from support.cluster.scripted_node import FIM
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api.infilling import infill
from shardnet.errors import UsageError


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
            "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
        ),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]b[PREFIX]a"),
    ],
)
def test_each_family_has_its_form(marks: tuple[str, ...], prompt: str) -> None:
    ids = {mark: 5 + place for place, mark in enumerate(marks)}
    made = infill("a", "b", ids)
    assert (made.prompt, sorted(made.stop_ids)) == (prompt, sorted(ids.values()))
    with pytest.raises(UsageError, match="no tokens for the middle of a text"):
        infill("a", "b", {marks[0]: 5})


def test_completions_and_generations_have_a_suffix() -> None:
    async def main() -> None:
        async with served() as server:
            prompt = f"{FIM[0]}def f{FIM[1]}return{FIM[2]}"
            for path, key in (("/v1/completions", "choices"), ("/api/generate", "response")):
                body = {"prompt": "def f", "suffix": "return", "stream": False}
                assert key in (await ask(server.app, path, body)).json
                sent = server.node.asked[-1]
                assert (sent.prompt, sent.messages) == (prompt, None)
                assert set(sent.stop_token_ids) >= {900, 901, 902}

    asyncio.run(main())
