"""Responses in the background: polled, cancelled, deleted, and their streams taken up again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp
from support.cluster.small_node import small_settings
from support.servers.asgi_client import ask, asking

from shardnet.api import generation
from shardnet.api.client import open_client
from shardnet.api.responses import responses
from shardnet.api.serve.server import application
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.cluster.node.node import Node, running

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {
    "input": "Who is Emma?",
    "max_output_tokens": 12,
    "temperature": 0.9,
    "background": True,
}
LONG = {**ASKED, "max_output_tokens": 2000, "ignore_eos": True}


async def server(node: Node, stack: AsyncExitStack, **how: Any) -> tuple[ASGIApp, Service]:
    """A server of a node. Each has links of its own."""
    client = await stack.enter_async_context(open_client(await node.client()))
    models = ModelNames(client, may_switch=True)
    settings = Settings(headers_s=60.0, heartbeat_s=60.0, **how)
    service = Service(client=client, settings=settings, models=models)
    stack.push_async_callback(service.close)
    return application(service), service


async def until_over(app: ASGIApp, name: str, **how: Any) -> Any:
    while True:
        told = await ask(app, f"{RESPONSES}/{name}", **how)
        assert told.status == 200, told.content
        if told.json["status"] not in ("queued", "in_progress"):
            return told.json
        await asyncio.sleep(0.01)


def test_a_stream_is_taken_up_where_its_client_left_it(tmp_path: Path) -> None:
    """At the server that makes it, while it runs and afterwards, and at one that never did."""

    async def main() -> None:
        async with running(small_settings(tmp_path)) as node, AsyncExitStack() as stack:
            (first, _), (other, _) = [await server(node, stack) for _ in range(2)]
            async with asking(first, RESPONSES, {**ASKED, "stream": True}) as left:
                await left.until_said(b"response.output_text.delta")
            begun = left.events
            made = begun[0]["response"]
            assert [one["type"] for one in begun[:3]] == [
                f"response.{kind}" for kind in ("created", "queued", "in_progress")
            ]
            assert made["status"] == "queued"
            assert made["background"] is True
            place = f"{RESPONSES}/{made['id']}?stream=true"
            rest = await ask(first, f"{place}&starting_after={len(begun) - 1}")
            events = begun + rest.events
            assert [one["sequence_number"] for one in events] == [*range(len(events))]
            last = events[-1]["response"]
            assert events[-1]["type"] == "response.incomplete"
            for app in (first, other):
                assert (await ask(app, place)).events == events
                assert (await ask(app, f"{place}&starting_after=5")).events == events[6:]
                assert await until_over(app, made["id"]) == last
            text = last["output"][0]["content"][0]["text"]
            assert text == "".join(one["delta"] for one in events if "delta" in one)
            after = {"input": "Go on", "previous_response_id": made["id"], "max_output_tokens": 1}
            went_on = await ask(other, RESPONSES, after)
            assert went_on.json["usage"]["input_tokens"] > last["usage"]["total_tokens"]

    asyncio.run(main())


def test_one_is_polled_cancelled_and_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_settings(tmp_path)) as node, AsyncExitStack() as stack:
            app, _ = await server(node, stack)
            begun = await ask(app, RESPONSES, ASKED)
            assert begun.json["status"] == "queued"
            over = await until_over(app, begun.json["id"])
            assert over["status"] == "incomplete"
            assert over["usage"]["output_tokens"] == 12
            again = await ask(app, f"{RESPONSES}/{over['id']}/cancel", method="POST")
            assert again.json == over

            long = (await ask(app, RESPONSES, LONG)).json["id"]
            place = f"{RESPONSES}/{long}"
            async with asking(app, f"{place}?stream=true") as stream:
                await stream.until_said(b"output_text.delta")
                cancelled = await ask(app, f"{place}/cancel", method="POST")
            assert cancelled.json["status"] == "cancelled"
            assert cancelled.json["output"][0]["content"][0]["text"]
            assert (await until_over(app, long)) == cancelled.json
            third = (await ask(app, RESPONSES, LONG)).json["id"]
            gone = await ask(app, f"{RESPONSES}/{third}", method="DELETE")
            assert gone.json["deleted"] is True
            assert (await ask(app, f"{RESPONSES}/{third}")).status == 404

            for body, why in (
                ({**ASKED, "store": False}, "store"),
                ({**ASKED, "conversation": "a"}, "conversation"),
            ):
                refused = await ask(app, RESPONSES, body)
                assert refused.status == 400
                assert why in refused.json["error"]["message"]
            plain = (await ask(app, RESPONSES, {**ASKED, "background": False})).json["id"]
            for path in (f"{plain}/cancel", f"{plain}?stream=true"):
                how = "POST" if "cancel" in path else "GET"
                refused = await ask(app, f"{RESPONSES}/{path}", method=how)
                assert refused.status == 400
                assert "background: true" in refused.json["error"]["message"]
            wrong = await ask(app, f"{RESPONSES}/{long}?stream=true&starting_after=x")
            assert wrong.status == 400

            long_prompt = await ask(app, RESPONSES, {**ASKED, "input": "word " * 20000})
            failed = await until_over(app, long_prompt.json["id"])
            assert failed["status"] == "failed"
            assert failed["error"]["code"] == "context_length_exceeded"

    asyncio.run(main())


def test_another_server_goes_on_when_the_one_that_made_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same events: from what the ring has, and anew where that is nothing."""
    monkeypatch.setattr(responses, "BEAT_S", 0.05)
    monkeypatch.setattr(responses, "GONE_S", 0.5)
    monkeypatch.setattr(generation, "RESUME_S", 0.05)

    async def main() -> None:
        async with running(small_settings(tmp_path)) as node, AsyncExitStack() as stack:
            first, service = await server(node, stack)
            second, _ = await server(node, stack)
            async with asking(first, RESPONSES, {**LONG, "stream": True}) as left:
                await left.until_said(b"output_text.delta")
                await service.close()
            begun = left.events
            name = begun[0]["response"]["id"]
            polled = (await ask(second, f"{RESPONSES}/{name}")).json
            assert polled["status"] == "queued"
            place = f"{RESPONSES}/{name}?stream=true&starting_after={len(begun) - 2}"
            async with asking(second, place) as taken_up:
                await taken_up.until_said(b"output_text.delta")
                cancelled = await ask(second, f"{RESPONSES}/{name}/cancel", method="POST")
            assert taken_up.events[0] == begun[-1]
            assert cancelled.json["status"] == "cancelled"

    asyncio.run(main())


def test_a_key_has_no_more_at_once_than_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_settings(tmp_path)) as node, AsyncExitStack() as stack:
            keys = Keyring([parse_key("ann:s3cret:1", 1)])
            app, _ = await server(node, stack, keys=keys)
            head = {"authorization": "Bearer s3cret"}
            long = (await ask(app, RESPONSES, LONG, headers=head)).json["id"]
            async with asking(app, f"{RESPONSES}/{long}?stream=true", headers=head) as stream:
                await stream.until_said(b"response.in_progress")
            refused = await ask(app, RESPONSES, ASKED, headers=head)
            assert refused.status == 429
            await ask(app, f"{RESPONSES}/{long}/cancel", method="POST", headers=head)
            short = (await ask(app, RESPONSES, ASKED, headers=head)).json["id"]
            assert (await until_over(app, short, headers=head))["status"] == "incomplete"

    asyncio.run(main())
