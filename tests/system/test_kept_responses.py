"""What programs have one node's server keep is there at another's, also when the first is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from support.system.nodes import Machine

ROOM = {"timeout": 60, "trust_env": False}


def test_a_response_and_a_batch_outlive_the_server_that_had_them(machine: Machine) -> None:
    serves = ["--http", "127.0.0.1:0"]
    [anna] = machine.start_nodes("anna", arguments=serves)
    [bert] = machine.start_nodes("bert", arguments=[*serves, "--peer", anna.address])
    machine.nodes_with("anna", "bert")
    urls = [node.ready["http"] for node in (anna, bert)]
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "So", "max_tokens": 2}}
    words = {"endpoint": "/v1/completions", "completion_window": "24h"}

    async def main() -> None:
        async with (
            httpx.AsyncClient(base_url=urls[0], **ROOM) as first,
            httpx.AsyncClient(base_url=urls[1], **ROOM) as second,
        ):

            async def told(client: httpx.AsyncClient, path: str, **how: Any) -> Any:
                method = "POST" if how else "GET"
                answer = await client.request(method, path, **how)
                assert answer.status_code == 200, answer.text
                return answer.json()

            body = {"input": "She had", "max_output_tokens": 3, "temperature": 0}
            kept = await told(first, "/v1/responses", json=body)
            assert await told(second, f"/v1/responses/{kept['id']}") == kept
            upload = {
                "files": {"file": ("a.jsonl", json.dumps(line))},
                "data": {"purpose": "batch"},
            }
            file = await told(first, "/v1/files", **upload)
            batch = await told(second, "/v1/batches", json={"input_file_id": file["id"], **words})
            async with asyncio.timeout(60):
                while batch["status"] != "completed":
                    await asyncio.sleep(0.1)
                    batch = await told(first, f"/v1/batches/{batch['id']}")
            anna.kill()
            after = {**body, "input": "and", "previous_response_id": kept["id"]}
            later = await told(second, "/v1/responses", json=after)
            assert later["usage"]["input_tokens"] > kept["usage"]["total_tokens"]
            assert [one["id"] for one in (await told(second, "/v1/batches"))["data"]] == [
                batch["id"]
            ]
            content = await second.get(f"/v1/files/{batch['output_file_id']}/content")
            assert content.json()["custom_id"] == "a"

    asyncio.run(main())
