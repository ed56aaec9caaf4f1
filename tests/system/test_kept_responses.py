"""What programs have one node's server keep is there at another's, also when the first is lost."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
from support.servers.ring_server import THINK_MARKS, THINK_TEMPLATE, make_tool_model
from support.soak import is_soak
from support.system.nodes import Machine

from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.plans import ModelChoice

ROOM = {"timeout": 60, "trust_env": False}
AWAY_S = 30.0 if is_soak() else 3.0
"""How long there is no client."""


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


def test_a_stream_is_taken_up_after_its_client_and_its_head_were_gone(machine: Machine) -> None:
    """The head makes a response in the background, and is killed; the deputy's server has it."""
    arguments = ["--http", "127.0.0.1:0", "--deputy", "auto"]
    anna, bert, cleo = machine.start_nodes("anna", "bert", "cleo", arguments=arguments)
    addresses = [node.address for node in (anna, bert, cleo)]

    async def build() -> None:
        async with connect(anna.address) as client:
            choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=addresses)
            await client.complete("so", max_tokens=2, model=choice)

    asyncio.run(build())
    clients = [
        openai.OpenAI(base_url=f"{node.ready['http']}/v1", api_key="-", max_retries=0)
        for node in (anna, bert, cleo)
    ]
    asked: dict[str, Any] = {
        "model": DEFAULT_MODEL_NAME,
        "input": "Write a long story about a lighthouse.",
        "max_output_tokens": 400,
        "temperature": 0,
    }

    def text_of(events: list[Any]) -> str:
        return "".join(one.delta for one in events if one.type == "response.output_text.delta")

    whole = clients[0].responses.create(**asked).output_text
    begun: list[Any] = []
    with clients[0].responses.create(**asked, background=True, stream=True) as stream:
        for event in stream:
            begun.append(event)
            if text_of(begun):
                break
    name, last = begun[0].response.id, begun[-1].sequence_number
    anna.kill()
    time.sleep(AWAY_S)
    for client in clients[1:]:
        with client.responses.retrieve(name, stream=True, starting_after=last) as stream:
            events = [*begun, *stream]
        assert [one.sequence_number for one in events] == [*range(len(events))]
        assert text_of(events) == whole
        assert client.responses.retrieve(name).output_text == whole
    for client in clients:
        client.close()


def test_budgets_of_reasoning_are_kept_for_each_package(machine: Machine, tmp_path: Path) -> None:
    """Over a ring of two, within one token. ollama's package sends none: the server's counts."""
    folder = make_tool_model(tmp_path / "thinking", THINK_TEMPLATE, THINK_MARKS)
    serves = ["--http", "127.0.0.1:0", "--reasoning-budget", "7"]
    anna, bert = machine.start_nodes("anna", "bert", arguments=serves)
    url, budget, words = anna.ready["http"], 11, [{"role": "user", "content": "Who is Emma?"}]
    common: dict[str, Any] = {"model": str(folder), "messages": words}

    async def count(client: Client, text: str) -> int:
        return len((await client.tokenize(text, bos="off")).token_ids)

    async def main() -> None:
        async with (
            connect(anna.address) as client,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as by_openai,
            anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as by_anthropic,
            ollama.AsyncClient(host=url) as by_ollama,
        ):
            nodes = [anna.address, bert.address]
            client.choice = ModelChoice(model=str(folder), nodes=nodes, context=256)
            await client.complete("so", max_tokens=2)
            told = await by_openai.chat.completions.create(
                **common,
                temperature=0,
                max_tokens=20,
                extra_body={"reasoning_budget_tokens": budget},
            )
            reasoning = getattr(told.choices[0].message, "reasoning_content", "")
            blocks = await by_anthropic.messages.create(
                **common,
                extra_body={"temperature": 0},
                max_tokens=20,
                thinking={"type": "enabled", "budget_tokens": budget},
            )
            thought = "".join(one.thinking for one in blocks.content if one.type == "thinking")
            other = await by_ollama.chat(
                **common, think=True, options={"temperature": 0, "num_predict": 20}
            )
            told_thoughts = {reasoning: budget, thought: budget, other.message.thinking or "": 7}
            for text, n_tokens in told_thoughts.items():
                assert abs(await count(client, text) - n_tokens) <= 1, text
            assert reasoning == thought
            assert told.choices[0].message.content

    asyncio.run(main())
