"""Links through the test proxy: delayed, stalled, cut and garbled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.servers.proxy import Proxy
from support.transport_harness import HARNESSES, OPTIONS, Harness, hello

from shardnet.errors import LinkClosedError, PeerSilentError, RemoteProtocolError
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.tcp import connect
from shardnet.wire.framing.frames import Frame, FrameKind

HARNESS = HARNESSES["tcp-uvloop"]


@asynccontextmanager
async def proxied(
    harness: Harness, options: LinkOptions = OPTIONS, delay_s: float = 0.0
) -> AsyncIterator[tuple[Proxy, Link, Link]]:
    """A link whose bytes go through a proxy."""
    accepted: asyncio.Queue[Link] = asyncio.Queue()
    listener = await harness.listen(accepted.put, options=options)
    with Proxy("127.0.0.1", listener.port, delay_s=delay_s) as proxy:
        a = await connect("127.0.0.1", proxy.port, hello("a"), options=options)
        b = await accepted.get()
        yield proxy, a, b
        await asyncio.gather(a.close(), b.close())


def tokens(step: int, n_bytes: int = 4) -> Frame:
    return Frame(kind=FrameKind.TOKENS, step=step, payload=bytes(n_bytes))


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_frames_pass_through_and_back(delay_s: float) -> None:
    async def scenario(harness: Harness) -> None:
        async with proxied(harness, delay_s=delay_s) as (_, a, b):
            for step in range(20):
                a.send(tokens(step, 40_000))
                b.send(tokens(step))
            for step in range(20):
                assert (await b.receive()).step == step
                assert (await a.receive()).step == step

    HARNESS.run(scenario)


def test_a_stalled_link_falls_silent() -> None:
    async def scenario(harness: Harness) -> None:
        options = replace(
            OPTIONS, silence_s=1
        )  # the proxy's thread may be held up before it stalls
        async with proxied(harness, options) as (proxy, a, b):
            proxy.stall()
            a.send(tokens(1))
            for link in (a, b):
                with pytest.raises(PeerSilentError, match="frozen, or the network between is cut"):
                    await link.receive()

    HARNESS.run(scenario)


def test_a_link_that_stalls_for_a_while_goes_on() -> None:
    async def scenario(harness: Harness) -> None:
        async with proxied(harness) as (proxy, a, b):
            proxy.stall()
            a.send(tokens(1))
            proxy.resume()
            assert (await b.receive()).step == 1

    HARNESS.run(scenario)


def test_a_cut_link_is_closed_on_both_sides() -> None:
    async def scenario(harness: Harness) -> None:
        async with proxied(harness) as (proxy, a, b):
            proxy.cut()
            for link in (a, b):
                with pytest.raises(LinkClosedError):
                    await link.receive()

    HARNESS.run(scenario)


def test_a_garbled_frame_ends_the_link_by_name_on_both_sides() -> None:
    async def scenario(harness: Harness) -> None:
        async with proxied(harness) as (proxy, a, b):
            proxy.garble()
            a.send(tokens(1))
            for link in (b, a):
                with pytest.raises(RemoteProtocolError, match="the stream is damaged"):
                    await link.receive()

    HARNESS.run(scenario)


def test_a_link_may_stall_in_the_middle_of_a_frame() -> None:
    async def scenario(harness: Harness) -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        options = replace(OPTIONS, silence_s=0.2)
        listener = await harness.listen(accepted.put, options=options)
        with Proxy("127.0.0.1", listener.port, stall_after_bytes=30_000) as proxy:
            a = await connect("127.0.0.1", proxy.port, hello("a"), options=options)
            b = await accepted.get()
            a.send(tokens(1, 40_000))
            with pytest.raises(PeerSilentError):
                await b.receive()
            await asyncio.gather(a.close(), b.close())

    HARNESS.run(scenario)
