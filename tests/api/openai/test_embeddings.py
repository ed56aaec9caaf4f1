"""Texts as vectors in OpenAI's form and in Ollama's, over a scripted node."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import pytest
from msgspec import structs
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api.embedding import Shape, embed
from shardnet.errors import UsageError
from shardnet.output_params import ALL_ROWS, OutputParams
from shardnet.wire.framing.schema import MAX_SECONDS
from shardnet.wire.messages.generation import Encode, Encoded, Tokenized
from shardnet.wire.messages.plans import ModelChoice

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
            cut = (await ask(server.app, PATH, {"input": "a" * 70, "truncate": True})).json
            assert cut["data"][0]["embedding"] == pytest.approx(unit(3, 4, 64))
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
            wide = {"input": "a", "dimensions": 9}
            answer = (await ask(server.app, "/api/embed", wide)).json
            assert answer["embeddings"][0] == pytest.approx(unit(3, 4, 1))
            assert (await ask(server.app, "/api/embed", {})).json["embeddings"] == []
            assert (await ask(server.app, "/api/embed", {"input": ""})).json["embeddings"] == []
            old = (await ask(server.app, "/api/embeddings", {"prompt": "abc"})).json
            assert old == {"embedding": [3, 4, 3]}

    asyncio.run(main())


@dataclass(slots=True)
class Encoder:
    """An encoder of vectors (3, 4, 0), or a ring whose texts begin with 1 and end with 2."""

    kind: Literal["embedding", ""] = "embedding"
    n_texts: int = 0
    prompts: list[Any] = field(default_factory=list)

    async def encode(self, message: Encode) -> Encoded:
        n_texts = len(message.texts)
        self.n_texts += n_texts
        values = np.array([[3, 4, 0]] * n_texts, "<f4").tobytes()
        told = Encoded(request=0, kind=self.kind, normalized=False, width=3)
        return structs.replace(told, values=values, n_tokens=[1] * n_texts)

    async def tokenize(self, text: str, *, model: object, bos: str) -> Tokenized:
        ids = [*map(ord, text)]
        return Tokenized(request=0, token_ids=ids if bos == "off" else [1, *ids, 2], context=6)

    async def generate(
        self, prompts: list[Any], *_: object, **more: object
    ) -> AsyncGenerator[Any, None]:
        self.prompts += [prompt.content for prompt in prompts]
        return
        yield


async def vectors_of(encoder: Encoder, texts: list[Any], shape: Shape, **more: Any) -> list[Any]:
    made = embed(cast("Any", encoder), texts, shape, model=ModelChoice(model="m"), **more)
    return [one.vector.tolist() async for one in made]


def test_dimensions_of_an_encoder_are_looked_at_first_and_what_is_cut_is_scaled() -> None:
    async def main() -> None:
        encoder = Encoder()
        for shape, expected in (
            (Shape(), [3, 4, 0]),  # as its files say
            (Shape(dimensions=3), [3, 4, 0]),
            (Shape(dimensions=1), [1]),
            (Shape(dimensions=1, normalized=False), [3]),
            (Shape(dimensions=9, at_most=True, normalized=True), [0.6, 0.8, 0]),
        ):
            assert await vectors_of(encoder, ["a"], shape) == [pytest.approx(expected)]
        n_texts = encoder.n_texts
        with pytest.raises(UsageError, match="dimensions is 4 and the model has 3 numbers"):
            await vectors_of(encoder, ["a"], Shape(dimensions=4))
        assert encoder.n_texts == n_texts

    asyncio.run(main())


def test_what_ends_a_text_stays_where_it_is_cut() -> None:
    async def main() -> None:
        ring = Encoder(kind="")
        await vectors_of(ring, ["bcd", "bcdefgh", [7] * 9], Shape(), truncate=True)
        begun = [1, *map(ord, "bcd")]
        assert ring.prompts == [[*begun, 2], [*begun, ord("e"), 2], [7] * 9]
        await vectors_of(ring, ["bcdefgh"], Shape(), truncate=True, bos="off")
        assert ring.prompts[-1] == [*map(ord, "bcdefg")]

    asyncio.run(main())


def test_ollamas_keep_alive_is_told_to_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the texts: the question before them, what the model is, ends no model's time."""
    asked: list[Encode] = []

    async def encode(message: Encode, on_loading: object) -> Encoded:
        asked.append(message)
        return await Encoder().encode(message)

    async def main() -> None:
        async with served() as server:
            monkeypatch.setattr(server.service.client, "encode", encode)
            for given, kept_s in ((0, 0.0), ("5m", 300.0), (-1, MAX_SECONDS), (None, None)):
                body = {"input": "a", "keep_alive": given}
                assert (await ask(server.app, "/api/embed", body)).status == 200
                assert [one.keep_s for one in asked[-2:]] == [None, kept_s]
            assert (await ask(server.app, "/api/embed", {"keep_alive": 0})).status == 200
            assert (asked[-1].texts, asked[-1].keep_s) == ([], 0.0)

    asyncio.run(main())
