"""Pictures in every dialect, over a node in this process: what is counted, made, and refused."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp
from support.models.pictured_model import grey16, make_pictured, png
from support.servers.asgi_client import ask

from shardnet.api.client import Client
from shardnet.api.connections import in_process
from shardnet.api.events import GenerationResult
from shardnet.api.serve.server import application
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

PICTURE, OTHER = png(37, 53), png(60, 60, seed=1)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(tmp_path_factory.mktemp("pictured"))


@asynccontextmanager
async def serving(model: str) -> AsyncIterator[tuple[ASGIApp, Client]]:
    choice = ModelChoice(model=model, dtype="float32")
    async with in_process(model=choice, threads=1, device="cpu") as client:
        service = Service(
            client=client, settings=Settings(), models=ModelNames(client, may_switch=False)
        )
        try:
            yield application(service), client
        finally:
            await service.close()


def openai(*content: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": list(content)}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
    }


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), "detail": "auto"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


DIALECTS = {
    "openai": openai(text("a "), image(PICTURE), text("b"), image(OTHER)),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a "},
                        {"type": "input_image", "image_url": url_of(PICTURE), "detail": "low"},
                        {"type": "input_text", "text": "b"},
                        {"type": "input_image", "image_url": url_of(OTHER)},
                    ],
                }
            ],
            "temperature": 0,
            "max_output_tokens": 6,
        },
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 6,
            "temperature": 0,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        text("a "),
                        {"type": "image", "source": {"type": "base64", "data": base64_of(PICTURE)}},
                        text("b"),
                        {"type": "image", "source": {"type": "base64", "data": base64_of(OTHER)}},
                    ],
                }
            ],
        },
    ),
    "ollama": (
        "/api/chat",
        {
            "stream": False,
            "options": {"temperature": 0, "num_predict": 6},
            "messages": [
                {
                    "role": "user",
                    "content": "a b",
                    "images": [base64_of(PICTURE), base64_of(OTHER)],
                }
            ],
        },
    ),
}


def counted(name: str, answer: dict[str, Any]) -> int:
    match name:
        case "openai":
            return int(answer["usage"]["prompt_tokens"])
        case "ollama":
            return int(answer["prompt_eval_count"])
        case _:  # Anthropic's do not count what was kept
            usage = answer["usage"]
            return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def test_every_dialect_takes_pictures_and_counts_their_tokens(folder: Path) -> None:
    async def main() -> None:
        async with serving(str(folder)) as (app, client):
            answers = {}
            for name, (path, body) in DIALECTS.items():
                got = await ask(app, path, body)
                assert got.status == 200, got.content
                answers[name] = json.loads(got.content)
            # 37 x 53 pixels are 4 x 6 rows and their marks, 60 x 60 are 6 x 6: as the makers count
            n_prompt = await told(client, "a ", PICTURE, "b", OTHER)
            assert n_prompt > 4 * 6 + 6 * 6
            assert {counted(name, answers[name]) for name in DIALECTS} == {n_prompt}
            count = {"messages": DIALECTS["anthropic"][1]["messages"]}
            asked = await ask(app, "/v1/messages/count_tokens", count)
            assert json.loads(asked.content)["input_tokens"] == n_prompt
            again = json.loads((await ask(app, *DIALECTS["openai"])).content)
            assert again["choices"] == answers["openai"]["choices"]
            kept = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert kept == n_prompt - 1  # its pictures stand in what is known of the prefix
            other = openai(text("a "), image(png(37, 53, seed=5)), text("b"), image(OTHER))
            fresh = json.loads((await ask(app, *other)).content)
            assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] < 10

    asyncio.run(main())


async def told(client: Client, *content: str | bytes) -> int:
    """How many tokens the Python client's prompt has, of texts and pictures."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in content
    ]
    events = client.generate(
        [{"role": "user", "content": parts}], SamplingParams(), max_tokens=6, ignore_eos=True
    )
    result: GenerationResult | None = None
    async for event in events:
        assert event.error is None, event.error
        result = event.result or result
    assert result is not None
    assert result.usage.n_generated == 6
    return result.usage.n_prompt


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
BAD = {
    "svg": (SVG, "is XML or HTML|is SVG"),
    "cut off": (PICTURE[:-100], "damaged or cut off"),
    "no picture": (b"\0\1\2\3" * 9, "is no picture"),
    "empty": (b"", "has no picture|is empty"),
    "pdf": (b"%PDF-1.7 ...", "is PDF"),
}


def test_bad_pictures_and_places_are_named_and_nobody_else_notices(folder: Path) -> None:
    async def main() -> None:
        async with serving(str(folder)) as (app, _):
            good = openai(text("a "), image(PICTURE))
            beside = asyncio.ensure_future(ask(app, *good))
            for data, why in BAD.values():
                got = await ask(app, *openai(image(data), image(OTHER)))
                message = json.loads(got.content)["error"]["message"]
                assert got.status == 400, message
                assert re.search(why, message), message
            assert (await beside).status == 200
            assert (await ask(app, *openai(image(grey16(40, 40))))).status == 200
            web = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}
            got = await ask(app, *openai(web))
            assert got.status == 400
            assert b"--fetch-images" in got.content
            raw = {"prompt": "[IMG] [IMG]", "images": [base64_of(PICTURE)], "raw": True}
            got = await ask(app, "/api/generate", {**raw, "stream": False})
            assert got.status == 400
            assert b"2 places for pictures" in got.content

    asyncio.run(main())


def test_a_model_without_a_tower_says_so() -> None:
    async def main() -> None:
        async with serving(DEFAULT_MODEL_NAME) as (app, _):
            got = await ask(app, *openai(text("a"), image(PICTURE)))
            assert got.status == 400
            assert b"no vision tower" in got.content

    asyncio.run(main())
