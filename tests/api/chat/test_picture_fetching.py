"""Pictures of the web: fetched from public addresses only, within bounds, redirects too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.servers.asgi_client import Exchanged, ask
from support.servers.http_app import served

from shardnet.api.chat import request
from shardnet.api.chat.request import fetch_picture
from shardnet.api.server import service
from shardnet.api.server.settings import Settings
from shardnet.errors import UsageError


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:8000/a.png", "127.0.0.1, which is no public address"),
        ("http://[::1]/a.png", "::1, which is no public address"),
        ("http://[::ffff:10.0.0.1]/a.png", "which is no public address"),
        ("http://169.254.169.254/latest", "which is no public address"),
        ("https://user:secret@192.168.1.1/", "which is no public address"),
        ("http://localhost:99999/", "its port is none"),
        ("ftp://example.org/a.png", "no URL of the web"),
        ("http://[::1/a.png", "Invalid IPv6 URL"),
        (f"http://{'a' * 64}.org/a.png", "label (empty or )?too long"),
        ("http://a..b/a.png", "label empty"),
        ("http://1.1.1.1/\0", "non-printable"),
    ],
)
def test_what_is_not_public_is_not_asked(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        asyncio.run(fetch_picture(url))


@pytest.mark.parametrize(
    ("head", "body", "why"),
    [
        ("200 OK", b"picture", ""),
        ("404 Not Found", b"", "answers 404"),
        ("200 OK", b"x" * 100, "more than 50 bytes"),
        ("302 Found\r\nLocation: http://10.1.2.3/", b"", "10.1.2.3, which is no public address"),
        ("302 Found\r\nLocation: /again", b"", "redirects more than 4 times"),
    ],
)
def test_answers_are_bounded_and_redirects_are_checked(
    monkeypatch: pytest.MonkeyPatch, head: str, body: bytes, why: str
) -> None:
    monkeypatch.setattr(request, "MAX_PICTURES_BYTES", 50)
    public = request._public

    async def at_hand(url: str, host: str, port: int) -> str:
        return "127.0.0.1" if host == "xn--fiq228c.test" else await public(url, host, port)

    monkeypatch.setattr(request, "_public", at_hand)

    hosts: list[bytes] = []
    answering: list[asyncio.Task[Any]] = []

    async def answer(reader: Any, writer: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.append(task)
        asked = await reader.readuntil(b"\r\n\r\n")
        hosts.append(asked.lower().partition(b"host: ")[2].partition(b":")[0])
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def main() -> bytes:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                return await fetch_picture(f"http://中文.test:{port}/a.png")
            finally:
                await asyncio.gather(*answering, return_exceptions=True)

    if not why:
        assert asyncio.run(main()) == body
        assert hosts == [b"xn--fiq228c.test"]
        return
    with pytest.raises(UsageError, match=why):
        asyncio.run(main())
    assert len(answering) == (5 if "/again" in head else 1)


def test_pictures_of_one_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    async def fetch(url: str) -> bytes:
        fetched.append(url)
        return b"x" * 20

    monkeypatch.setattr(service, "fetch_picture", fetch)
    monkeypatch.setattr(service, "MAX_PICTURES_BYTES", 50)
    parts = [
        {"type": "image_url", "image_url": {"url": f"http://a.test/{number}"}}
        for number in range(9)
    ]

    async def main() -> Exchanged:
        async with served(Settings(fetches_pictures=True)) as server:
            body = {"messages": [{"role": "user", "content": parts}]}
            return await ask(server.app, "/v1/chat/completions", body)

    answer = asyncio.run(main())
    assert answer.status == 400
    assert "the pictures have more than 50 bytes together" in answer.json["error"]["message"]
    assert len(fetched) == 3
