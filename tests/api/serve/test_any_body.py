"""Whatever a body says, no answer is a 500: scripts/check_schemathesis in short."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.asgi_client import ask
from support.servers.http_app import served
from support.soak import examples

from shardnet.api.anthropic import endpoints as anthropic
from shardnet.api.ollama import endpoints as ollama
from shardnet.api.openai import endpoints as openai

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
    endpoint.path: endpoint.body
    for room in (openai, anthropic, ollama)
    for endpoint in room.endpoints()
    if endpoint.body is not None
}
NUMBERS = [0, -1, 1, 2**31, 2**64, -(2**70), 1e308, 0.5]
TEXTS = ["", "a", "\x00", "1", "\U0001f600"]
KEYS = ["role", "content", "type", "text", "name", ""]
AWKWARD: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.sampled_from([*NUMBERS, *TEXTS]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body that is right but for a field or two."""
    path = draw(st.sampled_from(sorted(BODIES)))
    fields = [field.encode_name for field in msgspec.structs.fields(BODIES[path])]
    body = {name: value for name, value in USUAL.items() if name in fields}
    return path, body | draw(st.dictionaries(st.sampled_from(fields), AWKWARD, max_size=2))


def test_no_body_makes_a_500() -> None:
    async def answer(path: str, body: dict[str, Any]) -> int:
        async with served() as server:
            return (await ask(server.app, path, body)).status

    with asyncio.Runner() as runner:

        @settings(max_examples=examples(100))
        @given(asked())
        def check(one: tuple[str, dict[str, Any]]) -> None:
            assert runner.run(answer(*one)) < 500

        check()
