"""Completions over a scripted node: prompts of all kinds, echo, streams; tokens of texts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from support.cluster.scripted_node import TEMPLATE
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api.events import LikelyToken, TokenLogprob
from shardnet.api.openai.logprobs import TextLogprobsWriter, Token, chat_logprobs, n_characters

PATH = "/v1/completions"


def scored(token_id: int, token: str, logprob: float, *top: LikelyToken) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id, token=token, bytes=token.encode(), logprob=logprob, top=top
    )


def test_prompts_of_all_kinds_in_their_order() -> None:
    async def main() -> None:
        async with served() as server:
            for prompt, texts in (
                ("ab", ["ab"]),
                ([97, 98], ["ab"]),
                (["ab", "cd"], ["ab", "cd"]),
                ([[97, 98], [99]], ["ab", "c"]),
            ):
                answer = (await ask(server.app, PATH, {"prompt": prompt, "n": 2})).json
                choices = answer["choices"]
                assert [choice["index"] for choice in choices] == [*range(2 * len(texts))]
                said = [choice["text"] for choice in choices]
                assert said == [text for text in texts for _ in range(2)]
                assert answer["usage"]["prompt_tokens"] == 2 * len(texts)
            assert server.node.asked[-1].max_tokens == 16

    asyncio.run(main())


def test_an_echo_comes_before_the_text_in_answer_and_stream() -> None:
    async def main() -> None:
        async with served() as server:
            for prompt in ("ab", [97, 98]):
                body: dict[str, Any] = {"prompt": prompt, "echo": True}
                answer = (await ask(server.app, PATH, body)).json
                assert answer["choices"][0]["text"] == "abab"
                assert answer["choices"][0]["logprobs"] is None
                events = (await ask(server.app, PATH, {**body, "stream": True})).events
                assert events[-1] == "[DONE]"
                texts = [event["choices"][0]["text"] for event in events[:-1]]
                assert "".join(texts) == "abab"

    asyncio.run(main())


def test_one_of_several_that_fails_ends_the_answer() -> None:
    async def main() -> None:
        async with served() as server:
            answer = await ask(server.app, PATH, {"prompt": ["ab", "fail", "wait"]})
            assert answer.status == 400
            assert "no room for fail" in answer.json["error"]["message"]
            await server.node.until_given_up(1)

    asyncio.run(main())


def test_tokens_of_texts_and_texts_of_tokens() -> None:
    async def main() -> None:
        async with served() as server:
            body = {"prompt": "ab", "add_special_tokens": False}
            tokens = (await ask(server.app, "/tokenize", body)).json
            assert tokens == {"tokens": [97, 98], "count": 2, "max_model_len": 64}
            assert (await ask(server.app, "/detokenize", {"tokens": [97]})).json == {"prompt": "a"}
            assert (await ask(server.app, "/tokenize", {"prompt": ""})).json["tokens"] == []
            told = (await ask(server.app, "/tokenizer_info")).json
            assert told == {"bos_token": None, "eos_token": "*", "chat_template": TEMPLATE}

    asyncio.run(main())


def test_the_chosen_token_is_among_the_likeliest_with_the_identical_number() -> None:
    other = LikelyToken(7, "a", -0.1)
    writer = TextLogprobsWriter(start=-len("<s>"))
    lists = writer.write(
        [
            (0, "<s>", None),
            (5, "b", scored(5, "b", -2.3456789, other)),
            (6, "a", scored(6, "a", -3.0, other)),  # another token that reads alike
            (8, "\ufffd", scored(8, "\ufffd", -1.0, LikelyToken(9, "\ufffd", -0.5))),
            (5, "b", scored(5, "b", float("-inf"))),
        ]
    )
    assert lists.tokens == ["<s>", "b", "a", "token_id:8", "b"]
    assert lists.token_logprobs[:4] == [None, -2.3456789, -3.0, -1.0]
    assert lists.top_logprobs[:4] == [
        None,
        {"b": -2.3456789, "a": -0.1},
        {"a": -3.0, "token_id:7": -0.1},
        {"token_id:8": -1.0, "token_id:9": -0.5},
    ]
    assert lists.text_offset == [0, 0, 1, 2, 3]
    least = lists.token_logprobs[-1]
    assert least is not None
    assert least < -1e38
    assert lists.top_logprobs[-1] == {"b": least}


def test_tokens_of_one_character_and_a_space_that_is_left_out_have_their_place_in_the_text() -> (
    None
):
    def part(piece: bytes) -> Token:
        text = piece.decode(errors="replace")
        return 9, text, replace(scored(9, text, -1.0), bytes=piece)

    pieces = (b" the", b" \xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b".")
    tokens = [(1, "<s>", None), *map(part, pieces)]
    text = "the é😀."
    writer = TextLogprobsWriter(start=len(text) - n_characters(tokens))
    assert writer.write(tokens[:4]).text_offset == [0, 0, 3, 4]
    assert writer.write(tokens[4:]).text_offset == [5, 5, 6]


def test_logprobs_of_chat_completions() -> None:
    [content] = chat_logprobs([scored(5, "é", -2.5, LikelyToken(7, "a", -0.1))]).content
    assert (content.token, content.bytes, content.logprob) == ("é", [0xC3, 0xA9], -2.5)
    tops = [(top.token, top.bytes, top.logprob) for top in content.top_logprobs]
    assert tops == [("a", [97], -0.1), ("é", [0xC3, 0xA9], -2.5)]
    [alone] = chat_logprobs([scored(5, "b", -2.5)]).content
    assert alone.top_logprobs == []
