"""Mutated frames against a node that runs, which goes on answering who behaves.

`scripts/fuzz` calls `fuzz_live`; a round that fails raises Finding, which has the bytes.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from support.cluster.small_node import small_settings
from support.hostile.mutate_frames import good_frames, mutated, sealed
from support.hostile.receive_frames import PURPOSES, Figures, Finding, most_bytes
from support.strategies.wire_strategies import hello

from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import RemoteProtocolError, ShardnetError
from shardnet.transport.address import split_address
from shardnet.transport.identity import Identity, make_identity
from shardnet.wire.framing.frames import LIMITS, PREAMBLE, pack_frame
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import PeerRole, Purpose, hello_frame
from shardnet.wire.messages.membership import Ping

ANSWER_S: Final = 5.0
"""A node that is attacked answers a ping within this."""


def fuzz_live(seconds: float, seed: int, key: bytes | None) -> Figures:
    """Send mutated frames to a node in this process over loopback, as a member and as a client.

    With a `key`, 16 bytes, inside of TLS. Raises Finding if the node stops answering a client that
    behaves, or a request ends in an internal error.
    """
    return asyncio.run(_fuzz_live(seconds, seed, key))


async def _fuzz_live(seconds: float, seed: int, key: bytes | None) -> Figures:
    rng, figures, frames = random.Random(seed), Figures(), good_frames()
    with tempfile.TemporaryDirectory() as folder:
        async with _node(Path(folder), key) as (node, identity):
            client = ControlLink(await node.client(), _refuse)
            serving = asyncio.create_task(client.serve_to_the_end())
            before = most_bytes()
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                purpose = rng.choice([*Purpose])
                chosen = [
                    frame
                    for frame in rng.choices(frames, k=20)
                    if PURPOSES.get(frame.kind, Purpose.DATA) is purpose
                ]
                said = [mutated(frame, rng) for frame in chosen]
                role = rng.choice([*PeerRole])
                answer = await _attack(node.address, identity, purpose, role, said)
                figures.n_frames += len(said)
                figures.n_refused += bool(answer)
                if b"internal error" in answer:
                    raise Finding(f"an internal error: {answer[-400:]!r}", b"".join(said))
                await _ping(client, figures, b"".join(said))
            figures.grown_bytes = most_bytes() - before
            await client.link.close()
            await serving
    return figures


async def _refuse(control: ControlLink, message: object) -> None:
    raise RemoteProtocolError("nothing is asked of this client")


async def _ping(client: ControlLink, figures: Figures, said: bytes) -> None:
    """Check that the node answers somebody else."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.ask(Ping(request=0), Done)
    except (TimeoutError, ShardnetError) as error:
        raise Finding(f"a ping ended with {error!r}", said) from error
    figures.n_pings += 1
    figures.slowest_ping_s = max(figures.slowest_ping_s, time.monotonic() - began)


async def _attack(
    address: str, identity: Identity | None, purpose: Purpose, role: PeerRole, said: list[bytes]
) -> bytes:
    """Open a link, send frames and return what the node answers until it closes, or for 50 ms."""
    host, port = split_address(address)
    opened = hello("c" * 32, purpose, ring="r", epoch=1) if purpose is Purpose.DATA else None
    own = msgspec.structs.replace(opened or hello("c" * 32, purpose), role=role)
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(
            host, port, ssl=None if identity is None else identity.client, server_hostname=None
        )
    except OSError:
        return answer
    try:
        writer.write(PREAMBLE + b"".join(pack_frame(hello_frame(own), LIMITS)))
        await asyncio.wait_for(reader.read(1), ANSWER_S)  # its preamble
        writer.write(b"".join(said if identity is not None else map(sealed, said)))
        async with asyncio.timeout(0.05):
            while part := await reader.read(1 << 16):
                answer += part
    except (OSError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()
    return answer


@asynccontextmanager
async def _node(folder: Path, key: bytes | None) -> AsyncIterator[tuple[Node, Identity | None]]:
    """Run a node on loopback, with a key or without, that has no model."""
    identity = None if key is None else make_identity(key)
    settings = small_settings(folder, identity)
    async with listening(settings, "127.0.0.1", 0) as node:
        yield node, identity
