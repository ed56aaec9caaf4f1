"""What the first shard of a stage tells the others, and what they answer: msgpack and plain bytes.

Knows the messages and their frames, a length and then msgpack. Both ends are processes of one node,
started from the same files.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.slot_operations import SlotMethod
from shardnet.types import MicroBatch, SlotId

WAKE: Final = b"."
"""What comes through the socket with each call that stands in the mailbox."""


_LENGTH: Final = struct.Struct("<I")
MAX_BYTES: Final = 1 << 26
"""Of a message, and of what is read at once."""


class ShardJob(msgspec.Struct, frozen=True, kw_only=True):
    """Which shard to load; the first message to a process.

    `order` is the stage's, for the device of this shard. `memory` and `mailbox` are file
    descriptors, `packs` is the folder for quantised weights, "" for none.
    """

    order: StageOrder
    index: int
    size: int
    memory: int
    mailbox: int
    mailbox_bytes: int
    n_threads: int
    room_blocks: int
    packs: str
    pack_identity: str
    """What quantised weights are cached by."""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run a micro-batch; hidden states of `dtype` and `width` follow, none for token ids alone.

    `index`, `blocks` and `positions` are those of PictureRows, None where there are none.
    """

    batch: MicroBatch
    dtype: str
    width: int
    n_threads: int
    index: list[int] | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    positions: list[list[int]] | None = None


class Deep(msgspec.Struct, frozen=True, kw_only=True, tag="deep"):
    """Add the rows that follow, float32, after an absolute layer in the next Run (DeepStack).

    Without a layer they are what pictures have in the place of embedded token ids.
    """

    layer: int | None
    n_rows: int


class Logits(msgspec.Struct, frozen=True, kw_only=True, tag="logits"):
    """Apply norm and LM head to the rows that follow."""

    n_rows: int
    dtype: str


class SlotCall(msgspec.Struct, frozen=True, kw_only=True, tag="slots"):
    """Call a method of the KV cache, which changes slots and needs no rows."""

    method: SlotMethod
    arguments: tuple[int | list[int] | None, ...]


class AdoptRows(msgspec.Struct, frozen=True, kw_only=True, tag="adopt rows"):
    """Positions `[begin, begin + n)` of a layer with `n_rows` follow: all heads, [KV heads, n, W].

    `part` says what they are: keys, values, or the state of the layer, all of its bytes.
    """

    layer: int
    part: str
    begin: int
    n: int
    n_rows: int
    end: int = 0
    """Of a state: the positions after which it is."""


class Adopt(msgspec.Struct, frozen=True, kw_only=True, tag="adopt"):
    """Let a slot hold what came in AdoptRows."""

    slot: SlotId
    firsts: tuple[int, ...]
    n_blocks: int


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Answer rows of a layer, counted from the first one that the slot holds."""

    slot: SlotId
    layer: int
    begin: int
    end: int
    values: bool


Call = Run | Deep | Logits | SlotCall | AdoptRows | Adopt | Read


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far a shard is loaded."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A shard is loaded; `exact_rows` as StageModel's."""

    exact_rows: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A shard could not be loaded, or cannot go on: a ShardnetError."""

    code: int
    message: str
    remedy: str


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag="rows"):
    """The answer to Read: the rows follow."""

    n_bytes: int
    dtype: str
    shape: tuple[int, int, int]


Answer = Progress | Ready | Failed | Rows


def write_message(to: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises OSError if nobody reads."""
    data = msgspec.msgpack.encode(message, enc_hook=str)  # paths
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
