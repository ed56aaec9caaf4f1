"""Heads that end while HTTP streams run: the server of their deputy sends the rest of the texts."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.soak import cases
from support.system.nodes import Machine, check_log

from shardnet.api.client import connect
from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening, Settings
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 120.0
N_TOKENS = 24
SOME = 6
"""Events that every client has when its head ends."""
ASKED = [{"role": "user", "content": "Who is Emma?"}]
CHAT: dict[str, Any] = {"messages": ASKED, "stream": True, "max_tokens": N_TOKENS}
GREEDY: dict[str, Any] = {"num_predict": N_TOKENS, "temperature": 0}
SAMPLED: dict[str, Any] = {"num_predict": N_TOKENS, "temperature": 0.9, "seed": 3}


@dataclass(slots=True, kw_only=True)
class Stream:
    """A streamed answer: the bodies of its events with what `said` finds in each.

    Where there is no seed to give, a `sampled` one is another text each time.
    """

    path: str
    body: dict[str, Any]
    said: Callable[[Any], str]
    sampled: bool = False
    parts: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)

    @property
    def is_drawn_anew(self) -> bool:
        """Whether its text is another one each time."""
        return self.sampled and "seed" not in json.dumps(self.body)

    def take(self, line: str) -> None:
        """Take a line of the answer."""
        found = line.removeprefix("data: ")
        if self.errors:  # what follows one does not count either
            return
        if not found.startswith("{"):
            self.parts += [""] * (found == "[DONE]")
            return
        event = json.loads(found)
        if event.get("type") == "ping" or (event.get("done") is False and not self.said(event)):
            return  # it says that the server lives
        if "error" in event or event.get("type") in ("error", "response.failed"):
            self.errors.append(event)
            return
        self.parts.append(self.said(event))

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


def streams() -> list[Stream]:
    """Make a stream of every dialect, some greedy and some sampled; in the soak each is both."""
    return cases(
        [
            Stream(
                path="/v1/completions",
                body={"prompt": "It was", "stream": True, "max_tokens": N_TOKENS, "temperature": 0},
                said=lambda event: event["choices"][0]["text"],
            ),
            Stream(
                path="/v1/chat/completions",
                body={**CHAT, "temperature": 0.9, "seed": 3},
                said=lambda event: event["choices"][0]["delta"].get("content") or "",
                sampled=True,
            ),
            _messages(0.9),
            _responses(0),
            Stream(
                path="/api/generate",
                body={"prompt": "It was", "model": "default", "options": SAMPLED},
                said=lambda event: event["response"],
                sampled=True,
            ),
        ],
        [
            _messages(0),
            _responses(0.9),
            Stream(
                path="/api/chat",
                body={"messages": ASKED, "model": "default", "options": GREEDY},
                said=lambda event: event["message"]["content"],
            ),
        ],
    )


def _messages(temperature: float) -> Stream:
    return Stream(
        path="/v1/messages",
        body={**CHAT, "model": "default", "temperature": temperature},
        said=lambda event: event.get("delta", {}).get("text", ""),
        sampled=temperature > 0,
    )


def _responses(temperature: float) -> Stream:
    body = {"input": "Who is Emma?", "max_output_tokens": N_TOKENS, "temperature": temperature}
    return Stream(
        path="/v1/responses",
        body={**body, "stream": True},
        said=lambda event: event["delta"] if event["type"].endswith("text.delta") else "",
        sampled=temperature > 0,
    )


@asynccontextmanager
async def answer_of(
    url: str, stream: Stream, key: str, n_received: int | None
) -> AsyncIterator[asyncio.StreamReader]:
    """Ask over a connection of its own."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    raw = json.dumps(stream.body).encode()
    head = f"POST {stream.path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Request-Id: {key}\r\n"
    if n_received is not None:
        head += f"X-Shardnet-Resume: {n_received}\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    try:
        status = await reader.readline()
        assert b" 200 " in status, await reader.read()
        while (await reader.readline()).strip():
            pass
        yield reader
    finally:
        writer.transport.abort()


async def hear(
    url: str,
    stream: Stream,
    key: str,
    *,
    resume: bool = False,
    on_event: Callable[[], None] = lambda: None,
) -> None:
    """Hear an answer to its end, or until its server is gone."""
    async with answer_of(url, stream, key, len(stream.parts) if resume else None) as reader:
        try:
            while length := int(await reader.readline() or b"0", 16):
                chunk = await reader.readexactly(length + 2)
                for line in chunk.decode().splitlines():
                    stream.take(line)
                on_event()
        except (OSError, asyncio.IncompleteReadError):
            return


async def hear_all(urls: Sequence[str], end: Callable[[], None] | None = None) -> list[Stream]:
    """Hear all streams at the first server, and the rest of them at the others.

    `end` is called once each has SOME events, to end the first server.
    """
    heard, has_ended = streams(), end is None

    def check() -> None:
        nonlocal has_ended
        if not has_ended and min(len(one.parts) for one in heard) >= SOME:
            has_ended = True
            assert end is not None
            end()

    async def hear_one(number: int, stream: Stream) -> None:
        key, other = f"{urls[0]}-{number}", urls[1:][number % len(urls[1:])]
        await hear(urls[0], stream, key, on_event=check)
        if end is None:
            return
        stream.errors.clear()  # that its server is being stopped
        await hear(other, stream, key, resume=True)
        if stream.is_drawn_anew:
            whole = streams()[number]
            await hear(other, whole, key, resume=True)
            assert whole.parts == stream.parts, (stream.path, stream.errors, whole.errors)

    await asyncio.gather(*(hear_one(*one) for one in enumerate(heard)))
    return heard


def test_streams_of_all_dialects_go_on_at_other_servers(machine: Machine) -> None:
    """The head is killed; then the one that took over leaves by Ctrl-C.

    Clients ask the deputy's server for the rest, and one that does not know of it. At a server that
    is not the head's they need not: it goes on by itself.
    """
    arguments = ["--http", "127.0.0.1:0", "--deputy", "auto"]
    anna, bert, cleo = machine.start_nodes("anna", "bert", "cleo", arguments=arguments)
    addresses = [node.address for node in (anna, bert, cleo)]
    urls = [node.ready["http"] for node in (anna, bert, cleo)]
    beside = Listening(host="127.0.0.1", port=0, settings=Settings(has_deputy=True))

    async def main() -> None:
        async with connect(addresses[0]) as client:
            client.choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=addresses)
            await client.complete("so", max_tokens=2)
            undisturbed = await hear_all(urls)
            async with serving(client, beside) as url:
                going_on = streams()[0]
                hearing = asyncio.create_task(hear(url, going_on, "beside"))
                killed = await hear_all(urls, anna.process.kill)
                await hearing
        left = await hear_all(urls[1:], lambda: bert.signal(signal.SIGINT))
        assert going_on.text == undisturbed[0].text
        for heard in (killed, left):
            for one, before in zip(heard, undisturbed, strict=True):
                assert one.errors == [], one.path
                assert one.is_drawn_anew or one.parts == before.parts, one.path

    try:
        asyncio.run(main())
    finally:  # pytest shows it where the test fails
        for name, node in zip(("anna", "bert", "cleo"), (anna, bert, cleo), strict=True):
            print(f"--- {name}, {node.ready['http']}:\n{node.log}")
    result = bert.wait()
    assert result.code == 0
    check_log(result.stderr)
