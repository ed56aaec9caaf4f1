"""Files and batches as OpenAI's client sends them, and what runs before a batch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.servers.http_app import Served, served

from shardnet.api.batches import batches, files
from shardnet.api.batches.files import LOWEST, FileForm
from shardnet.api.server.bodies import decode_form
from shardnet.api.server.errors import HttpError
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings
from shardnet.wire.messages.plans import ModelChoice

CHAT = "/v1/chat/completions"


def line(name: str, text: str, url: str = CHAT, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "stream": True, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


@asynccontextmanager
async def asked(keys: str = "") -> AsyncIterator[tuple[Any, Served]]:
    """Give OpenAI's client of an application without a socket."""
    import openai  # here: test_http_server says why

    keyring = Keyring([parse_key(keys, 1)]) if keys else Keyring()
    async with served(Settings(keys=keyring)) as server:
        transport = httpx.ASGITransport(server.app)
        async with (
            httpx.AsyncClient(transport=transport) as web,
            openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="one", http_client=web, max_retries=0
            ) as client,
        ):
            yield client, server


async def begun(client: Any, *lines: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    asked = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **asked)


async def ended(client: Any, batch: Any) -> Any:
    async with asyncio.timeout(20):
        while batch.status in ("in_progress", "cancelling"):
            await asyncio.sleep(0)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: Any, name: str) -> list[Any]:
    content = await client.files.content(name)
    return [json.loads(told) for told in content.text.splitlines()]


def test_a_batch_answers_its_lines_in_their_order_behind_others() -> None:
    async def main() -> None:
        async with asked("ann:one") as (client, server):
            server.service.client.choice = ModelChoice(model="/srv/Big")
            names = [f"n{number}" for number in range(20)]
            lines = [line(name, f"say {name}") for name in names]
            begins = await begun(client, *lines, line("x", "fail /srv/Big"), metadata={"a": "b"})
            assert (begins.status, begins.request_counts.total) == ("in_progress", 21)
            batch = await ended(client, begins)
            assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
            counts = batch.request_counts
            assert (counts.completed, counts.failed) == (20, 1)
            told = await lines_of(client, batch.output_file_id)
            assert [one["custom_id"] for one in told] == names
            answers = [one["response"]["body"]["choices"][0]["message"]["content"] for one in told]
            assert answers == [f"say {name}" for name in names]
            [wrong] = await lines_of(client, batch.error_file_id)
            assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("x", 400)
            assert "no room for fail Big" in wrong["response"]["body"]["error"]["message"]
            assert {message.priority for message in server.node.asked} == {LOWEST}
            assert server.node.n_most <= batches.AT_ONCE
            assert [one.id async for one in client.batches.list()] == [batch.id]
            files = {file.id async for file in client.files.list()}
            assert files == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
            assert (await client.files.delete(batch.input_file_id)).deleted
            assert (await client.files.retrieve(batch.output_file_id)).purpose == "batch_output"

    asyncio.run(main())


def test_what_is_cancelled_or_expired_begins_no_more_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "AT_ONCE", 1)

    async def main() -> None:
        async with asked() as (client, server):
            batch = await begun(client, line("a", "b"), line("c", "wait"), line("d", "e"))
            await server.node.until_asked(2)
            batch = await client.batches.cancel(batch.id)
            assert batch.status == "cancelling"
            assert (await client.batches.retrieve(batch.id)).status == "cancelling"
            monkeypatch.setattr(batches, "WINDOW_S", 0)
            other = await begun(client, line("f", "g"))
            server.node.until_released.set()
            batch, other = await ended(client, batch), await ended(client, other)
            assert (batch.status, other.status) == ("cancelled", "expired")
            assert len(await lines_of(client, batch.output_file_id)) == 1
            wrong = await lines_of(client, batch.error_file_id)
            assert [one["custom_id"] for one in wrong] == ["c", "d"]
            assert wrong[1]["error"]["code"] == "batch_cancelled"
            [late] = await lines_of(client, other.error_file_id)
            assert late["error"]["code"] == "batch_expired"

    asyncio.run(main())


