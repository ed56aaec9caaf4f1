"""Mutated handshakes through the connection, and mutated requests to the HTTP server.

Only documented errors may come of the former, and no answer of 500 of the latter. `scripts/fuzz`
calls `fuzz_handshakes` and `fuzz_requests`; a round that fails raises Finding, which has the bytes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from support.cluster.scripted_node import ScriptedNode, client_of
from support.hostile.mutate_frames import noise
from support.hostile.receive_frames import SLOW_S, Figures, Finding
from support.strategies.wire_strategies import feed, hello

from shardnet.api.anthropic import endpoints as anthropic
from shardnet.api.ollama import endpoints as ollama
from shardnet.api.openai import endpoints as openai
from shardnet.api.responses import responses
from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening
from shardnet.errors import ShardnetError
from shardnet.wire.connection.connection import HelloReceived, LinkConnection, LinkFailed, LinkState
from shardnet.wire.framing.frames import LIMITS, PREAMBLE, pack_frame
from shardnet.wire.messages.handshake import Purpose, hello_frame

_HOSTILE: Final = Path(__file__).parents[2] / "hostile"
HANDSHAKES: Final = _HOSTILE / "handshakes"
REQUESTS: Final = _HOSTILE / "requests"
ANSWER_S: Final = 0.2
"""A request that is not whole gets no answer: then it has been waited for long enough."""
ALIVE: Final = b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
GOOD: Final = PREAMBLE + b"".join(pack_frame(hello_frame(hello("a")), LIMITS))
"""A handshake that makes a link."""
EACH: Final = 50
"""After so many requests the server has to answer one that is right."""
_USUAL: Final[dict[str, Any]] = {
    "model": "",
    "messages": [{"role": "user", "content": "ab"}],
    "prompt": "ab",
    "input": "ab",
    "tokens": [97],
    "max_tokens": 4,
    "stream": False,
    "temperature": 0.5,
    "stop": ["x"],
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
}
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_MAY_FAIL: Final = (501, 503, 504)
_JSON_VALUES: Final = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"1e308", b"9" * 400, b'""', b'"\\ud800"', b"[]"),
    *(b"1", b"2", b"0.5", b"false", b'"a"', b'"ab"', b"[97]"),
    *(b"{}", b"[[]]", b"[" * 500 + b"]" * 500, b'{"a":' * 200 + b"1" + b"}" * 200, b'"\\u0000"'),
)
_VALUE: Final = re.compile(rb'(?<=[:,\[])\s*("[^"]*"|[-\d.]+|true|false|null)')


# --- handshakes


def shake_hands(data: bytes, *, initiator: bool, checked: bool) -> tuple[bool, ShardnetError]:
    """Let a side receive `data` from the first byte on, and its end.

    Returns whether the link came up, and what ended it. Raises Finding for whatever is not a
    documented error.
    """
    own = hello("b", Purpose.CONTROL)
    connection = LinkConnection(own, initiator=initiator, checked=checked)
    try:
        events = [*feed(connection, data), *connection.eof()]
    except (MemoryError, Exception) as error:
        raise Finding(f"{type(error).__name__}: {error}", data) from error
    if connection.state is not LinkState.ENDED:
        raise Finding("the link has not ended with its stream", data)
    ended = events[-1]
    error = ended.error if isinstance(ended, LinkFailed) else ShardnetError("a goodbye")
    return any(isinstance(event, HelloReceived) for event in events), error


def corpus(folder: Path) -> list[bytes]:
    """Return what the files of a corpus hold."""
    return [path.read_bytes() for path in sorted(folder.glob("*.*")) if path.suffix != ".md"]


def fuzz_handshakes(n: int, seed: int) -> Figures:
    """Mutate `n` handshakes and let both kinds of sides receive them. Raises Finding."""
    rng, figures, sources = random.Random(seed), Figures(), corpus(HANDSHAKES)
    for _ in range(n):
        data = GOOD if rng.random() < 0.2 else rng.choice(sources)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            data = noise(data, rng)
        began = time.process_time()
        is_up, _ = shake_hands(data, initiator=rng.random() < 0.5, checked=rng.random() < 0.5)
        took_s = time.process_time() - began
        figures.n_frames += 1
        figures.n_read += is_up
        figures.n_refused += not is_up
        figures.slowest_s = max(figures.slowest_s, took_s)
        if took_s > SLOW_S:
            figures.slow.append(data)
    return figures


# --- requests


def _mutated(request: bytes, rng: random.Random) -> bytes:
    """Change a value of the body, or any bytes; mostly with the right length in the header."""
    head, _, body = request.partition(b"\r\n\r\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 if places := [*_VALUE.finditer(body)]:
                place = rng.choice(places)
                body = body[: place.start()] + rng.choice(_JSON_VALUES) + body[place.end() :]
            case 8:
                head = noise(head, rng)
            case _:
                body = noise(body, rng)
    if rng.random() < 0.9:
        head = re.sub(rb"(?i)(content-length: *)\d+", rb"\g<1>%d" % len(body), head)
    return head + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    """Return the status of an answer, 0 where there is none."""
    found = _STATUS.match(answer)
    return int(found[1]) if found else 0


async def answer_to(url: str, request: bytes, wait_s: float = ANSWER_S) -> bytes:
    """Send the bytes of a request and return what comes until the server closes, or in `wait_s`."""
    answer = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(request)
        async with asyncio.timeout(wait_s):
            while part := await reader.read(1 << 16):
                answer += part
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return answer


def fuzz_requests(n: int, seed: int) -> Figures:
    """Send `n` mutated requests to a server on loopback, whose node is scripted. Raises Finding."""
    return asyncio.run(_fuzz_requests(n, seed))


def _good_requests() -> list[bytes]:
    """Make a request that is right for every path that takes a body."""
    bodies = {
        endpoint.path: endpoint.body
        for room in (openai, anthropic, responses, ollama)
        for endpoint in room.endpoints()
        if endpoint.body is not None
    }
    requests = []
    for path, kind in bodies.items():
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        body = json.dumps({name: value for name, value in _USUAL.items() if name in fields})
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        requests.append(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return requests


async def _fuzz_requests(n: int, seed: int) -> Figures:
    rng, figures = random.Random(seed), Figures()
    wrong, good = corpus(REQUESTS), _good_requests()
    listening = Listening(host="127.0.0.1", port=0)
    async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
        for number in range(1, n + 1):
            said = _mutated(rng.choice(rng.choice((wrong, good))), rng)
            status = status_of(await answer_to(url, said))
            figures.n_frames += 1
            figures.n_read += 200 <= status < 300
            figures.n_refused += status >= 400
            if status >= 500 and status not in _MAY_FAIL:
                raise Finding(f"an answer of {status}", said)
            if number % EACH == 0 or number == n:
                await _check_alive(url, figures, said)
    return figures


async def _check_alive(url: str, figures: Figures, said: bytes) -> None:
    began = time.monotonic()
    if status_of(await answer_to(url, ALIVE, 5.0)) != 200:
        raise Finding("the server does not answer any more", said)
    figures.n_pings += 1
    figures.slowest_ping_s = max(figures.slowest_ping_s, time.monotonic() - began)
