#!/usr/bin/env python3
"""Measure links over TCP on loopback beside asyncio streams, in one run.

Two processes. For each kind of loop: the median round trip of a 16 KiB frame, the median time of a
16 MiB frame one way (from before it is sent until a 24-byte answer is back), and the median time to
open a connection. Streams read with `readexactly`. Ratios hold better than absolute figures.

    python scripts/benchmarks/bench_transport.py [--rounds N] [--tls]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from shardnet.transport.identity import Identity, make_identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.tcp import connect, listen
from shardnet.wire.framing.frames import KIB, MIB, Frame, FrameKind
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

HELLO = Hello(
    purpose=Purpose.DATA, role=PeerRole.NODE, node="b", name="bench", version="0", ring="r"
)
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
SMALL, LARGE = 16 * KIB, 16 * MIB
HEADER_BYTES = 24


def frame(n: int) -> Frame:
    """Make a frame with a payload of `n` bytes."""
    return Frame(kind=FrameKind.DATA, payload=bytes(n))


# --- the far side: echo a small frame, answer a large one with an empty frame


async def serve_link(told: Connection, identity: Identity | None) -> None:
    """Answer every link, until the process is ended. Tells the port."""
    options = LinkOptions(identity=identity)

    async def echo(link: Link) -> None:
        while True:
            received = await link.receive()
            link.send(received if len(received.payload) <= SMALL else frame(0))
            await link.drain()

    listener = await listen("127.0.0.1", 0, HELLO, echo, on_failure=lambda _: None, options=options)
    told.send(listener.port)
    await asyncio.Event().wait()


async def serve_streams(told: Connection, identity: Identity | None) -> None:
    """Answer every stream, until the process is ended. Tells the port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.read(HEADER_BYTES):
            n = int.from_bytes(header[:8], "little")
            data = await reader.readexactly(n)
            answer = data if n <= SMALL else b""
            writer.writelines([len(answer).to_bytes(8, "little") + bytes(16), answer])
            await writer.drain()

    context = identity.server if identity else None
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    told.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


# --- the near side


async def median_s(round_trip: Callable[[], Awaitable[None]], rounds: int) -> float:
    """Give the median time of `rounds` round trips, seconds, after five to warm up."""
    times = []
    for _ in range(rounds + 5):
        start = time.perf_counter()
        await round_trip()
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds: a small frame there and back, a large one there, a connection opened."""

    small_s: float
    large_s: float
    connect_s: float


async def measure_link(port: int, rounds: int, identity: Identity | None) -> Figures:
    """Measure a link."""
    options = LinkOptions(identity=identity)

    async def open_and_close() -> None:
        (await connect("127.0.0.1", port, HELLO, options=options)).abort("measured")

    link = await connect("127.0.0.1", port, HELLO, options=options)

    async def trip(sent: Frame) -> None:
        link.send(sent)
        await link.drain()
        await link.receive()

    small, large = frame(SMALL), frame(LARGE)
    small_s = await median_s(lambda: trip(small), rounds)
    large_s = await median_s(lambda: trip(large), rounds // 20)
    link.abort("measured")
    connect_s = await median_s(open_and_close, rounds // 20)
    return Figures(small_s=small_s, large_s=large_s, connect_s=connect_s)


async def measure_streams(port: int, rounds: int, identity: Identity | None) -> Figures:
    """Measure asyncio streams."""
    context = identity.client if identity else None

    async def open_and_close() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.transport.abort()

    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)

    async def trip(payload: bytes) -> None:
        writer.writelines([len(payload).to_bytes(8, "little") + bytes(16), payload])
        await writer.drain()
        header = await reader.readexactly(HEADER_BYTES)
        await reader.readexactly(int.from_bytes(header[:8], "little"))

    small, large = bytes(SMALL), bytes(LARGE)
    small_s = await median_s(lambda: trip(small), rounds)
    large_s = await median_s(lambda: trip(large), rounds // 20)
    writer.transport.abort()
    connect_s = await median_s(open_and_close, rounds // 20)
    return Figures(small_s=small_s, large_s=large_s, connect_s=connect_s)


def identity_of(kind: str) -> Identity | None:
    """Give the identity that a kind of connection is opened with."""
    return make_identity(bytes(16)) if kind.endswith("TLS") else None


def far_side(loop: str, kind: str, told: Connection) -> None:
    """Run the answering process."""
    serve = serve_link if kind.startswith("link") else serve_streams
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(serve(told, identity_of(kind)))


def measure(loop: str, kind: str, rounds: int) -> Figures:
    """Measure one kind of connection on one kind of loop against a process of its own."""
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe()
    process = context.Process(target=far_side, args=(loop, kind, tell), daemon=True)
    process.start()
    try:
        port = told.recv()
        near_side = measure_link if kind.startswith("link") else measure_streams
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            return runner.run(near_side(port, rounds, identity_of(kind)))
    finally:
        process.terminate()
        process.join()


def main() -> None:
    """Measure all combinations and print them with their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="round trips of the small frame")
    parser.add_argument("--tls", action="store_true", help="both kinds over TLS as well")
    arguments = parser.parse_args()
    kinds = ["streams", "link", *(["streams TLS", "link TLS"] if arguments.tls else [])]
    figures = {
        (loop, kind): measure(loop, kind, arguments.rounds) for loop in LOOPS for kind in kinds
    }
    base = figures["asyncio", "streams"]
    print(f"{'':20}{'16 KiB, round trip':>22}{'16 MiB, one way':>22}{'connect':>14}")
    for (loop, kind), found in figures.items():
        print(
            f"{loop + ' ' + kind:20}"
            f"{found.small_s * 1e6:>11.0f} us  x {base.small_s / found.small_s:4.2f}"
            f"{found.large_s * 1e3:>11.1f} ms  x {base.large_s / found.large_s:4.2f}"
            f"{found.connect_s * 1e3:>11.2f} ms"
        )


if __name__ == "__main__":
    main()
