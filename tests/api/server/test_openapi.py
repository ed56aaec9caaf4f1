"""The OpenAPI document and the counters say what there is."""

from __future__ import annotations

import asyncio
import re

from support.servers.asgi_client import ask
from support.servers.http_app import served


def test_the_document_names_every_endpoint_and_only_schemas_that_it_has() -> None:
    async def main() -> None:
        async with served() as server:
            answer = await ask(server.app, "/openapi.json")
            document = answer.json
            assert {*document["paths"]} >= {
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/models/{name}",
                "/v1/messages",
                "/v1/messages/count_tokens",
                "/v1/responses",
                "/tokenize",
                "/metrics",
            }
            references = set(re.findall(r'"#/components/schemas/(\w+)"', answer.content.decode()))
            assert references == set(document["components"]["schemas"])
            schemas = document["components"]["schemas"]
            assert schemas["ChatBody"]["required"] == ["messages"]
            answers = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
            data = answers["text/event-stream"]["schema"]["properties"]["data"]
            assert data["contentSchema"] == {"$ref": "#/components/schemas/Completion"}
            assert schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0]["minimum"] == 0

    asyncio.run(main())


def test_counters_count() -> None:
    async def main() -> None:
        async with served() as server:
            await ask(server.app, "/v1/completions", {"prompt": "abc"})
            await ask(server.app, "/v1/completions", {"prompt": 5})
            text = (await ask(server.app, "/metrics")).content.decode()
            for line in (
                'shardnet_http_requests_total{endpoint="/v1/completions",key="",status="200"} 1.0',
                'shardnet_http_requests_total{endpoint="/v1/completions",key="",status="400"} 1.0',
                "shardnet_http_requests_active 1.0",
                "shardnet_prompt_tokens_total 2.0",
                "shardnet_prompt_tokens_cached_total 1.0",
                "shardnet_generated_tokens_total 2.0",
                "shardnet_time_to_first_token_seconds_count 1.0",
                "shardnet_time_between_tokens_seconds_count 1.0",
                "shardnet_node_up 1.0",
                "shardnet_ring_running 3.0",
            ):
                assert line in text

    asyncio.run(main())


def test_readiness_is_that_of_the_node() -> None:
    async def main() -> None:
        async with served() as server:
            ready = await ask(server.app, "/readyz")
            assert (ready.status, ready.json["node"]) == (200, "scripted")
            server.node.link.abort("gone")
            gone = await ask(server.app, "/readyz")
            assert (gone.status, gone.json["status"]) == (503, "unavailable")
            assert (await ask(server.app, "/healthz")).status == 200
            refused = await ask(server.app, "/v1/completions", {"prompt": "a"})
            assert (refused.status, refused.headers["retry-after"]) == (503, "2")
            assert "shardnet_node_up 0.0" in (await ask(server.app, "/metrics")).content.decode()

    asyncio.run(main())
