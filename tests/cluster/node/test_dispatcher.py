"""Clients of a node whose links end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from support.transport_harness import HARNESSES, OPTIONS, Harness, hello

from shardnet.cluster.node.dispatcher import Dispatcher
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import PeerSilentError
from shardnet.wire.messages.handshake import Purpose

NOBODY = cast(Any, None)
"""A part of the node that no client reaches."""


async def ignore(control: ControlLink, message: Incoming) -> None:
    """A handler for clients that ask nothing."""


def test_a_client_that_falls_silent_is_told_and_logged() -> None:
    lines: list[str] = []

    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up(replace(OPTIONS, client_silence_s=0.1), Purpose.CONTROL)
        async with asyncio.TaskGroup() as tasks:
            dispatcher = Dispatcher(
                own_hello=lambda purpose: hello("b", purpose),
                handle=ignore,
                host=NOBODY,
                gathers=NOBODY,
                sharing=NOBODY,
                peers=NOBODY,
                tasks=tasks,
                log=lines.append,
            )
            await dispatcher.accept(link)
            report = await peer.read_error()
            assert report.code == PeerSilentError.code
            peer.transport.close()

    HARNESSES["tcp-asyncio"].run(scenario)
    [line] = lines
    assert line.startswith("dropped the client at 127.0.0.1:")
    assert "nothing came for 0.1 s" in line
