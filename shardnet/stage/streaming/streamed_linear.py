"""Linear layers and experts whose weights are read from disk while a stage computes.

Where a layer with experts is streamed, a token visits few of them: only those are read, several at
a time, and the ones used last stay in memory. The memory is that of two whole layers, as for other
streamed layers (layer_stream.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from shardnet.model.families.tensor_shapes import Shape
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import NativeMatmul, native_kernels
from shardnet.model.kernels.linear import (
    Kernel,
    KernelChoice,
    Linear,
    PlainLinear,
    is_native,
    join_biases,
    make_linear,
)
from shardnet.model.kernels.packing import FLOAT_FORMS
from shardnet.model.kernels.panel_linear import PanelLinear, PanelPacking, fills_panels
from shardnet.model.kernels.panels import Panels
from shardnet.stage.estimate.memory_estimate import N_BUFFERS
from shardnet.stage.streaming.buffers import FilePart, Packing, Piece, pieces_of
from shardnet.stage.streaming.layer_stream import (
    PIECE_BYTES,
    SILENCE_S,
    DiskWatch,
    LayerStream,
    aligned,
    read_piece,
)
from shardnet.threads import DaemonThreads

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
        pieces = [*pieces_of(parts, begin, PIECE_BYTES)]
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

    def __init__(self, *, silence_s: float = SILENCE_S) -> None:
        """A disk that brings nothing for `silence_s` fails what waits for it."""
        self._disk = DiskWatch(silence_s, "experts")
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
        read = partial(_read, expert.pieces, self._memory[expert.place], self._disk)
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
        except Exception:
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
        self._disk.wait_for([read], expert.pieces[0].part.path)


def _read(pieces: Iterable[Piece], place: Tensor, disk: DiskWatch) -> None:
    for piece in pieces:
        read_piece(place, piece)
        disk.brought()


class Place(NamedTuple):
    """What streamed weights are read with: their layer, counted within the stage, or an expert."""

    stream: LayerStream | PooledExpert
    layer: int


class StoredLinear:
    """The recipe of a linear layer whose weights are read as a checkpoint stores them.

    `stored` is the shape of the concatenated weights: [N, K], or [K, N] if they are `transposed`.
    With the compiled library, weights are packed as they are read, unless a panel would cover two
    of them; for oneDNN, and if transposed, they are packed when their layer is computed.
    """

    def __init__(
        self,
        choice: KernelChoice,
        device: torch.device,
        shapes: Sequence[Shape],
        biases: Sequence[Tensor],
        *,
        transposed: bool,
    ) -> None:
        """Join weights that are stored in `shapes`; only a single weight may be transposed."""
        assert not transposed or len(shapes) == 1
        native = native_kernels() if choice.kernel is Kernel.NATIVE else None
        n_in, packing = shapes[0][1], None
        if native is not None and not transposed and fills_panels([shape[0] for shape in shapes]):
            dtype = torch_dtype(choice.stored_dtype)
            form = FLOAT_FORMS[dtype]
            packing = PanelPacking(native=native, n_in=n_in, dtype=dtype, form=form)
        own = [bias.clone() for bias in biases]
        self.choice = choice
        self.device = device
        self.stored = (sum(shape[0] for shape in shapes), n_in)
        self.transposed = transposed
        self.biases = own
        self.bias = join_biases(own, device, torch_dtype(choice.dtype))
        self.native = native
        self.packing = packing

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.stored[::-1] if self.transposed else self.stored

    @property
    def is_native(self) -> bool:
        """Whether the compiled library computes it."""
        return self.native is not None

    @property
    def is_ready(self) -> bool:
        """Whether the bytes in the buffer are the kernel's weights, without further packing."""
        return self.packing is not None or self._is_plain

    @property
    def _is_plain(self) -> bool:
        return self.choice.kernel is Kernel.PLAIN and not self.transposed

    def read_bytes(self, stored_bytes: int) -> int:
        """Return the bytes that `stored_bytes` take in a buffer."""
        return stored_bytes if self.packing is None else self.packing.packed_bytes(stored_bytes)

    def make(self, read: Tensor) -> Linear:
        """Make the linear from the bytes in a buffer, uint8 [read_bytes]."""
        if self.native is not None and self.packing is not None:
            panels = Panels(packed=read, form=self.packing.form, shape=self.stored)
            return PanelLinear([panels], self.bias, self.native)
        weight = read.view(torch_dtype(self.choice.stored_dtype)).view(self.stored)
        if self._is_plain:
            return PlainLinear(weight, self.bias, self.choice.min_rows)
        weight = weight.T if self.transposed else weight
        return make_linear(self.choice, [weight], self.biases, self.device)


@dataclass(eq=False, repr=False)
class StreamedLinear:
    """A linear layer whose weights are in a buffer of its `place` while its layer computes.

    They begin at the offset `begin` of the buffer; `make` makes the linear of them. With `is_ready`
    it uses the bytes in the buffer directly, and there is one for each buffer of a layer; else, and
    in experts, it is made anew after every read, and dropped with its layer or expert.
    """

    weights_stay = False

    place: Place
    begin: int
    size_bytes: int
    shape: tuple[int, int]
    """(N, K)."""
    make: Callable[[Tensor], Linear]
    _: KW_ONLY
    is_ready: bool
    is_native: bool
    """Whether the compiled library computes it."""

    def __post_init__(self) -> None:
        self._by_buffer: dict[int, Linear] = {}

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """None: they are read from disk for every pass."""
        return ()

    def fetch(self) -> None:
        """Begin to read them, if they are an expert's: its layer does not wait for those."""
        if isinstance(self.place.stream, PooledExpert):
            self.place.stream.fetch()

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul with the weights in the current buffer."""
        linear = self._current()
        assert is_native(linear), "self.is_native says so"
        return linear.native_matmul()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row: [T, K] to [T, N]."""
        return self._current()(rows)

    def _current(self) -> Linear:
        """Return the linear with the weights in the current buffer."""
        stream = self.place.stream
        buffer = stream.buffer_of(self.place.layer)
        made, key = stream.made, self.begin
        if self.is_ready and not isinstance(stream, PooledExpert):
            made, key = self._by_buffer, buffer
        if key not in made:
            made[key] = self.make(stream.weights(self.begin, self.size_bytes, buffer))
        return made[key]
