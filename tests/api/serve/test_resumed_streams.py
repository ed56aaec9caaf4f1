"""A client that comes back with its request's id, to another server, gets the rest of it."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp
from support.cluster.small_node import small_settings
from support.servers.asgi_client import ask

from shardnet.api import generation
from shardnet.api.client import open_client
from shardnet.api.serve.server import application
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.cluster.node.node import Node, running

ASKED = [{"role": "user", "content": "Who is Emma?"}]
SAMPLED = {"temperature": 0.9, "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "It was", "max_tokens": 12, **SAMPLED},
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 12, "logprobs": True, **SAMPLED},
    "/v1/messages": {"messages": ASKED, "max_tokens": 12, "model": "default", **SAMPLED},
    "/v1/responses": {"input": "Who is Emma?", "max_output_tokens": 12, **SAMPLED},
    "/api/generate": {"prompt": "It was", "model": "default", "options": {"num_predict": 12}},
    "/api/chat": {"messages": ASKED, "model": "default", "options": {"num_predict": 12}},
}
HAS = 3
"""Events that the client has when it comes back."""
CHANGES = re.compile(r"(?<=[_-])[0-9a-zA-Z]{8,}|\d+(?:[.:T-]\d+)*Z?")
"""Times, durations and ids: another server counts and names them anew."""


def events(body: bytes) -> list[str]:
    """The events of a stream; comments are none."""
    end = "\n\n" if b"\n\n" in body else "\n"
    whole = CHANGES.sub("N", body.decode()).split(end)
    return [event for event in whole if not event.startswith(":")]


async def server(node: Node, stack: AsyncExitStack) -> ASGIApp:
    """Another server of the same cluster."""
    client = await stack.enter_async_context(open_client(await node.client()))
    models = ModelNames(client, may_switch=True)
    settings = Settings(has_deputy=True, headers_s=60.0, heartbeat_s=60.0)
    service = Service(client=client, settings=settings, models=models)
    stack.push_async_callback(service.close)
    return application(service)


def test_streams_of_all_dialects_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled without a seed. An id that nobody knows is refused, and what is no count too."""
    monkeypatch.setattr(generation, "RESUME_S", 0.05)

    async def main() -> None:
        async with running(small_settings(tmp_path)) as node, AsyncExitStack() as stack:
            first, second = await server(node, stack), await server(node, stack)
            for path, body in STREAMS.items():
                headers = {"x-request-id": f"id of {path}".replace(" ", "-")}
                whole = await ask(first, path, body, headers=headers)
                assert whole.status == 200, whole.content
                headers["x-shardnet-resume"] = str(HAS)
                rest = await ask(second, path, body, headers=headers)
                assert rest.status == 200, rest.content
                assert events(rest.content) == events(whole.content)[HAS:], path
                assert len(events(rest.content)) > 2 * HAS, path
            headers["x-shardnet-resume"] = str(len(events(whole.content)))
            nothing = await ask(second, path, body, headers=headers)
            assert (nothing.status, nothing.content) == (200, b"")

            path = "/v1/completions"
            counts = {"0": "no node keeps an answer", "-1": "number", "0" * 4400: "number"}
            for count, why in counts.items():
                headers = {"x-request-id": "other", "x-shardnet-resume": count}
                refused = await ask(second, path, STREAMS[path], headers=headers)
                assert refused.status == 400
                assert why in refused.json["error"]["message"]

    asyncio.run(main())
