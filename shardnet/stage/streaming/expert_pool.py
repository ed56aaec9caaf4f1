"""Experts read from disk when a row is routed to them, and kept while there is room.

Where a layer with experts is streamed, a token visits few of them: only those are read, several at
a time, and the ones used last stay in memory. The memory is that of two whole layers, as for other
streamed layers (layer_stream.py).

Knows files and which expert was used last. Must not know what the bytes mean, nor who routes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from shardnet.errors import CheckpointError
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.linear import Linear
from shardnet.stage.estimate.memory_estimate import N_BUFFERS
from shardnet.stage.streaming.file_parts import FilePart, Packing, Piece, pieces_of
from shardnet.stage.streaming.layer_stream import SILENCE_S, aligned, no_answer, read_piece
from shardnet.threads import DaemonThreads

_WHOLE: Final = 1 << 62
"""No part is cut: several experts are read at once."""
_READERS: Final = 4
"""Experts that are read at once: an SSD has all its speed only when it is asked for several."""


@dataclass(slots=True, eq=False)
class _Expert:
    """What is read of an expert, and where it is."""

    pieces: list[Piece] = field(default_factory=list)
    size_bytes: int = 0
    place: int = -1
    """-1 for nowhere."""
    read: Future[None] | None = None
    """The reading of its bytes, None once it is known to be over."""
    made: dict[int, Linear] = field(default_factory=dict)
    """Its linears while it is in memory, by the offset of their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledExpert:
    """The weights of one expert: read when they are wanted, kept until others need the room.

    Does for its linears what a LayerStream does for those of a layer. Only the compute thread may
    call its methods.
    """

    pool: ExpertPool
    own: _Expert

    @property
    def made(self) -> dict[int, Linear]:
        """Its linears while it is in memory, by the offset of their weights."""
        return self.own.made

    def reserve(self, layer: int, parts: Iterable[FilePart], packing: Packing | None = None) -> int:
        """Add `parts` to what is read of it; return their offset."""
        return self.reserve_each(layer, [(part, packing) for part in parts])

    def reserve_each(self, layer: int, parts: Iterable[tuple[FilePart, Packing | None]]) -> int:
        """Add parts, each with a packing of its own; return their offset."""
        begin = aligned(self.own.size_bytes)
        pieces = [*pieces_of(parts, begin, _WHOLE)]
        self.own.pieces += pieces
        self.own.size_bytes = max((piece.end for piece in pieces), default=begin)
        return begin

    def fetch(self) -> None:
        """Begin to read it, unless it is in memory."""
        self.pool.fetch(self.own)

    def buffer_of(self, layer: int) -> int:
        """Return its place in the pool, once it is read. Raises what ExpertPool.need does."""
        self.pool.need(self.own)
        return self.own.place

    def weights(self, begin: int, size_bytes: int, buffer: int) -> Tensor:
        """Return `size_bytes` at offset `begin` of it, uint8: a view."""
        return self.pool.place(buffer)[begin : begin + size_bytes]


class ExpertPool:
    """Places in memory for experts of a stage's streamed layers; the least recently used go."""

    def __init__(self) -> None:
        self._is_silent = False
        self._experts: dict[tuple[int, int], _Expert] = {}
        self._held: OrderedDict[_Expert, None] = OrderedDict()
        """Those in memory or on their way, the least recently used first."""
        self._free: list[int] = []
        self._memory: list[Tensor] = []
        self._readers = DaemonThreads(_READERS, "shardnet-experts")
        self.n_used = 0
        """Experts that rows were routed to so far, and `n_read` of them from disk."""
        self.n_read = 0

    def expert(self, layer: int, number: int) -> PooledExpert:
        """Return the expert of a layer within the stage."""
        return PooledExpert(self, self._experts.setdefault((layer, number), _Expert()))

    def start(self) -> None:
        """Allocate the places, once all parts are reserved. Raises CapacityError."""
        if not self._experts:
            return
        layers = [layer for layer, _ in self._experts]
        per_layer = max(map(layers.count, set(layers)))
        n_places = min(N_BUFFERS, len(set(layers))) * per_layer
        largest = max(expert.size_bytes for expert in self._experts.values())
        with capacity_error_for(
            f"there is no memory for {n_places} experts of {largest} bytes to be streamed",
            remedy="give the node fewer layers",
        ):
            self._memory = [*torch.empty(n_places, aligned(largest), dtype=torch.uint8)]
        self._free = [*range(n_places)]

    def place(self, number: int) -> Tensor:
        """Return the bytes of a place, uint8."""
        return self._memory[number]

    def fetch(self, expert: _Expert) -> None:
        """Begin to read an expert that is not in memory, in the place of the least recently used.

        There are places for all experts of a layer.
        """
        self.n_used += 1
        if expert.place >= 0:
            self._held.move_to_end(expert)
            return
        if not self._free:
            self._give_up(next(iter(self._held)))
        self.n_read += 1
        expert.place = self._free.pop()
        self._held[expert] = None
        read = partial(_read, expert.pieces, self._memory[expert.place])
        expert.read = self._readers.submit(read)

    def need(self, expert: _Expert) -> None:
        """Wait until an expert has been read.

        Raises CheckpointError if its file is missing, unreadable or has changed, or the disk does
        not answer; while it does not, later calls raise at once.
        """
        if expert.place < 0:
            self.fetch(expert)
        if expert.read is None:
            return
        self._wait(expert, expert.read)
        try:
            expert.read.result()
        except CheckpointError:
            self._give_up(expert)
            raise
        expert.read = None

    def _give_up(self, expert: _Expert) -> None:
        if expert.read is not None:  # no read may still write to its place
            self._wait(expert, expert.read)
        del self._held[expert]
        expert.made.clear()
        self._free.append(expert.place)
        expert.place, expert.read = -1, None

    def _wait(self, expert: _Expert, read: Future[None]) -> None:
        waited_s = 0 if self._is_silent else SILENCE_S
        self._is_silent = bool(wait_for([read], waited_s).not_done)
        if self._is_silent:
            raise no_answer(expert.pieces[0].part.path, SILENCE_S, "experts")


def _read(pieces: Iterable[Piece], place: Tensor) -> None:
    for piece in pieces:
        read_piece(place, piece)
