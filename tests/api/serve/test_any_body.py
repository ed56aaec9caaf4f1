"""Whatever a body says, no answer is a 500: scripts/check_schemathesis in short."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from typing import Any

import msgspec
import pytest
from support.servers.asgi_client import ask
from support.servers.http_app import served
from support.soak import cases

from shardnet.api.serve.server import endpoints
from shardnet.api.server.endpoint import JSON

MESSAGES = [{"role": "user", "content": "ab"}]
USUAL: dict[str, Any] = {
    "messages": MESSAGES,
    "prompt": "ab",
    "input": "ab",
    "tokens": [97],
    "max_tokens": 4,
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
}
BODIES = {
    (endpoint.method, endpoint.path): endpoint.body
    for endpoint in endpoints()
    if endpoint.body is not None and endpoint.body_type == JSON
}
AWKWARD: list[Any] = cases(
    [-1, 2**70, "", [[]], [0, "a"], [{}]],
    [{}, [], True, 0, 1, 0.5, 1e308, 2**31, "a", "\x00", "\U0001f600", [""], [None], [{"": {}}]],
)


def test_no_body_that_is_wrong_in_a_field_makes_a_500() -> None:
    async def main() -> None:
        async with served() as server:
            for (method, path), kind in BODIES.items():
                fields = [field.encode_name for field in msgspec.structs.fields(kind)]
                right = {name: value for name, value in USUAL.items() if name in fields}
                for name, value in product(fields, AWKWARD):
                    body = {**right, name: value}
                    answer = await ask(server.app, path, body, method=method)
                    assert answer.status < 500, (path, name, value, answer.content)

    asyncio.run(main())


@pytest.mark.parametrize("half", [r"x\ud83d", r"x\ud83d and more", r"x\ude00"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/api/chat", "messages"),
    ],
)
def test_half_a_surrogate_pair_is_named_by_its_field(path: str, field: str, half: str) -> None:
    body = json.dumps({"max_tokens": 4, field: [{"role": "user", "content": "HALF"}]})

    async def main() -> None:
        async with served() as server:
            answer = await ask(server.app, path, body.replace("HALF", half).encode())
            assert answer.status == 400
            words = f"{field}[0].content has half a surrogate pair at character 2, "
            assert words in answer.content.decode()
            assert server.node.asked == []

    asyncio.run(main())
