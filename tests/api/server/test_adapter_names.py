"""LoRA adapters over HTTP: models of their own in every dialect, and llama-server's field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from support.servers.asgi_client import ask
from support.servers.http_app import Served, served

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.plans import AdapterScale, NamedAdapter

MESSAGES = [{"role": "user", "content": "ab"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "ab"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/generate": {"prompt": "ab", "stream": False},
    "/api/chat": {"messages": MESSAGES, "stream": False},
}


def has_adapters(server: Served) -> None:
    """Let the default model have two adapters."""
    client = server.service.client
    adapters = [NamedAdapter("tales", "/adapters/tales"), NamedAdapter("code", "/adapters/code")]
    client.choice = replace(client.choice, adapters=adapters)


@pytest.mark.parametrize("path", BODIES)
def test_a_model_with_an_adapter_is_asked_for_by_its_name(path: str) -> None:
    async def main() -> None:
        async with served() as server:
            has_adapters(server)
            for name, used in (
                (f"{DEFAULT_MODEL_NAME}:code", [AdapterScale("code", 1.0)]),
                (DEFAULT_MODEL_NAME, []),
            ):
                answer = await ask(server.app, path, {"model": name, **BODIES[path]})
                assert answer.status == 200, answer.content
                choice = server.node.asked[-1].choice
                assert choice.used_adapters == used
                assert [adapter.name for adapter in choice.adapters] == ["tales", "code"]
            unknown = {"model": f"{DEFAULT_MODEL_NAME}:other", **BODIES[path]}
            assert (await ask(server.app, path, unknown)).status == 404

    asyncio.run(main())


def test_lists_have_them_behind_their_model() -> None:
    async def main() -> None:
        async with served() as server:
            has_adapters(server)
            wanted = [DEFAULT_MODEL_NAME, *(f"{DEFAULT_MODEL_NAME}:{n}" for n in ("tales", "code"))]
            listed = (await ask(server.app, "/v1/models")).json["data"]
            assert [card["id"] for card in listed][:3] == wanted
            tags = (await ask(server.app, "/api/tags")).json["models"]
            assert [tag["name"] for tag in tags][:3] == wanted

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/infill"])
def test_llama_servers_field_says_all_that_are_used(path: str) -> None:
    async def main() -> None:
        async with served() as server:
            has_adapters(server)
            body = {
                "model": f"{DEFAULT_MODEL_NAME}:code",
                **BODIES.get(path, {"input_prefix": "a"}),
            }
            await ask(server.app, path, {**body, "lora": [{"id": 0, "scale": 0.5}]})
            used = server.node.asked[-1].choice.used_adapters
            assert used == [AdapterScale("tales", 0.5)]
            wrong = await ask(server.app, path, {**body, "lora": [{"id": 2}]})
            assert wrong.status == 400
            assert "the model has 2 adapters" in wrong.json["error"]["message"]

    asyncio.run(main())