def test_who_waits_for_tokens_keeps_no_place_and_may_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "AT_ONCE", 1)
    monkeypatch.setattr(files, "LOOK_S", 0.01)

    async def main() -> None:
        async with asked("eve:one:0:60") as (client, server):
            keys = server.service.settings.keys
            eve = keys.find("one")
            assert eve is not None
            keys.spend(eve, 10**6, time.monotonic())
            batch = await begun(client, line("a", "b"), line("c", "d"))
            await asyncio.sleep(0.1)
            assert not server.node.asked
            await client.batches.cancel(batch.id)
            batch = await ended(client, batch)
            assert (batch.status, batch.request_counts.failed) == ("cancelled", 2)
            assert not server.node.asked

    asyncio.run(main())


@pytest.mark.parametrize(
    ("lines", "parameter", "number"),
    [
        ([b"{"], None, 1),
        ([line("a", "b"), b"", line("a", "b")], "custom_id", 3),
        ([line("a", "b", "/v1/completions")], "url", 1),
        ([b'{"custom_id": "a", "url": "/v1/chat/completions"}'], "body", 1),
        ([b'{"custom_id": "a", "url": "/v1/chat/completions", "body": []}'], "body", 1),
        ([b""], None, 1),
    ],
)
def test_the_line_that_is_wrong_is_named(
    lines: list[bytes], parameter: str | None, number: int
) -> None:
    async def main() -> None:
        async with asked() as (client, _):
            batch = await begun(client, *lines)
            assert batch.status == "failed"
            [fault] = batch.errors.data
            assert (fault.param, fault.line) == (parameter, number)

    asyncio.run(main())


def test_what_cannot_be_is_refused() -> None:
    import openai  # here: test_http_server says why

    async def main() -> None:
        async with asked() as (client, _):
            with pytest.raises(openai.BadRequestError, match="give 'batch'"):
                await client.files.create(file=("a", b"b"), purpose="assistants")
            with pytest.raises(openai.BadRequestError, match="those that can are /v1/chat"):
                await begun(client, line("a", "b"), endpoint="/v1/moderations")
            with pytest.raises(openai.NotFoundError, match="there is no file file-1"):
                await client.batches.create(
                    input_file_id="file-1", endpoint=CHAT, completion_window="24h"
                )
            with pytest.raises(openai.NotFoundError, match="there is no batch batch_1"):
                await client.batches.cancel("batch_1")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"{}", "application/json"),
        (b"", "multipart/form-data; boundary=x"),
        (
            b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb",
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\n\r\n--x--", "multipart/form-data; boundary=x"),
        (b"--x\r\n" * 99 + b"--x--", "multipart/form-data; boundary=x"),
        (
            b"--x\r\nContent-Disposition: form-data; name=file; filename*=a\0b''c\r\n\r\n\r\n--x--",
            "multipart/form-data; boundary=x",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\n\xff\r\n--x--",
            "multipart/form-data; boundary=x",
        ),
    ],
)
def test_what_is_no_form_is_refused(raw: bytes, kind: str) -> None:
    with pytest.raises(HttpError) as caught:
        decode_form(raw, kind, FileForm)
    assert caught.value.fault.status == 400


@pytest.mark.parametrize(
    "name", ['filename="ünder 日.jsonl"', "filename*=UTF-8''%C3%BCnder%20%E6%97%A5.jsonl"]
)
def test_a_file_keeps_its_name(name: str) -> None:
    head = f"--x\r\nContent-Disposition: form-data; name=file; {name}\r\n\r\nb\r\n"
    purpose = "--x\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n--x--"
    form = decode_form((head + purpose).encode(), "multipart/form-data; boundary=x", FileForm)
    assert (form.file.filename, form.file.content) == ("ünder 日.jsonl", b"b")
