"""Probes on loopback: each way in which an address does not answer is told from the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from shardnet.api.client import dial
from shardnet.cluster.peers import rtt_probe
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.rtt_probe import probe, probe_address
from shardnet.errors import ShardnetError
from shardnet.transport import tcp
from shardnet.transport.identity import Identity, make_identity
from shardnet.transport.link import Link, LinkOptions
from shardnet.types import NodeId
from shardnet.wire.framing.frames import PREAMBLE
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import AddressView
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose
from shardnet.wire.messages.membership import Ping

KNOCK = partial(dial, handshake_s=30.0)
IMPATIENT = partial(dial, handshake_s=0.3)
"""For where nobody answers."""
BERT = Hello(
    purpose=Purpose.CONTROL, role=PeerRole.NODE, node="bert-id", name="bert", version="0.2.0"
)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A port that accepts connections, and nothing more."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def address(of: socket.socket) -> str:
    return f"127.0.0.1:{of.getsockname()[1]}"


def seen_at(where: str) -> AddressView:
    [view] = asyncio.run(probe(NodeId("bert-id"), [where], IMPATIENT))
    assert view.address == where
    return view


async def answer_pings(link: Link) -> None:
    async def handle(control: ControlLink, message: Incoming) -> None:
        assert isinstance(message, Ping)
        control.send(Done(request=message.request))

    try:
        await ControlLink(link, handle).serve()
    except ShardnetError:
        return


async def seen_at_node(node: str, theirs: Identity | None, ours: Identity | None) -> AddressView:
    """What a probe for `node` sees at the port of bert, who has one key, with another one."""
    options = LinkOptions(identity=theirs)
    listener = await tcp.listen("127.0.0.1", 0, BERT, answer_pings, options=options)
    try:
        [view] = await probe(NodeId(node), [listener.address], partial(KNOCK, identity=ours))
        return view
    finally:
        await listener.close()


def test_a_node_that_answers() -> None:
    view = asyncio.run(seen_at_node("bert-id", None, None))
    assert view.seen == "answers"
    assert view.rtt_s is not None


def test_another_node_at_the_address_is_named() -> None:
    view = asyncio.run(seen_at_node("cleo-id", None, None))
    assert view.seen == "other node"
    assert "bert (bert-id)" in view.why


@pytest.mark.parametrize(
    ("theirs", "ours"), [(b"a" * 16, b"b" * 16), (b"a" * 16, None), (None, b"b" * 16)]
)
def test_another_key_or_none(theirs: bytes | None, ours: bytes | None) -> None:
    identities = [make_identity(key) if key else None for key in (theirs, ours)]
    view = asyncio.run(seen_at_node("bert-id", *identities))
    assert view.seen == "other key"


def test_a_port_where_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert seen_at(address(taken)).seen == "refused"


def test_a_port_behind_which_everything_hangs(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rtt_probe, "CONNECT_S", 30.0)
    assert seen_at(address(server)).seen == "hangs"


def test_a_port_that_drops_what_comes(server: socket.socket) -> None:
    """Its queue is full: the system does not answer."""
    server.listen(0)
    with socket.socket() as one, socket.socket() as two:
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        assert seen_at(address(server)).seen == "dropped"


@pytest.mark.parametrize(
    ("said", "seen"),
    [(b"HTTP/1.1 400\r\n", "failed"), (PREAMBLE[:-2] + b"\x09\0", "other version")],
)
def test_what_is_no_node_of_this_version(said: bytes, seen: str) -> None:
    async def main() -> AddressView:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            await reader.read()
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as talking:
            [listening] = talking.sockets
            view, answer = await probe_address(address(listening), KNOCK)
            assert answer is None
            return view

    assert asyncio.run(main()).seen == seen


def test_a_network_that_cannot_be_reached() -> None:
    """A multicast group is no host."""
    assert seen_at("224.0.0.1:7433").seen == "unreachable"
