"""Answers in Ollama's form, whole and line by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import scripted_node
from support.servers.asgi_client import Exchanged, ask, asking
from support.servers.http_app import served

from shardnet.api.chat.run import ChatEvent, Piece
from shardnet.api.chat_formats.marks import ToolCallStarted
from shardnet.api.events import TokenLogprob
from shardnet.api.ollama.body import OLLAMA, AnswerForm
from shardnet.api.ollama.generating import _lines
from shardnet.api.ollama.models import capabilities_of
from shardnet.api.ollama.pulling import OllamaPull, Pulls
from shardnet.api.server.app import make_app
from shardnet.api.server.endpoint import Endpoint, Stream
from shardnet.api.server.service import Exchange
from shardnet.api.server.settings import Settings
from shardnet.checkpoint.hub_cache import HubName
from shardnet.errors import HubError
from shardnet.wire.messages.chat import TokenizerDescribed

CHAT, GENERATE = "/api/chat", "/api/generate"


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny-llama", "messages": [{"role": "user", "content": text}], **fields}


def lines(answer: Exchanged) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.content.decode().splitlines()]


def test_an_answer_and_its_lines_say_the_same() -> None:
    async def main() -> None:
        async with served() as server:
            body = saying("hello", model="tiny-llama:latest")
            whole = (await ask(server.app, CHAT, {**body, "stream": False})).json
            assert server.node.asked[-1].choice.model == "org/Tiny-Llama"
            assert whole["model"] == "tiny-llama:latest"
            assert whole["message"] == {"role": "assistant", "content": "hello"}
            assert (whole["done"], whole["done_reason"]) == (True, "stop")
            assert (whole["prompt_eval_count"], whole["eval_count"]) == (2, 4)
            assert {"total_duration", "load_duration", "eval_duration"} <= whole.keys()
            assert whole["created_at"].endswith("Z")

            *more, last = lines(await ask(server.app, CHAT, body))
            assert "".join(one["message"]["content"] for one in more) == "hello"
            assert all(not one["done"] and "eval_count" not in one for one in more)
            assert (last["done"], last["message"]["content"]) == (True, "")
            assert (last["prompt_eval_count"], last["eval_count"]) == (2, 4)

            prompt = {"model": "tiny-llama", "prompt": "hello"}
            *more, last = lines(await ask(server.app, GENERATE, prompt))
            assert "".join(one["response"] for one in more) == "hello"
            assert last["done_reason"] == "stop"
            assert server.node.asked[-1].messages
            raw = await ask(server.app, GENERATE, {**prompt, "raw": True, "stream": False})
            assert (raw.json["response"], raw.json["eval_count"]) == ("hello", 4)
            assert server.node.asked[-1].prompt == "hello"

    asyncio.run(main())


def test_a_call_comes_whole_with_an_object_and_reasoning_apart() -> None:
    async def main() -> None:
        text = (
            '<think>hm</think>so<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
        )
        tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
        body = saying(text, tools=tools)
        async with served() as server:
            whole = (await ask(server.app, CHAT, {**body, "stream": False})).json
            assert whole["done_reason"] == "stop"
            message = whole["message"]
            assert (message["content"], message["thinking"]) == ("so", "hm")
            functions = [call["function"] for call in message["tool_calls"]]
            assert functions == [
                {"index": 0, "name": "f", "arguments": {"a": [1]}},
                {"index": 1, "name": "g", "arguments": {}},
            ]
            told = [one["message"] for one in lines(await ask(server.app, CHAT, body))]
            assert "".join(one.get("thinking", "") for one in told) == "hm"
            assert "".join(one["content"] for one in told) == "so"
            calls = [call for one in told for call in one.get("tool_calls", ())]
            assert [call["function"] for call in calls] == functions
            assert all(call["id"] for call in calls)

    asyncio.run(main())


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_that_is_cut_off_is_none(reason: str) -> None:
    async def main() -> None:
        text = 'so<tool_call>{"name": "f", "arguments": {"a": "' + 600 * "x"
        body = saying(text, tools=[{"type": "function", "function": {"name": "f"}}])
        async with served() as server:
            server.node.finish_reason = reason
            whole = (await ask(server.app, CHAT, {**body, "stream": False})).json
            for told in ([whole], lines(await ask(server.app, CHAT, body))):
                assert (told[-1]["done_reason"], told[-1]["done"]) == (reason, True)
                assert "".join(one["message"]["content"] for one in told) == "so"
                assert not any("tool_calls" in one["message"] for one in told)

    asyncio.run(main())


def test_logprobs_of_the_token_that_ends_a_call_are_told() -> None:
    async def main() -> list[dict[str, Any]]:
        async def events() -> AsyncGenerator[ChatEvent, None]:
            for name in ("f", "g"):
                called = ToolCallStarted(0, name, name)
                chosen = TokenLogprob(token_id=1, token=name, bytes=b"", logprob=-1.0, top=())
                yield Piece(sample=0, deltas=[called], logprobs=(chosen,))

        form = AnswerForm("m", 0.0, is_chat=True)
        return [json.loads(line) async for line in _lines(events(), form)]

    told = asyncio.run(main())
    assert [one["token"] for line in told for one in line.get("logprobs", ())] == ["f", "g"]
    assert [len(line["message"].get("tool_calls", ())) for line in told] == [0, 1, 0]


def test_what_a_request_waited_for_its_model_counts_as_loading() -> None:
    timing = SimpleNamespace(load_s=0.5, ttft_s=0.25, total_s=2.0)
    usage = SimpleNamespace(n_prompt=3, n_generated=7)
    end: Any = SimpleNamespace(
        finish_reason="stop", result=SimpleNamespace(timing=timing, usage=usage)
    )
    line = AnswerForm("m", 0.0, is_chat=True).last(end, now_s=4.0)
    assert (line.total_duration, line.load_duration) == (4 * 10**9, 25 * 10**8)
    assert (line.prompt_eval_duration, line.eval_duration) == (25 * 10**7, 125 * 10**7)


def test_nothing_to_say_only_loads() -> None:
    async def main() -> None:
        async with served() as server:
            for path, key in ((CHAT, "message"), (GENERATE, "response")):
                answer = (await ask(server.app, path, {"model": "tiny-llama"})).json
                assert (answer["done"], answer["done_reason"]) == (True, "load")
                assert key in answer
            assert not server.node.asked
            for wrong in ("soon", "1x", "5m5"):
                refused = await ask(server.app, CHAT, {"model": "tiny-llama", "keep_alive": wrong})
                assert (refused.status, refused.json["error"][:10]) == (400, "keep_alive")

    asyncio.run(main())


def test_errors_are_a_text_with_a_status() -> None:
    async def main() -> None:
        async with served() as server:
            for is_stream in (False, True):
                long = await ask(server.app, CHAT, saying("long", stream=is_stream))
                assert long.status == 400
                assert "exceeds the available context size (64 tokens)" in long.json["error"]
            missing = await ask(server.app, CHAT, saying("a", model="gpt:latest"))
            assert missing.status == 404
            assert "org/Tiny-Llama" in missing.json["error"]
            images = await ask(server.app, GENERATE, {"prompt": "a", "images": ["a"]})
            assert (images.status, images.json["error"][:6]) == (400, "images")

    asyncio.run(main())


def test_models_are_listed_and_described() -> None:
    async def main() -> None:
        async with served() as server:
            number = (await ask(server.app, "/api/version")).json["version"]
            assert tuple(map(int, number.split("."))) >= (0, 6, 4)  # what VS Code asks for
            models = (await ask(server.app, "/api/tags")).json["models"]
            names = ["shardnet/default", "org/Tiny-Llama", "org/Big-Llama"]
            assert [model["model"] for model in models] == names
            assert all(len(model["digest"]) == 64 for model in models)
            known = models[1]
            assert (known["size"], known["modified_at"]) == (8, "1970-01-02T00:00:00Z")
            details = known["details"]
            assert (details["family"], details["families"]) == ("llama", ["llama"])
            assert (details["parameter_size"], details["quantization_level"]) == ("8.0B", "Q4_K")

            shown = (await ask(server.app, "/api/show", {"model": "shardnet/default"})).json
            assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
            family = shown["model_info"]["general.architecture"]
            assert shown["model_info"][f"{family}.context_length"] == 64
            # Of a model that was never used no more is asked than what the nodes say of it.
            other = (await ask(server.app, "/api/show", {"name": "big-llama"})).json
            assert other["capabilities"] == ["completion"]
            assert (other["license"], other["modified_at"]) == ("mit", "1970-01-02T00:00:00Z")
            assert other["model_info"] == {
                "general.architecture": "llama",
                "general.basename": "org/Big-Llama",
                "general.license": "mit",
                "general.parameter_count": 8_030_261_248,
                "llama.context_length": 4096,
            }
            await ask(server.app, CHAT, saying("a", model="big-llama", stream=False))
            used = (await ask(server.app, "/api/show", {"model": "big-llama"})).json
            assert used["capabilities"] == ["completion", "tools", "thinking", "insert"]
            assert (await ask(server.app, "/api/show", {"model": "other"})).status == 404

            assert (await ask(server.app, "/api/ps")).json == {"models": []}
            paths = (await ask(server.app, "/openapi.json")).json["paths"]
            content = paths[CHAT]["post"]["responses"]["200"]["content"]
            assert {*content} == {"application/json", "application/x-ndjson"}

    asyncio.run(main())


def test_capabilities_are_those_of_the_chat_template() -> None:
    def can(template: str) -> tuple[str, ...]:
        described = TokenizerDescribed(
            request=0, bos_id=None, eos_ids=[], added=[], template=template
        )
        return capabilities_of(described)

    assert can("{{ messages }}") == ("completion",)
    assert can("{% if enable_thinking %}") == ("completion", "thinking")
    assert can("{{ tools }} <tool_call> <think>") == ("completion", "tools", "thinking")


def test_a_stream_that_waits_has_lines_without_text_and_ends_with_its_error() -> None:
    async def main() -> None:
        settings = Settings(headers_s=0.01, heartbeat_s=0.01)
        async with (
            served(settings) as server,
            asking(server.app, CHAT, saying("wait")) as waiting,
        ):
            await waiting.until_said(b'"content":"w"')
            told = waiting.content.count(b"\n")
            await waiting.until_lines(told + 1)
            assert b'"content":""' in waiting.content, "what every program can read"
            server.service.stop()
            await waiting.until_said(b'"error"')
            *more, last = lines(waiting)
            assert len(more) > told
            assert all(one["done"] is False for one in more)
            assert last == {"error": "this server is being stopped"}

    asyncio.run(main())


async def pulled(
    name: HubName, progress: Callable[[int, int], None], log: Callable[[str], None]
) -> None:
    if name.repo == "org/missing":
        raise HubError(f"{name} is not on the Hub")
    for done in (1, 2):
        progress(done, 2)
        await asyncio.sleep(0)


def test_a_model_is_pulled_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(
        method="POST",
        path="/pull",
        summary="",
        handle=Pulls(pulled).pull,
        dialect=OLLAMA,
        body=OllamaPull,
    )

    async def main() -> None:
        async with served() as server:
            app = make_app(server.service, [endpoint], OLLAMA)
            assert (await ask(server.app, "/v1/models/org/name")).status == 404
            monkeypatch.setattr(scripted_node, "MODELS", ("org/name",))
            told = lines(await ask(app, "/pull", {"model": "hf.co/org/name:latest"}))
            done = [(line.get("completed"), line.get("total")) for line in told[1:-1]]
            assert done == [(1, 2), (2, 2)]
            assert told[-1] == {"status": "success"}
            assert (await ask(server.app, "/v1/models/org/name")).status == 200
            whole = await ask(app, "/pull", {"name": "org/name", "stream": False})
            assert whole.json == {"status": "success"}
            failed = lines(await ask(app, "/pull", {"model": "org/missing"}))
            assert failed[-1] == {"error": "org/missing is not on the Hub"}
            wrong = await ask(app, "/pull", {"model": "llama3.2"})
            assert (wrong.status, "give ORG/NAME" in wrong.json["error"]) == (400, True)
            pushed = await ask(server.app, "/api/push", {"model": "a"})
            assert (pushed.status, pushed.json["error"][:9]) == (400, "/api/push")

    asyncio.run(main())


def test_a_pull_that_is_given_up_leaves_no_task() -> None:
    async def main() -> None:
        never = asyncio.Event()

        async def pulling(*_: object) -> None:
            await never.wait()

        async with served() as server:
            exchange = Exchange(service=server.service, request_id="1", path_parameters={})
            before = asyncio.all_tasks()
            reply = await Pulls(pulling).pull(exchange, OllamaPull(model="org/name"))
            assert isinstance(reply, Stream)
            assert b"manifest" in await anext(reply.chunks)
            waiting = asyncio.ensure_future(anext(reply.chunks))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before

    asyncio.run(main())


def test_names_are_copied_created_and_deleted() -> None:
    async def main() -> None:
        async with served() as server:

            async def names() -> list[str]:
                listed = (await ask(server.app, "/api/tags")).json["models"]
                return [model["name"] for model in listed]

            body = {"source": "big-llama", "destination": "gpt-4o:latest"}
            assert (await ask(server.app, "/api/copy", body)).status == 200
            told = lines(await ask(server.app, "/api/create", {"model": "o9", "from": "gpt-4o"}))
            assert told[-1] == {"status": "success"}
            assert (await names())[-2:] == ["gpt-4o", "o9"]
            for name in ("gpt-4o", "o9:latest"):
                await ask(server.app, CHAT, saying("a", model=name, stream=False))
                assert server.node.asked[-1].choice.model == "org/Big-Llama"
            gone = await ask(server.app, "/api/delete", {"model": "o9"}, method="DELETE")
            assert (gone.status, (await names())[-1]) == (200, "gpt-4o")
            for path, body, status, part in (
                ("/api/delete", {"model": "big-llama"}, 400, "`shardnet cache` deletes"),
                ("/api/delete", {"model": "o9"}, 404, "there is no model"),
                ("/api/copy", {"source": "o9", "destination": "b"}, 404, "there is no model"),
                ("/api/create", {"model": "b", "from": "gpt-4o", "system": "c"}, 400, "system"),
                ("/api/create", {"model": "b", "files": {"a": "b"}}, 400, "files"),
                ("/api/create", {"model": "b"}, 400, "from is missing"),
            ):
                method = "DELETE" if path == "/api/delete" else "POST"
                refused = await ask(server.app, path, body, method=method)
                assert (refused.status, part in refused.json["error"]) == (status, True), body

    asyncio.run(main())
