"""Digests of a stage's weights in memory: whether they are still what they were.

Knows which tensors hold weights, and looks at them a piece at a time. Must not know when, nor what
becomes of a stage whose weights have changed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from xxhash import xxh3_64_intdigest

from shardnet.errors import CHECK_MACHINE, ChangedMemoryError
from shardnet.model.kernels.codec import to_bytes

PIECE_BYTES: Final = 4 << 20
"""Looked at without a pause: about a millisecond."""


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Bytes `[begin, end)` of a tensor of the parameter `name`, and their digest once noted.

    The tensor is not kept in memory for this.
    """

    name: str
    tensor: weakref.ref[Tensor]
    begin: int
    end: int
    digest: int | None = None

    def bytes_now(self) -> memoryview | None:
        """View the bytes, None where the tensor is not in use any more."""
        tensor = self.tensor()
        return None if tensor is None else to_bytes(tensor)[self.begin : self.end]


class WeightDigests:
    """Looks at the weights of a stage in turns: the first notes their digests, others compare.

    Not thread-safe: the compute thread owns it, as it owns the stage.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._known: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        self._next = 0

    def add(self, name: str, *tensors: Tensor) -> None:
        """Look at tensors of a parameter too, which never change; of a GPU at none."""
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.element_size()
            place = (tensor.data_ptr(), size_bytes)
            known = self._known.get(place)
            is_known = known is not None and known() is not None
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or is_known:
                continue
            held = self._known[place] = weakref.ref(tensor)
            self._pieces += [
                _Piece(
                    name=name,
                    tensor=held,
                    begin=begin,
                    end=min(size_bytes, begin + PIECE_BYTES),
                )
                for begin in range(0, size_bytes, PIECE_BYTES)
            ]

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is looked at in one turn."""
        return sum(piece.end - piece.begin for piece in self._pieces)

    def look_at_all(self) -> None:
        """Look at every piece once. Raises as `look`."""
        for _ in self._pieces:
            self.look()

    def look(self) -> int:
        """Look at the next piece and return its bytes, 0 where there is none.

        Raises ChangedMemoryError, which names the parameter, if it is not what it was: twice, so
        that it is no slip of the look.
        """
        if not self._pieces:
            return 0
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % len(self._pieces)
        now = piece.bytes_now()
        if now is None:
            return 0
        digest = xxh3_64_intdigest(now)
        if piece.digest is None:
            piece.digest = digest
        elif piece.digest not in (digest, xxh3_64_intdigest(now)):
            raise ChangedMemoryError(
                f"bytes {piece.begin} to {piece.end} of {piece.name} have changed in its memory "
                "since they were loaded",
                remedy=CHECK_MACHINE,
            )
        return len(now)
