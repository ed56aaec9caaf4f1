"""The OpenAPI document and the counters say what there is."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.servers.asgi_client import ask
from support.servers.http_app import served

DOCS = Path(__file__).parents[3] / "docs"


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
                'shardnet_prompt_tokens_total{key="",model="shardnet/default"} 2.0',
                'shardnet_prompt_tokens_cached_total{key="",model="shardnet/default"} 1.0',
                'shardnet_generated_tokens_total{key="",model="shardnet/default"} 2.0',
                "shardnet_time_to_first_token_seconds_count 1.0",
                "shardnet_time_between_tokens_seconds_count 1.0",
                "shardnet_node_up 1.0",
                "shardnet_ring_running 3.0",
                "shardnet_ring_prefix_tokens_total 40.0",
                'shardnet_ring_reused_positions_total{tier="memory"} 30.0',
                'shardnet_ring_reused_positions_total{tier="disk"} 10.0',
                'shardnet_stage_compute_seconds_total{node="bert",rank="1"} 2.0',
                'shardnet_link_round_trip_seconds{node="bert",peer="anna",purpose="data"} 0.00025',
                '_round_trip_seconds{node="anna",peer="bert",purpose="control"} 0.0004',
                'shardnet_link_failures_total{node="anna",peer="bert",purpose="data"} 2.0',
                'shardnet_link_resent_segments_total{node="bert",peer="anna",purpose="data"} 7.0',
                'shardnet_node_info{device="cpu",node="anna",version="0.2.0"} 1.0',
            ):
                assert line in text

    asyncio.run(main())


def test_the_dashboard_asks_for_what_there_is() -> None:
    """docs/grafana.json: every metric it names is counted, with every label that it uses."""

    async def main() -> dict[str, set[str]]:
        async with served() as server:
            await ask(server.app, "/v1/completions", {"prompt": "abc"})
            text = (await ask(server.app, "/metrics")).content.decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        labels: dict[str, set[str]] = {}
        for sample in samples:
            labels.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
        return labels

    labels = asyncio.run(main())
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 30
    for target in targets:
        names = re.findall(r"shardnet_\w+", target["expr"])
        assert names
        assert set(names) <= labels.keys()
        used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        for by in re.findall(r"by \(([^)]*)\)", target["expr"]):
            used += by.split(", ")
        assert set(used) <= set.union(*(labels[name] for name in names)), target


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
