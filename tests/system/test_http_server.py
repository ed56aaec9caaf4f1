"""The HTTP server over a real ring of two nodes: what programs ask, and how they leave.

The clients' libraries are imported where they are used: that takes seconds, which each of pytest's
workers would spend.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import signal
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.servers.ring_server import DEADLINE_S, served
from support.soak import cases
from support.system.nodes import Crew, Machine
from support.system.parrot import Parrots, make_scripted

from shardnet.api import Client, OutputParams, SamplingParams
from shardnet.api.client import connect
from shardnet.api.serve.server import serving
from shardnet.api.server.errors import RETRY_S
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Listening, Settings
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.diagnostics import RingLoad
from shardnet.wire.messages.plans import ModelChoice

CONTEXT = 16384
MOST_GROWTH_BYTES = 8 << 20
KEYS = Settings(keys=Keyring([parse_key("ann:one", 1)]))


async def load_of(client: Client) -> RingLoad:
    status = await client.status()
    assert status.load is not None
    return status.load


async def until_idle(client: Client) -> RingLoad:
    """Wait until nothing runs or waits on the ring; fails at the deadline of `served`."""
    while True:
        load = await load_of(client)
        if not (load.running or load.waiting):
            return load
        await asyncio.sleep(0.01)


async def until_busy(client: Client) -> None:
    """Wait until something runs on the ring."""
    while True:
        load = (await client.status()).load
        if load and load.running:
            return
        await asyncio.sleep(0.01)


@asynccontextmanager
async def asking(url: str, body: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for a completion over a connection of its own, which ends with the context."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    try:
        yield reader
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_the_dashboard_shows_the_ring_and_ends_a_request(trio: Crew) -> None:
    def ask(url: str, body: bytes | None = None) -> Any:
        with urllib.request.urlopen(url, body, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    async def main() -> None:
        body = {"prompt": "She had", "max_tokens": 900, "stream": True, "ignore_eos": True}
        async with served(trio, DEFAULT_MODEL_NAME) as (url, _), asking(url, body) as reader:
            for _ in range(20):
                await reader.readuntil(b'"text"')
            data = f"{url}/dashboard/api"
            state = await asyncio.to_thread(ask, f"{data}/state")
            nodes = {node["node"]: node for node in state["nodes"]}
            assert {node["state"] for node in nodes.values()} == {"up"}
            stages = state["ring"]["stages"]
            assert len(stages) == 2
            for stage in stages:
                assert nodes[stage["node"]]["layers"] == stage["layers"]
                assert stage["compute_ms"] > 0
            assert state["rates"]["tokens_per_s"] > 0
            steps = state["steps"]["steps"]
            assert sum(step["tokens"] for step in steps) >= 20
            assert [one["rank"] for one in steps[-1]["stages"]] == [0, 1]
            [request] = state["requests"]
            assert (request["phase"], request["max_tokens"]) == ("decode", 900)
            assert request["n_generated"] >= 20

            gone = stages[1]["node"]
            plan = await asyncio.to_thread(
                ask, f"{data}/plan", json.dumps({"leave_out": [gone]}).encode()
            )
            assert gone not in {stage["node"] for stage in plan["stages"]}

            ended = f"{data}/requests/{request['id']}/cancel"
            assert await asyncio.to_thread(ask, ended, b"") == {"cancelled": request["id"]}
            assert b'"code":"cancelled"' in await reader.read()

    asyncio.run(main())


def test_the_openai_client_chats_and_streams(trio: Crew) -> None:
    import openai

    async def main() -> None:
        async with (
            served(trio, DEFAULT_MODEL_NAME, KEYS) as (url, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client,
        ):
            asked: Any = {
                "model": (await client.models.list()).data[0].id,
                "messages": [{"role": "user", "content": "It is a truth universally " * 60}],
                "max_tokens": 6,
                "temperature": 0,
            }
            answer = await client.chat.completions.create(
                **asked, logprobs=True, top_logprobs=2, n=2
            )
            text = answer.choices[0].message.content
            assert text
            assert answer.choices[1].message.content == text
            assert answer.choices[0].finish_reason == "length"
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content
            assert content is not None
            assert "".join(token.token for token in content) == text
            for token in content:  # greedy: the chosen one is the likeliest
                assert token.top_logprobs[0].logprob == token.logprob

            stream = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            told = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert "".join(told) == text
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 6
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens

            properties = {"name": {"type": "string", "maxLength": 5}}
            schema = {
                "type": "object",
                "properties": properties,
                "required": ["name"],
                "additionalProperties": False,
            }
            shaped = await client.chat.completions.create(
                **{**asked, "max_tokens": 40},
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema},
                },
            )
            assert [*json.loads(shaped.choices[0].message.content or "")] == ["name"]

            long: Any = {**asked, "messages": [{"role": "user", "content": "a b " * 4000}]}
            for is_stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(**long, stream=is_stream)
                error: Any = caught.value.body
                assert error["type"] == "exceed_context_size_error"
                assert error["n_prompt_tokens"] > error["n_ctx"] == 1024
            with pytest.raises(openai.NotFoundError, match=DEFAULT_MODEL_NAME):
                await client.chat.completions.create(**{**asked, "model": "gpt-4"})
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="two").models.list()

    asyncio.run(main())


def test_the_anthropic_client_counts_answers_and_streams(trio: Crew) -> None:
    import anthropic

    async def main() -> None:
        async with (
            served(trio, DEFAULT_MODEL_NAME, KEYS) as (url, _),
            anthropic.AsyncAnthropic(base_url=url, api_key="one", max_retries=0) as client,
        ):
            conversation: Any = {
                "model": DEFAULT_MODEL_NAME,
                "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}],
                "messages": [{"role": "user", "content": "It is a truth universally " * 60}],
            }
            asked: Any = {**conversation, "max_tokens": 6, "extra_body": {"temperature": 0}}
            counted = await client.messages.count_tokens(**conversation)
            answer = await client.messages.create(**asked)
            [block] = answer.content
            assert block.type == "text"
            assert block.text
            assert (answer.stop_reason, bool(answer._request_id)) == ("max_tokens", True)
            system = [{"type": "text", "text": "x-anthropic-billing-header: 2"}]
            async with client.messages.stream(**{**asked, "system": system}) as stream:
                assert "".join([text async for text in stream.text_stream]) == block.text
                final = await stream.get_final_message()
            assert (final.stop_reason, final.content[0].type) == ("max_tokens", "text")
            usage = final.usage
            assert usage.output_tokens == 6
            assert usage.cache_read_input_tokens  # whatever the billing header says
            assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens

            long: Any = {"messages": [{"role": "user", "content": "a b " * 4000}]}
            with pytest.raises(anthropic.BadRequestError, match=r"too long: \d+ tokens > 1024"):
                await client.messages.create(**{**asked, **long}, stream=True)
            long["messages"][0]["content"] *= 4  # more than the model takes in its longest tokens
            longer = await client.messages.count_tokens(**{**conversation, **long})
            assert longer.input_tokens > 16_000
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="two").messages.create(**asked)

    asyncio.run(main())


def test_the_ollama_client_chats_and_streams(trio: Crew) -> None:
    import ollama

    async def main() -> None:
        bearer = {"Authorization": "Bearer one"}
        async with (
            served(trio, DEFAULT_MODEL_NAME, KEYS) as (url, _),
            AsyncExitStack() as stack,
        ):
            client = ollama.AsyncClient(host=url, headers=bearer)
            stack.push_async_callback(client.close)
            [name, *_] = [model.model or "" for model in (await client.list()).models]
            shown = await client.show(f"{name}:latest")
            assert "completion" in (shown.capabilities or ())
            info = shown.modelinfo or {}
            assert info[f"{info['general.architecture']}.context_length"] == 1024
            assert name in [model.model for model in (await client.ps()).models]

            asked: Any = {
                "model": name,
                "messages": [{"role": "user", "content": "It is a truth universally " * 20}],
                "options": {"num_predict": 6, "temperature": 0},
            }
            answer = await client.chat(**asked)
            text = answer.message.content
            assert text
            assert (answer.done_reason, answer.eval_count) == ("length", 6)
            assert answer.total_duration
            parts = [part async for part in await client.chat(**asked, stream=True)]
            assert "".join(part.message.content or "" for part in parts) == text
            assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]

            schema = {"type": "object", "additionalProperties": False}
            shaped = await client.generate(name, "an object", format=schema, options={"seed": 1})
            assert json.loads(shaped.response) == {}
            raw = await client.generate(name, "It is", raw=True, options=asked["options"])
            assert raw.prompt_eval_count
            assert raw.prompt_eval_count < (shaped.prompt_eval_count or 0)
            assert (await client.generate(name)).done_reason == "load"
            long = {**asked, "messages": [{"role": "user", "content": "a b " * 4000}]}
            with pytest.raises(ollama.ResponseError, match="available context size") as caught:
                await client.chat(**long)
            assert caught.value.status_code == 400

    asyncio.run(main())


def test_prompts_are_scored_as_the_python_api_does(trio: Crew) -> None:
    """As evaluation programs ask: lists of ids, echo, logprobs."""
    import openai

    prompts = [[5, 6, 7, 8], [290, 3, 3]]

    async def main() -> None:
        async with (
            served(trio, DEFAULT_MODEL_NAME) as (url, direct),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        ):
            asked: Any = {"model": "", "prompt": prompts, "temperature": 0, "seed": 1}
            answer = await client.completions.create(**asked, echo=True, max_tokens=1, logprobs=2)
            expected = await direct.complete(
                prompts,
                SamplingParams(n_logprobs=2),
                max_tokens=1,
                outputs=OutputParams(n_prompt_logprobs=2),
            )
            for choice, result in zip(answer.choices, expected, strict=True):
                assert result.prompt_logprobs is not None
                assert result.logprobs is not None
                scored: Any = choice.logprobs
                every = [*result.prompt_logprobs, *result.logprobs]
                assert scored.token_logprobs == [one and one.logprob for one in every]
                assert scored.top_logprobs[0] is None
                for token, own, top in zip(
                    scored.tokens[1:],
                    scored.token_logprobs[1:],
                    scored.top_logprobs[1:],
                    strict=True,
                ):
                    assert top[token] == own
                assert choice.text == "".join(scored.tokens)
            stream = await client.completions.create(
                **asked, echo=True, max_tokens=1, logprobs=2, stream=True
            )
            texts, logprobs = ["", ""], [[], []]  # type: ignore[var-annotated]
            async for chunk in stream:
                [one] = chunk.choices
                texts[one.index] += one.text
                if one.logprobs is not None:
                    logprobs[one.index] += one.logprobs.token_logprobs or []
            assert texts == [choice.text for choice in answer.choices]
            assert logprobs == [choice.logprobs.token_logprobs for choice in answer.choices]  # type: ignore[union-attr]
            long = await asyncio.to_thread(fetch, f"{url}/tokenize", {"prompt": "a b " * 4000})
            assert long["count"] == len(long["tokens"]) > long["max_model_len"] == 1024

    asyncio.run(main())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_slot(
    trio: Crew, parrots: Parrots, is_stream: bool
) -> None:
    async def main() -> None:
        log: list[str] = []
        settings = Settings(log=log.append)
        async with served(trio, str(parrots.alphabet), settings, CONTEXT) as (url, client):
            body = {"prompt": "a" * (CONTEXT - 100), "stream": is_stream}
            async with asking(url, body) as answer:
                if is_stream:  # long before the first token
                    assert b" 200 " in await answer.readline()
                await until_busy(client)
            load = await until_idle(client)
            assert load.used_blocks == load.warm_blocks
        assert "499" in log[-1]
        assert re.search(r" \d+\+0 tokens", log[-1])

    asyncio.run(main())


@pytest.mark.parametrize("n_requests", cases([96], [1000]))
def test_of_many_at_once_none_is_lost_and_none_stays(
    trio: Crew, parrots: Parrots, n_requests: int
) -> None:
    """64 clients, who give half of their requests up; in the long form memory does not grow."""
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"

    async def ask_one(url: str, number: int) -> str:
        start, is_stream = number % 26, chance.random() < 0.5
        body = {"prompt": letters[start], "max_tokens": 8, "temperature": 0, "stream": is_stream}
        async with asking(url, body) as answer:
            if chance.random() < 0.5:
                for _ in range(chance.randrange(0, 20)):
                    await answer.readline()
                return "left"
            raw = (await answer.read()).decode().partition("\r\n\r\n")[2]
            lines = [line for line in raw.replace("data: ", "").splitlines() if line[:1] == "{"]
            text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
            assert text == (letters * 2)[start + 1 : start + 9]
            assert ("data: [DONE]" in raw) is is_stream
            return "stayed"

    async def visit(url: str, numbers: Iterator[int]) -> list[str]:
        return [await ask_one(url, number) for number in numbers]

    async def crowd(url: str, client: Client, n: int) -> None:
        numbers = iter(range(n))
        visits = await asyncio.gather(*(visit(url, numbers) for _ in range(64)))
        ends = Counter(end for ended in visits for end in ended)
        assert ends.total() == n
        assert ends["left"] > n / 4
        load = await until_idle(client)
        assert load.used_blocks == load.warm_blocks

    async def bytes_without_model(client: Client) -> int:
        """The memory of the three processes."""
        await client.unload()
        gc.collect()
        here = psutil.Process().memory_full_info().uss
        return here + sum(trio.nodes[number].private_bytes for number in (0, 2))

    async def main() -> None:
        log: list[str] = []
        settings = Settings(log=log.append)
        async with served(trio, str(parrots.alphabet), settings) as (url, client):
            if n_requests >= 1000:
                await crowd(url, client, n_requests // 2)
                before = await bytes_without_model(client)
                await crowd(url, client, n_requests // 2)
                assert await bytes_without_model(client) - before < MOST_GROWTH_BYTES
            else:
                await crowd(url, client, n_requests)
        ends = Counter(line.split()[2] for line in log)
        assert ends.keys() <= {"200", "499"}
        assert ends["200"] >= n_requests / 4

    asyncio.run(main())


def fetch(url: str, body: Any = None) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, raw, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def test_a_node_and_a_command_serve_over_sockets(machine: Machine, parrots: Parrots) -> None:
    [node] = machine.start_nodes("hugo", arguments=["--http", "127.0.0.1:0"])
    asked = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    ring = ("--nodes", node.address, "--model", str(parrots.alphabet))
    command = machine.begin("serve", *ring, "--port", "0", "--json")
    ready = json.loads(command.stdout.wait_for("\n"))
    assert ready["event"] == "ready"
    assert fetch(f"{ready['url']}/v1/completions", asked)["choices"][0]["text"] == "bcd"
    # The node serves the model that its ring has, to requests that name none.
    listed = fetch(f"{node.ready['http']}/v1/models")["data"]
    assert listed[0]["id"] == "alphabet"
    assert all(model["created"] > 1e9 for model in listed[:2])
    assert fetch(f"{node.ready['http']}/v1/completions", asked)["model"] == "alphabet"
    assert fetch(f"{node.ready['http']}/readyz")["model"] == "alphabet"
    # Another model is loaded when it is asked for, also while requests come for the first one.
    other = {**asked, "model": DEFAULT_MODEL_NAME}
    with ThreadPoolExecutor(4) as pool:
        bodies = [asked, other, {**asked, "model": "alphabet"}, other]
        urls = [ready["url"], ready["url"], ready["url"], node.ready["http"]]
        told = [*pool.map(fetch, [f"{url}/v1/completions" for url in urls], bodies)]
    texts = [answer["choices"][0]["text"] for answer in told]
    assert texts == ["bcd", texts[1], "bcd", texts[1]]
    assert texts[1] != "bcd"
    loaded = [model["model"] for model in fetch(f"{node.ready['http']}/api/ps")["models"]]
    for model in loaded:
        freed = fetch(f"{node.ready['http']}/api/generate", {"model": model, "keep_alive": 0})
        assert freed["done_reason"] == "unload"
    assert fetch(f"{node.ready['http']}/readyz")["model"] is None
    command.signal(signal.SIGINT)
    result = command.wait()
    assert (result.code, result.stdout.count("\n")) == (0, 1)
    assert "Traceback" not in result.stderr
    open_to_all = machine.call("serve", "--host", "0.0.0.0", "--port", "0")
    assert "give --api-key KEY, or listen on 127.0.0.1" in open_to_all.error


ANSWERED = """{% for message in messages %}{{ message.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<|answer|>{% endif %}"""
SAID = [{"role": "user", "content": "a"}]
PLAIN = ("/v1/completions", {"prompt": "a<|answer|>"})
CHAT = ("/v1/chat/completions", {"messages": SAID})
CHATS = (
    CHAT,
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 9}),
    ("/api/chat", {"messages": SAID, "stream": False}),
)
FORMED = (CHAT[0], {"messages": SAID, "response_format": {"type": "json_object"}})


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Have a process open no more files, sockets and pipes, however many it has."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of others are set on Linux only")
def test_a_node_without_descriptors_says_so_and_has_the_model_still(
    machine: Machine, tmp_path: Path
) -> None:
    """What needs a process that does not run yet is asked for again later; all else is answered."""
    folder = make_scripted(tmp_path / "m", ANSWERED, {"<|answer|>": "yes\n"})
    [node] = machine.start_nodes("anna")

    def ask(url: str, asked: tuple[str, dict[str, Any]]) -> tuple[int, str | None, str]:
        path, body = asked
        raw = json.dumps(body | {"model": "m"}).encode()
        head = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(url + path, raw, head)
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, None, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Retry-After"], error.read().decode()

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(node.address) as client:
            client.choice = ModelChoice(model=str(folder))
            async with serving(client, Listening(host="127.0.0.1", port=0)) as url:
                assert (await asyncio.to_thread(ask, url, PLAIN))[0] == 200
                with without_descriptors(node.pid):
                    for asked in (*CHATS, FORMED):
                        status, retry, said = await asyncio.to_thread(ask, url, asked)
                        assert (status, retry) == (503, str(RETRY_S)), said
                        assert "Too many open files" in said
                        assert "fetch" not in said
                    assert (await asyncio.to_thread(ask, url, PLAIN))[0] == 200
                assert "yes" in (await asyncio.to_thread(ask, url, CHAT))[2]
                with without_descriptors(node.pid):
                    for asked in (*CHATS, PLAIN):
                        status, _, said = await asyncio.to_thread(ask, url, asked)
                        assert status == 200, said
                        assert "yes" in said

    asyncio.run(main())
