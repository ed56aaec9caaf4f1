"""What connects and is no peer, or answers and is no node: one line, and the nodes serve on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
from nodes import NodeProcess, Trio
from parrot import Parrots

from shardnet.wire.frames import FRAME_MAGIC, HEADER, PREAMBLE, FrameKind, Limits, pack_frame
from shardnet.wire.messages import Hello, Purpose, Role, hello_frame

OTHER_VERSION = PREAMBLE[:-2] + b"\x02\x00"
HELLO = b"".join(
    pack_frame(
        hello_frame(
            Hello(purpose=Purpose.CONTROL, role=Role.CLIENT, node="0" * 32, name="odd", version="0")
        ),
        Limits(),
    )
)
FOUR_GB = HEADER.pack(FRAME_MAGIC, FrameKind.CONTROL, 0, 2**32 - 1, 0, 0, 0)
PATIENCE_S = 30.0
"""Three times the silence after which a node gives a peer up."""


@contextmanager
def connected(node: NodeProcess, said: bytes) -> Iterator[socket.socket]:
    """A connection to a node on which `said` was sent."""
    with socket.create_connection((node.ready["host"], node.ready["port"])) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(said)
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    """Read until the node closes."""
    answer = b""
    try:
        while part := connection.recv(1 << 16):
            answer += part
    except ConnectionResetError:
        pass
    return answer


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak the protocol of shardnet"),
        (bytes(range(256)) * 100, "does not speak the protocol of shardnet"),
        (OTHER_VERSION, "protocol version 2, we speak 1"),
        (PREAMBLE + b"\xff" * 24, "damaged"),
        (PREAMBLE + FOUR_GB, "CONTROL"),
    ],
    ids=["http", "noise", "version", "damaged", "no hello"],
)
def test_what_is_no_peer_is_logged_in_one_line(
    trio: Trio, parrots: Parrots, said: bytes, logged: str
) -> None:
    node = trio.nodes[2]
    before = node.log
    with connected(node, said) as connection:
        port = connection.getsockname()[1]
        read_to_the_end(connection)
    node.stderr.wait_for("\n", after=len(before))
    lines = node.log[len(before) :].splitlines()
    assert len(lines) == 1
    assert logged in lines[0]
    assert str(port) in lines[0]
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


def test_a_frame_that_claims_4_gb_takes_no_memory(trio: Trio, parrots: Parrots) -> None:
    node = trio.nodes[2]
    before = node.private_bytes
    with connected(node, PREAMBLE + HELLO + FOUR_GB + b"x" * 1000) as connection:
        answer = read_to_the_end(connection)
    assert b"4294967295" in answer
    assert node.private_bytes < before + 50_000_000
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


def test_peers_that_stop_talking_are_given_up(trio: Trio, parrots: Parrots) -> None:
    """One before its hello, one in the middle of it, one in the middle of a later frame."""
    node = trio.nodes[2]
    before = len(node.log)
    frame = HEADER.pack(FRAME_MAGIC, FrameKind.CONTROL, 0, 1000, 0, 0, 0) + b"x" * 10
    with (
        connected(node, b"") as mute,
        connected(node, PREAMBLE + HELLO[:30]) as halting,
        connected(node, PREAMBLE + HELLO + frame) as stuck,
    ):
        assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"
        for connection in (mute, halting, stuck):
            read_to_the_end(connection)
    log = node.log[before:]
    assert log.count("no hello came within") == 2
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


@contextmanager
def answering(said: bytes) -> Iterator[str]:
    """Something that is no node: it says `said` to whoever connects. Yields its address."""

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            open_connections.append(connection)
            connection.sendall(said)

    open_connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in open_connections:
                connection.close()


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (OTHER_VERSION, ["version 2", "1", "same shardnet"]),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ["does not speak the protocol of shardnet"]),
        (b"", ["no answer within 5 s"]),
    ],
    ids=["version", "http", "mute"],
)
def test_what_is_no_node_is_named(
    trio: Trio, parrots: Parrots, said: bytes, parts: list[str]
) -> None:
    """As the head, asked by the client, and as another node, asked by the head."""
    with answering(said) as address:
        commands = [
            trio.machine.begin("generate", "a", "--model", str(parrots.alphabet), "--nodes", nodes)
            for nodes in (address, f"{trio.addresses(0)},{address}")
        ]
        errors = [command.wait().error for command in commands]
    for error in errors:
        for part in [address, *parts]:
            assert part in error
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


def test_an_address_where_nothing_listens_is_named(trio: Trio, parrots: Parrots) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    for nodes in (address, f"{trio.addresses(0)},{address}"):
        error = trio.generate("a", parrots.alphabet, "--nodes", nodes).error
        assert address in error
        assert "shardnet node" in error
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "no-such-host.invalid:7433"])
def test_an_address_that_is_none_is_named(trio: Trio, parrots: Parrots, address: str) -> None:
    result = trio.generate("a", parrots.alphabet, "--nodes", address)
    assert address.partition(":")[0] in result.error


def test_a_node_named_twice_is_refused(trio: Trio, parrots: Parrots) -> None:
    error = trio.generate("a", parrots.alphabet, "--nodes", trio.addresses(0, 0)).error
    assert "twice" in error
