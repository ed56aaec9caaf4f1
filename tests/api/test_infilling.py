"""Prompts for the middle of a text, as families were trained on them."""

from __future__ import annotations

import asyncio

import pytest
from support.cluster.scripted_node import FIM
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api import requests
from shardnet.api.requests import infill
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
    with pytest.raises(UsageError, match="suffix needs a model with tokens"):
        infill("a", "b", {marks[0]: 5})


def test_other_files_stand_before() -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    extra = [("a.py", "x = 1\n"), ("", "y")]
    made = infill("a", "b", dict.fromkeys(names, 1), extra)
    assert made.prompt == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\ny"
        "<|file_sep|>filename\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    made = infill("a", "b", dict.fromkeys(names[:3], 1), extra)
    assert made.prompt == "x = 1\n\ny\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


def test_editors_ask_as_they_ask_llama_server() -> None:
    async def main() -> None:
        async with served() as server:
            body = {"input_prefix": "def f", "input_suffix": "end", "prompt": "(", "n_predict": 9}
            prompt = f"{FIM[0]}def f{FIM[1]}end{FIM[2]}("
            whole = (await ask(server.app, "/infill", body)).json
            assert (whole["content"], whole["stop"], whole["stop_type"]) == (prompt, True, "eos")
            assert whole["tokens_evaluated"] == 2
            *parts, last = (await ask(server.app, "/infill", {**body, "stream": True})).events
            assert "".join(part["content"] for part in [*parts, last]) == prompt
            assert [part["stop"] for part in parts] == [False] * len(parts)
            assert (last["stop"], last["model"]) == (True, "shardnet/default")
            sent = server.node.asked[-1]
            assert (sent.max_tokens, sent.prompt) == (9, prompt)
            assert {900, 901, 902} <= set(sent.stop_token_ids)

    asyncio.run(main())


def test_a_model_without_marks_is_refused_by_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MARKS", ())

    async def main() -> None:
        async with served() as server:
            for path, body, field in (
                ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
                ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
            ):
                answer = await ask(server.app, path, body)
                error = answer.json["error"]
                assert (answer.status, error["param"]) == (400, field)
                assert error["message"].startswith(f"{field} needs a model with tokens")
                assert "name a model that was trained for it" in error["message"]

    asyncio.run(main())


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
