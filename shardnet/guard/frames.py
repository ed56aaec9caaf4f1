"""Frames between a process and its helper: one JSON value and one block of bytes each.

Knows only pipes. A frame is the lengths of both as two 32-bit numbers, then both.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

MAX_FRAME_BYTES = 256 << 20
"""Limit of a frame in either direction."""

_LENGTHS = struct.Struct("<II")
_MOST_AT_ONCE = 1 << 20


def write_frame(pipe: int, value: object, block: bytes = b"") -> None:
    """Write a frame. Raises ValueError if it is too large, OSError if nobody reads."""
    text = json.dumps(value).encode()
    if len(text) + len(block) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(text) + len(block)} bytes, at most {MAX_FRAME_BYTES} are sent")
    for part in (_LENGTHS.pack(len(text), len(block)) + text, block):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(pipe, rest[:_MOST_AT_ONCE]) :]


def read_frame(pipe: int, most_bytes: int = MAX_FRAME_BYTES) -> tuple[Any, bytes]:
    """Read a frame. Raises EOFError at the end, ValueError for more than `most_bytes`."""
    n_text, n_block = _LENGTHS.unpack(_read(pipe, _LENGTHS.size))
    if n_text + n_block > most_bytes:
        raise ValueError(f"{n_text + n_block} bytes, at most {most_bytes} are read")
    return json.loads(_read(pipe, n_text)), _read(pipe, n_block)


def _read(pipe: int, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        more = os.read(pipe, min(n_bytes - len(data), _MOST_AT_ONCE))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
