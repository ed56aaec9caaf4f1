"""What programs really send, over a ring of two nodes: Codex, Claude Code, the JavaScript client.

Their requests stand in tests/support/recorded, shortened where they are long: what fields there are
is as it was. Each answer is read as the program does.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers.ring_server import make_tool_model, served
from support.system.nodes import Crew

from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings

FOLDER = Path(__file__).parents[1] / "support"
PACKAGES = Path(__file__).parents[2] / "scripts" / "javascript" / "node_modules"
KEYS = Settings(keys=Keyring([parse_key("ann:one", 1)]))
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Uri"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tool_model(tmp_path_factory.mktemp("models") / "tools"))


def recorded(program: str) -> Iterator[dict[str, Any]]:
    requests = json.loads((FOLDER / "recorded" / f"{program}.json").read_text())
    for one in requests:
        headers = {n: v.replace("KEY", "one") for n, v in one["headers"].items()}
        body = one["body"] and {**one["body"], "model": "tools"}
        yield {**one, "headers": headers, "body": body}


async def answered(client: httpx.AsyncClient, asked: dict[str, Any]) -> httpx.Response:
    answer = await client.request(
        asked["method"], asked["path"], headers=asked["headers"], json=asked["body"]
    )
    assert answer.status_code == 200, (asked["what"], answer.text)
    return answer


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Read a stream whose events have names, as both programs do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line[0] != ":")
        if fields:
            found.append(json.loads(fields["data"]))
            assert fields["event"] == found[-1]["type"]
    return found


def test_requests_of_codex_and_claude_code_are_answered(trio: Crew, tool_model: str) -> None:
    async def main() -> None:
        async with (
            served(trio, tool_model, KEYS) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            models, probe, turn, later = recorded("codex")
            assert (await answered(client, models)).json()["models"] == []
            probed = (await answered(client, probe)).json()
            assert (probed["object"], probed["usage"]["output_tokens"]) == ("response", 1)
            for asked in (turn, later):
                asked["body"]["max_output_tokens"] = 8
                codex_reads(events_of(await answered(client, asked)))

            quota, count, title, turn, later = recorded("claude_code")
            assert (await answered(client, quota)).json()["stop_reason"] == "max_tokens"
            assert (await answered(client, count)).json()["input_tokens"] > 1
            text = claude_code_reads(events_of(await answered(client, title)))
            assert [*json.loads(text)] == ["title"]
            claude_code_reads(events_of(await answered(client, turn)))
            claude_code_reads(events_of(await answered(client, later)))

    asyncio.run(main())


def codex_reads(events: list[dict[str, Any]]) -> None:
    assert events[0]["response"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    told = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    texts = [part["text"] for item in items for part in item.get("content", ())]
    assert "".join(told) == "".join(texts)
    assert texts
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    usage = last["response"]["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def claude_code_reads(events: list[dict[str, Any]]) -> str:
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"]["stop_reason"]
    assert events[-2]["usage"]["output_tokens"]
    return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")


def test_a_call_comes_where_it_must_in_each_form(trio: Crew, tool_model: str) -> None:
    import anthropic  # here: test_http_server says why
    import openai

    async def main() -> None:
        async with (
            served(trio, tool_model, KEYS) as (url, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=url, api_key="one", max_retries=0) as other,
        ):
            function: Any = {"name": "weather", "parameters": CITY}
            common: Any = {"model": "tools", "temperature": 1}
            words: Any = [{"role": "user", "content": "It is a truth universally"}]
            chat = await client.chat.completions.create(
                **common,
                messages=words,
                max_tokens=120,
                seed=3,
                tools=[{"type": "function", "function": function}],
                tool_choice="required",
                parallel_tool_calls=False,
            )
            [choice] = chat.choices
            [call] = choice.message.tool_calls or ()
            assert choice.finish_reason == "tool_calls"
            assert call.type == "function"
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Bern", "Uri")

            tool: Any = {"type": "function", "strict": True, **function}
            async with client.responses.stream(
                **common,
                input="It is a truth",
                tools=[tool, {**tool, "name": "other"}],
                tool_choice={"type": "function", "name": "weather"},
                parallel_tool_calls=False,
            ) as stream:
                kinds = [event.type async for event in stream]
                response = await stream.get_final_response()
            [item] = response.output
            assert item.type == "function_call"
            assert json.loads(item.arguments)["city"] in ("Bern", "Uri")
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            assert response.usage is not None
            plain = await client.responses.create(**common, input="It is", max_output_tokens=4)
            assert plain.output_text
            assert plain.incomplete_details is not None
            assert plain.incomplete_details.reason == "max_output_tokens"
            later = await client.responses.create(
                **common, input="and", previous_response_id=plain.id, max_output_tokens=4
            )
            assert later.usage is not None
            assert plain.usage is not None
            assert later.usage.input_tokens > plain.usage.input_tokens + 4
            assert (await client.responses.retrieve(later.id)).output_text == later.output_text
            await client.responses.delete(later.id)
            with pytest.raises(openai.BadRequestError, match="whole conversation"):
                await client.responses.create(**common, input="a", previous_response_id=later.id)

            message = await other.messages.create(
                model="tools",
                messages=words,
                max_tokens=120,
                tools=[{"name": "weather", "input_schema": CITY}],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
            )
            [block] = message.content
            assert block.type == "tool_use"
            assert (message.stop_reason, block.name) == ("tool_use", "weather")
            assert isinstance(block.input, dict)
            assert block.input["city"] in ("Bern", "Uri")

    asyncio.run(main())


needs_packages = pytest.mark.skipif(
    shutil.which("node") is None or not (PACKAGES / "ollama").is_dir(),
    reason="needs node, and what scripts/javascript/install installs",
)


def told_by(crew: Crew, model: str, program: str, below: str = "") -> dict[str, Any]:
    """Run a program of JavaScript that asks a ring; return what it prints."""

    async def main() -> dict[str, Any]:
        async with served(crew, model, KEYS) as (url, _):
            process = await asyncio.create_subprocess_exec(
                *("node", str(FOLDER / "servers" / program), str(PACKAGES), url + below),
                *("one", "tools"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said, wrong = await process.communicate()
            assert process.returncode == 0, wrong.decode()
            told: dict[str, Any] = json.loads(said)
            return told

    return asyncio.run(main())


@needs_packages
def test_other_javascript_clients_do_the_same(trio: Crew, tool_model: str) -> None:
    told = told_by(trio, tool_model, "other_clients.mjs")
    assert told["text"]
    assert told["streamed"] == told["text"]
    assert told["object"]["city"] in ("Bern", "Uri")
    [call] = told["calls"]
    assert (call["toolName"], call["input"]["city"] in ("Bern", "Uri")) == ("weather", True)
    assert told["models"][0] == "tools"
    assert told["ollama"]
    assert told["ollamaStreamed"] == told["ollama"]
    assert told["error"] == {"name": "ResponseError", "status": 400}


@needs_packages
def test_the_javascript_client_chats_and_streams(trio: Crew, tool_model: str) -> None:
    told = told_by(trio, tool_model, "openai_client.mjs", "/v1")
    assert told["models"][0] == "tools"
    assert told["text"]
    assert told["streamed"] == told["text"] == told["response"]
    assert told["usage"]["completion_tokens"] == told["streamedUsage"]["completion_tokens"] == 6
    assert told["streamedUsage"]["prompt_tokens_details"]["cached_tokens"]
    assert told["call"]["name"] == "weather"
    assert json.loads(told["call"]["arguments"])["city"] in ("Bern", "Uri")
    [item] = told["responseOutput"]
    assert (item["type"], item["name"]) == ("function_call", "weather")
    assert told["responseEvents"][0] == "response.created"
    assert told["responseEvents"][-1] == "response.completed"
    assert told["error"] == {
        "status": 400,
        "type": "exceed_context_size_error",
        "isBadRequest": True,
    }
