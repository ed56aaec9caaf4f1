"""Messages through the socket between two shards: a length, then msgpack.

Knows bytes only. Both ends are processes of one node.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

_LENGTH: Final = struct.Struct("<I")
MAX_BYTES: Final = 1 << 26
"""Of a message, and of what is read at once."""


def write_message(to: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises OSError if nobody reads."""
    data = msgspec.msgpack.encode(message)
    to.sendall(_LENGTH.pack(len(data)) + data)


def read_message(source: socket.socket) -> bytes:
    """Wait for a message. Raises EOFError at the end, OSError as sockets do, also for silence."""
    (n_bytes,) = _LENGTH.unpack(read_exactly(source, _LENGTH.size))
    if n_bytes > MAX_BYTES:
        raise EOFError
    return bytes(read_exactly(source, n_bytes))


def read_exactly(source: socket.socket, n_bytes: int) -> bytearray:
    """Read that many bytes. Raises as `read_message`."""
    data = bytearray(n_bytes)
    view = memoryview(data)
    while view:
        n = source.recv_into(view)
        if not n:
            raise EOFError
        view = view[n:]
    return data
