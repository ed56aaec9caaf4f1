"""What connects and is no peer, or answers and is no node: one line, and the nodes serve on."""

from __future__ import annotations

import re

import pytest
from support.system.nodes import Crew
from support.system.parrot import Parrots
from support.system.strangers import (
    HELLO,
    OTHER_VERSION,
    answering,
    connected,
    hello,
    read_to_the_end,
    unused_address,
)

from shardnet.wire.framing.frames import (
    FRAME_MAGIC,
    HEADER,
    LIMITS,
    PREAMBLE,
    Frame,
    FrameKind,
    pack_frame,
)
from shardnet.wire.messages.handshake import Purpose

NONSENSE = b"".join(
    pack_frame(Frame(kind=FrameKind.CONTROL, meta=b"\xc1\xc1\xc1\xc1"), LIMITS, checked=True)
)
FOUR_GB = HEADER.pack(FRAME_MAGIC, FrameKind.CONTROL, 0, 2**32 - 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak the protocol of shardnet"),
        (bytes(range(256)) * 100, "does not speak the protocol of shardnet"),
        (OTHER_VERSION, "protocol version 1, we speak 4"),
        (PREAMBLE + b"\xff" * 24, "damaged"),
        (PREAMBLE + FOUR_GB, "CONTROL"),
        (PREAMBLE + hello(purpose=Purpose.DATA, ring="none"), "no member of ring none"),
        (PREAMBLE + HELLO + FOUR_GB + b"x" * 1000, "claims 4294967295 bytes"),
        (PREAMBLE + HELLO + NONSENSE, "malformed"),
        (PREAMBLE + HELLO + HELLO, "HELLO frame is not allowed"),
    ],
    ids=["http", "noise", "version", "damaged", "no hello", "no ring", "4 GB", "nonsense", "twice"],
)
def test_what_is_no_peer_is_logged_in_one_line(
    trio: Crew, parrots: Parrots, said: bytes, logged: str
) -> None:
    """What else the node has to say, of other nodes and tests, may stand between."""
    node = trio.nodes[2]
    before = len(node.log)
    with connected(node, said) as connection:
        host, port = connection.getsockname()
        read_to_the_end(connection)
    node.stderr.wait_for(re.compile(rf"{host}:{port}\b.*\n"), after=before)
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"
    lines = [line for line in node.log[before:].splitlines() if f"{host}:" in line]
    assert len(lines) == 1
    assert logged in lines[0]


def test_a_frame_that_claims_4_gb_takes_no_memory(trio: Crew, parrots: Parrots) -> None:
    node = trio.nodes[2]
    before = node.private_bytes
    with connected(node, PREAMBLE + HELLO + FOUR_GB + b"x" * 1000) as connection:
        answer = read_to_the_end(connection)
    assert b"4294967295" in answer
    assert node.private_bytes < before + 50_000_000
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (OTHER_VERSION, ["version 1", "4", "update the older one"]),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ["does not speak the protocol of shardnet"]),
    ],
    ids=["version", "http"],
)
def test_what_is_no_node_is_named(
    trio: Crew, parrots: Parrots, said: bytes, parts: list[str]
) -> None:
    """As the head, asked by the client, and as another node, asked by the head."""
    with answering(said) as address:
        for nodes in (address, f"{trio.addresses(0)},{address}"):
            error = trio.generate("a", parrots.alphabet, "--nodes", nodes).error
            for part in [address, *parts]:
                assert part in error
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


def test_an_address_where_nothing_listens_is_named(trio: Crew, parrots: Parrots) -> None:
    address = unused_address()
    for nodes in (address, f"{trio.addresses(0)},{address}"):
        error = trio.generate("a", parrots.alphabet, "--nodes", nodes).error
        assert address in error
        assert "shardnet node" in error
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x"])
def test_an_address_that_is_none_is_named(trio: Crew, parrots: Parrots, address: str) -> None:
    result = trio.generate("a", parrots.alphabet, "--nodes", address)
    assert result.code == 2
    assert f"--nodes: '{address}' is not HOST:PORT" in result.stderr


def test_a_host_that_is_none_is_named(trio: Crew, parrots: Parrots) -> None:
    result = trio.generate("a", parrots.alphabet, "--nodes", "no-such-host.invalid:7433")
    assert "no-such-host.invalid" in result.error


def test_a_node_named_twice_is_refused(trio: Crew, parrots: Parrots) -> None:
    error = trio.generate("a", parrots.alphabet, "--nodes", trio.addresses(0, 0)).error
    assert "twice" in error
