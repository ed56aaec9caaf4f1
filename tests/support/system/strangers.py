"""What talks to nodes and is none: raw connections, and servers that answer in their own way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from threading import Event, Thread
from typing import Any

from support.system.nodes import NodeProcess

from shardnet.wire.framing.frames import LIMITS, PREAMBLE, Frame, FrameKind, pack_frame
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose, hello_frame

OTHER_VERSION = PREAMBLE[:-2] + b"\x01\x00"


def hello(**fields: Any) -> bytes:
    """A client's hello as it goes over the wire; `fields` overrides those of a control link."""
    defaults: dict[str, Any] = {
        "purpose": Purpose.CONTROL,
        "role": PeerRole.CLIENT,
        "node": "0" * 32,
        "name": "odd",
    }
    return b"".join(pack_frame(hello_frame(Hello(**defaults | {"version": "0"} | fields)), LIMITS))


HELLO = hello()
PATIENCE_S = 120.0
"""Many times the silence after which a node gives a peer up."""
BEAT_S = 1.0

_hosts = (f"127.0.0.{number}" for number in count(2))


@contextmanager
def connected(node: NodeProcess, said: bytes) -> Iterator[socket.socket]:
    """A connection to a node on which `said` was sent.

    Each comes from an address of its own: of one host a node tells each kind of failure once.
    """
    to, source = (node.ready["host"], node.ready["port"]), (next(_hosts), 0)
    with socket.create_connection(to, source_address=source) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(said)
        yield connection


@contextmanager
def beating(connection: socket.socket) -> Iterator[None]:
    """Send heartbeats on a connection, so that its node does not give it up."""
    ended = Event()
    beat = b"".join(pack_frame(Frame(kind=FrameKind.HEARTBEAT), LIMITS, checked=True))

    def send() -> None:
        while not ended.wait(BEAT_S):
            connection.sendall(beat)

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def read_to_the_end(connection: socket.socket) -> bytes:
    """Read until the node closes."""
    answer = b""
    try:
        while part := connection.recv(1 << 16):
            answer += part
    except ConnectionResetError:
        pass
    return answer


@contextmanager
def answering(said: bytes) -> Iterator[str]:
    """A server that is no node: it says `said` to whoever connects. Yields its address."""

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            connections.append(connection)
            connection.sendall(said)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@contextmanager
def dropping() -> Iterator[str]:
    """A port on which nothing ever comes of a connection, as behind a firewall. Yields its address.

    Its queue of connections that nobody accepts is full, so that the system drops new ones.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


def unused_address() -> str:
    """An address where nothing listens: its port is given to nobody who asks for any."""
    return "127.0.0.1:1"
