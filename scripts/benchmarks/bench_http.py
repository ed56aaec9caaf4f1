"""Benchmark what the HTTP server costs over the engine's own, on a ring of node processes.

Three figures, each with its bar: milliseconds to the first token over what the engine says it took
(at most 5), tokens per second of 16 streams as a share of what the Python client gets of the same
ring (at least 0.95), and of an answer by a JSON schema as a share of a free one (at least 0.9).
The server is a process of its own, as `shardnet serve` is. Both sides take turns; medians. No
prompt occurs twice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench_constrained import PROMPT, SCHEMA

from shardnet import api
from shardnet.api.connections import local_ring
from shardnet.assets import DEFAULT_MODEL_NAME

MOST_FIRST_MS, LEAST_STREAMS, LEAST_SCHEMA = 5.0, 0.95, 0.9
FIRST_TOKENS = 4
SHAPE = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}

Body = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Told:
    """When the events of a stream came, in seconds since it was asked for, and its tokens."""

    times_s: list[float] = field(default_factory=list)
    n_tokens: int = 0

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first."""
        return (self.n_tokens - 1) / (self.times_s[-1] - self.times_s[0])


def main() -> None:
    """Measure and print; with --json one object on standard output. Ends with 1 below a bar."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench http")
    parser.add_argument("--model", default=DEFAULT_MODEL_NAME)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first-rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = asyncio.run(_measure(arguments))
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(
            f"first token: engine {report['first_engine_ms']:.2f} ms, Python client "
            f"{report['first_client_ms']:.2f}, HTTP {report['first_http_ms']:.2f}: "
            f"{report['first_over_engine_ms']:.2f} ms over the engine\n"
            f"{arguments.streams} streams: Python client {report['streams_client']:.0f} tokens/s, "
            f"HTTP {report['streams_http']:.0f}: {report['streams_share']:.3f} of it\n"
            f"by a schema: {report['schema']:.0f} tokens/s, free {report['free']:.0f}: "
            f"{report['schema_share']:.3f} of it"
        )
    missed = [
        name
        for name, is_missed in (
            ("first token", report["first_over_engine_ms"] > MOST_FIRST_MS),
            ("streams", report["streams_share"] < LEAST_STREAMS),
            ("schema", report["schema_share"] < LEAST_SCHEMA),
        )
        if is_missed
    ]
    if missed:
        sys.exit(f"error: missed the bar for {', '.join(missed)}")


async def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    prompts = _prompts()
    async with (
        local_ring(arguments.nodes, model=arguments.model, threads=arguments.threads) as client,
        _served(client.choice) as ask,
    ):
        return {
            **await _first_tokens(client, ask, prompts, arguments.first_rounds),
            **await _streams(client, ask, prompts, arguments),
            **await _by_schema(ask, arguments),
        }


def _prompts() -> Iterator[str]:
    """Make short prompts, no two of which begin alike."""
    return (f"{number} years ago there was a" for number in itertools.count(1))


async def _first_tokens(
    client: api.Client, ask: Callable[..., Any], prompts: Iterator[str], n_rounds: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {"engine": [], "client": [], "http": []}
    for number in range(n_rounds + 3):
        direct = Told()
        result = await _generate(client, next(prompts), FIRST_TOKENS, direct)
        told = await ask("/v1/completions", _completion(next(prompts), FIRST_TOKENS))
        if number >= 3:  # the first ones load, and warm caches
            times["engine"].append(result.timing.ttft_s)
            times["client"].append(direct.times_s[0])
            times["http"].append(told.times_s[0])
    found = {f"first_{name}_ms": 1e3 * statistics.median(all_) for name, all_ in times.items()}
    return {**found, "first_over_engine_ms": found["first_http_ms"] - found["first_engine_ms"]}


async def _generate(
    client: api.Client, prompt: str, n_tokens: int, told: Told
) -> api.GenerationResult:
    """Generate with the Python client, and note when tokens come."""
    began_s = time.perf_counter()
    events = client.generate(prompt, max_tokens=n_tokens, ignore_eos=True)
    async with aclosing(events):
        async for event in events:
            if event.token_ids:
                told.times_s.append(time.perf_counter() - began_s)
            if event.result is not None:
                return event.result
    raise AssertionError("a request without an end")


def _completion(prompt: str, n_tokens: int) -> Body:
    options = {"stream_options": {"include_usage": True}, "ignore_eos": True}
    return {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "stream": True, **options}


async def _streams(
    client: api.Client, ask: Callable[..., Any], prompts: Iterator[str], arguments: Any
) -> dict[str, float]:
    n_streams, n_tokens = arguments.streams, arguments.tokens
    rates: dict[str, list[float]] = {"client": [], "http": []}
    for _ in range(arguments.rounds):
        began_s = time.perf_counter()
        await asyncio.gather(
            *(_generate(client, next(prompts), n_tokens, Told()) for _ in range(n_streams))
        )
        rates["client"].append(n_streams * n_tokens / (time.perf_counter() - began_s))
        began_s = time.perf_counter()
        await asyncio.gather(
            *(
                ask("/v1/completions", _completion(next(prompts), n_tokens))
                for _ in range(n_streams)
            )
        )
        rates["http"].append(n_streams * n_tokens / (time.perf_counter() - began_s))
    found = {name: statistics.median(all_) for name, all_ in rates.items()}
    return {
        "streams_client": found["client"],
        "streams_http": found["http"],
        "streams_share": found["http"] / found["client"],
    }


async def _by_schema(ask: Callable[..., Any], arguments: Any) -> dict[str, float]:
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    for number in range(arguments.rounds + 1):
        for name, shape in (("free", {}), ("schema", {"response_format": SHAPE})):
            body = {
                **_completion(PROMPT, arguments.tokens),
                "messages": [{"role": "user", "content": PROMPT}],
                **shape,
            }
            told = await ask("/v1/chat/completions", body)
            if number:  # the first one compiles the schema
                rates[name].append(told.tok_s)
    found = {name: statistics.median(all_) for name, all_ in rates.items()}
    return {**found, "schema_share": found["schema"] / found["free"]}


@asynccontextmanager
async def _served(choice: api.ModelChoice) -> AsyncIterator[Callable[..., Any]]:
    """Run `shardnet serve` over the ring; give what asks it for a stream."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "shardnet_cli", "serve", "--insecure"),
        *("--nodes", ",".join(choice.nodes), "--model", choice.model, "--port", "0", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        ready = json.loads(await process.stdout.readline())

        async def ask(path: str, body: Body) -> Told:
            return await _ask(ready["host"], ready["port"], path, body)

        yield ask
    finally:
        process.terminate()
        await process.wait()


async def _ask(host: str, port: int, path: str, body: Body) -> Told:
    """Ask for a stream on a new connection, and note when its events come."""
    told, began_s = Told(), time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise SystemExit(f"error: {event['error']['message']}")
        if usage := event.get("usage"):
            told.n_tokens = usage["completion_tokens"]
        elif event["choices"][0].get("text") or event["choices"][0].get("delta", {}).get("content"):
            told.times_s.append(time.perf_counter() - began_s)
    writer.close()
    await writer.wait_closed()
    return told


if __name__ == "__main__":
    main()
