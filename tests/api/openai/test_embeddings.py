"""Texts as vectors in OpenAI's form and in Ollama's, over a scripted node."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import numpy as np
import pytest
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.output_params import ALL_ROWS, OutputParams

PATH = "/v1/embeddings"


def unit(*values: float) -> list[float]:
    vector = np.array(values, np.float32)
    whole: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return whole


def test_vectors_of_texts_and_token_ids_in_their_order() -> None:
    async def main() -> None:
        async with served() as server:
            for given, lengths in (
                ("ab", [2]),
                ([97, 98, 99], [3]),
                (["abcd", "a"], [4, 1]),
                ([[97], [98, 99]], [1, 2]),
            ):
                answer = (await ask(server.app, PATH, {"input": given})).json
                assert [one["index"] for one in answer["data"]] == [*range(len(lengths))]
                for one, length in zip(answer["data"], lengths, strict=True):
                    assert one["embedding"] == pytest.approx(unit(3, 4, length))
                n_tokens = 2 * len(lengths)
                assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
            asked = server.node.asked[-1]
            assert (asked.max_tokens, asked.outputs.hidden_rows) == (0, 1)

    asyncio.run(main())


def test_dimensions_base64_and_the_mean() -> None:
    async def main() -> None:
        async with served() as server:
            body: dict[str, Any] = {"input": "a", "dimensions": 2, "encoding_format": "base64"}
            answer = (await ask(server.app, PATH, {**body, "pooling": "mean"})).json
            [one] = answer["data"]
            raw = base64.b64decode(one["embedding"])
            assert struct.unpack("<2f", raw) == pytest.approx((0.6, 0.8))
            mean = OutputParams(hidden_rows=ALL_ROWS, hidden_mean=True)
            assert server.node.asked[-1].outputs == mean
            as_it_is = {"input": "a", "normalize": False}
            [one] = (await ask(server.app, PATH, as_it_is)).json["data"]
            assert one["embedding"] == [3, 4, 1]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "dimensions": 4}, "dimensions is 4 and the model has 3 numbers"),
        ({"input": []}, "input is empty"),
        ({"input": "a", "pooling": "max"}, "pooling is 'max'"),
        ({"input": ["a"] * 2049}, "input has 2049: give at most 2048"),
        ({"input": ["a", "fail", "wait"]}, "input 2 of 3: scripted: no room for fail"),
    ],
)
def test_what_cannot_be_embedded_is_named(body: Any, words: str) -> None:
    async def main() -> None:
        async with served() as server:
            answer = await ask(server.app, PATH, body)
            assert answer.status == 400
            assert words in answer.json["error"]["message"]

    asyncio.run(main())


def test_ollamas_forms() -> None:
    async def main() -> None:
        async with served() as server:
            answer = (await ask(server.app, "/api/embed", {"input": ["a", "bc"]})).json
            assert answer["embeddings"][1] == pytest.approx(unit(3, 4, 2))
            assert answer["prompt_eval_count"] == 4
            cut = {"input": "a" * 70, "truncate": True, "dimensions": 3}
            answer = (await ask(server.app, "/api/embed", cut)).json
            assert answer["embeddings"][0] == pytest.approx(unit(3, 4, 64))
            assert (await ask(server.app, "/api/embed", {})).json["embeddings"] == []
            old = (await ask(server.app, "/api/embeddings", {"prompt": "abc"})).json
            assert old == {"embedding": [3, 4, 3]}

    asyncio.run(main())
