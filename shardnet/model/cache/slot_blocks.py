"""What a cache holds of one slot apart from it: keys, values and states, as bytes with digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from xxhash import xxh3_64

from shardnet.errors import CHECK_MACHINE, ChangedMemoryError
from shardnet.model.config.model_config import StateShape
from shardnet.model.kernels.codec import to_bytes
from shardnet.types import BLOCK_POSITIONS, settled_blocks

Replay = Callable[["SlotState", "SlotState", int], None]
"""Computes the first rows of a step again, so many, to the same bits: from the state before them to
the memory of another, which may be the same. The `end` of neither is read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    """What the recurrence of one layer was given for rows at positions `[begin, end)`."""

    begin: int
    end: int
    replay: Replay


@dataclass(slots=True, kw_only=True)
class SlotState:
    """The state of one layer after the first `end` positions of a slot. Written in place.

    `recent` holds the last inputs of a convolution, the oldest first, `recurrent` a matrix for each
    head, `features` the last inputs of the convolution of n-grams. All are zeros before the first
    position. The only ways back are to before it, and to among the rows that may be rejected: from
    one of at most two states `kept` before them, over the `inputs` of the rows behind it.
    """

    recent: Tensor  # [positions, columns], compute dtype
    recurrent: Tensor  # [heads, columns of a key, columns of a value], float32
    features: Tensor  # [positions, columns], compute dtype
    end: int = 0
    kept: list[SlotState] = field(default_factory=list)
    inputs: list[RowInputs] = field(default_factory=list)
    _spare: Tensor | None = None  # like `recurrent`

    @classmethod
    def empty(cls, shape: StateShape, dtype: torch.dtype, device: torch.device) -> SlotState:
        """Make the state before the first position."""
        return cls(
            recent=torch.zeros(shape.recent, dtype=dtype, device=device),
            recurrent=torch.zeros(shape.recurrent, dtype=torch.float32, device=device),
            features=torch.zeros(shape.features, dtype=dtype, device=device),
        )

    def last_features(self, n: int) -> Tensor:
        """Return the last rows of `features`, so many, to be read."""
        return self.features[len(self.features) - n :]

    @property
    def n_bytes(self) -> int:
        """Bytes of the state."""
        parts = (self.recent, self.recurrent, self.features)
        return sum(part.numel() * part.element_size() for part in parts)

    def read(self, target: Tensor) -> None:
        """Copy the state to `target`, uint8 [n_bytes]."""
        for piece, held in self._pieces(target):
            piece.copy_(held)

    def write(self, source: Tensor) -> None:
        """Set the state, but for `end`, to what `read` has copied."""
        for piece, held in self._pieces(source):
            held.copy_(piece)

    def _pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        # The larger part first: its elements are 4 bytes, and those of the other fewer.
        begin = 0
        for held in (self.recurrent, self.recent, self.features):
            end = begin + held.numel() * held.element_size()
            yield flat[begin:end].view(held.dtype).view(held.shape), held
            begin = end

    def to(self, device: torch.device) -> SlotState:
        """Return the state on `device`: itself where it is there."""
        if self.recent.device == device:
            return self
        return SlotState(
            recent=self.recent.to(device),
            recurrent=self.recurrent.to(device),
            features=self.features.to(device),
            end=self.end,
        )

    def keep_before(self, n_rows: int, n_drafts: int) -> SlotState:
        """Return the state to compute the next rows from; what follows is written to this one.

        The last `n_drafts` positions up to the last of these rows may be rejected: one state before
        all of them is kept, in the memory that this one had, so that nothing is copied. Where
        drafts go behind drafts a second one is, until all before it are known to be right. What is
        known may still be in flight: the slot may be kept up to before the last such row.
        """
        if not (n_drafts or self.kept):
            return self
        n_certain = self.end + n_rows - n_drafts
        if n_certain > self.end:
            self._keep_none()
        while len(self.kept) > 1 and self.kept[1].end < n_certain:
            self._spare = self.kept.pop(0)._memory
        if self.kept:
            self.inputs = [rows for rows in self.inputs if rows.end > self.kept[0].end]
        if n_drafts and len(self.kept) < 2 and self.at_end is self:
            self.kept.append(self._give())
        return self.at_end

    def count(self, n_rows: int, replay: Replay | None = None) -> None:
        """Note that so many rows were computed; behind a kept state `replay` does so again."""
        if replay is not None:
            end = self.end + n_rows
            self.inputs.append(RowInputs(begin=self.end, end=end, replay=replay))
        self.end += n_rows

    def replay_too(self, replay: Replay) -> None:
        """Let what computes the last rows again do this as well."""
        last = self.inputs[-1]

        def both(source: SlotState, target: SlotState, n_rows: int) -> None:
            last.replay(source, target, n_rows)
            replay(source, target, n_rows)

        self.inputs[-1] = replace(last, replay=both)

    @property
    def at_end(self) -> SlotState:
        """The state after `end` positions: the one kept there until rows behind it are computed."""
        return self.kept[-1] if self.kept and self.kept[-1].end == self.end else self

    def knows(self, n_positions: int) -> bool:
        """Say whether the state after `n_positions` is known, or can be computed again."""
        return n_positions == self.end or self._base(n_positions) is not None

    def at(self, n_positions: int) -> SlotState | None:
        """Return the state after `n_positions`, None if it is not known."""
        base = self.at_end if n_positions == self.end else self._base(n_positions)
        if base is None or base.end == n_positions:
            return base
        made = base.clone()
        self._replay(base, made, n_positions)
        return made

    def rewind(self, n_positions: int) -> None:
        """Become the state after `n_positions`, if it is known. What was behind them is wrong."""
        base = None if n_positions == self.end else self._base(n_positions)
        if base is not None:
            if base.end == n_positions:
                self._take(base)
                self.kept = [state for state in self.kept if state is not base]
            else:
                self._replay(base, self, n_positions)
            self._keep_none()

    def _base(self, n_positions: int) -> SlotState | None:
        """Return the last known state from which that after fewer positions follows."""
        known = [state for state in self.kept if state.end <= n_positions < self.end]
        return known[-1] if known else None

    @torch.inference_mode()
    def _replay(self, base: SlotState, target: SlotState, n_positions: int) -> None:
        source = base
        for rows in self.inputs:
            if base.end <= rows.begin < n_positions:
                rows.replay(source, target, min(n_positions, rows.end) - rows.begin)
                source = target
        target.end = n_positions

    def keep_no_drafts(self) -> None:
        """Forget what drafts could be rewound by, and give its memory back."""
        self._keep_none()
        self._spare = None

    def _keep_none(self) -> None:
        if self.kept and self.at_end is not self:  # rows behind it were never computed
            self._take(self.kept.pop())
        if self.kept:
            self._spare = self.kept[-1]._memory
        self.kept.clear()
        self.inputs.clear()

    def _give(self) -> SlotState:
        """Give the state's memory to another, and have memory to be written."""
        given = SlotState(
            recent=self.recent, recurrent=self.recurrent, features=self.features, end=self.end
        )
        spare, self._spare = self._spare, None
        self.recent = torch.empty_like(self.recent)
        self.features = torch.empty_like(self.features)
        self.recurrent = torch.empty_like(self.recurrent) if spare is None else spare
        return given

    @property
    def _memory(self) -> Tensor | None:
        """Memory for another state, when this one is not needed any more."""
        return self.recurrent

    def _take(self, other: SlotState) -> None:
        """Become what another state is, in its memory."""
        self._spare = self._memory
        self.recent, self.recurrent, self.end = other.recent, other.recurrent, other.end
        self.features = other.features

    def clone(self) -> SlotState:
        """Copy the state, without those before drafts, to memory of its own."""
        own = self.at_end
        return SlotState(
            recent=own.recent.clone(),
            recurrent=own.recurrent.clone(),
            features=own.features.clone(),
            end=own.end,
        )

    def reset(self) -> None:
        """Return to before the first position."""
        self.keep_no_drafts()
        if self.end:
            self.recent.zero_()
            self.recurrent.zero_()
            self.features.zero_()
            self.end = 0


def first_block(n_blocks: int, window: int | None) -> int:
    """Return the first block that the row behind `n_blocks` blocks attends to in a layer."""
    if window is None:
        return 0
    return max(0, n_blocks * BLOCK_POSITIONS - window + 1) // BLOCK_POSITIONS


@dataclass(slots=True, kw_only=True, eq=False)
class SharedBlock:
    """A block that `users` slots have in common: nobody writes to it.

    Keys and values by layer, [KV heads, 256, W] each; no rows where a window had dropped them.
    """

    keys: list[Tensor]
    values: list[Tensor]
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContents:
    """Stored keys and values of a slot, layer by layer: [KV heads, positions, W] each.

    The first row of layer `n` is position `firsts[n]`, a whole number of blocks. Layers that keep a
    state have it in `states`, and no rows. The first blocks may be `shared` with other slots: then
    tensors begin behind them, or where a window has dropped more.
    """

    keys: list[Tensor]
    values: list[Tensor]
    firsts: list[int]
    states: dict[int, SlotState] = field(default_factory=dict)
    shared: tuple[SharedBlock, ...] = ()

    def first(self, layer: int) -> int:
        """Return the first position from which on a layer has rows, shared ones included."""
        own = self.firsts[layer]
        if own > len(self.shared) * BLOCK_POSITIONS:
            return own
        n_held = len(self.shared)
        while n_held and self.shared[n_held - 1].keys[layer].shape[1]:
            n_held -= 1
        return n_held * BLOCK_POSITIONS if self.shared else own

    def parts(self, layer: int, *, values: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Return the tensors of a layer's keys or values, each with its first position."""
        for block, shared in enumerate(self.shared):
            yield block * BLOCK_POSITIONS, (shared.values if values else shared.keys)[layer]
        yield self.firsts[layer], (self.values if values else self.keys)[layer]

    def rows(self, layer: int, begin: int, end: int, *, values: bool = False) -> Tensor:
        """Return positions `[begin, end)` of a layer, not copied where they lie in one tensor."""
        found = [
            tensor[:, max(0, begin - first) : max(0, end - first)]
            for first, tensor in self.parts(layer, values=values)
        ]
        held = [rows for rows in found if rows.shape[1]]
        return torch.cat(held, 1) if len(held) > 1 else held[0] if held else found[-1]

    def end(self, layer: int) -> int:
        """Return the position behind the last row for which a layer has room."""
        return self.firsts[layer] + self.keys[layer].shape[1]

    def row_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes of one position in `layers`."""
        return sum(
            tensor.shape[0] * tensor.shape[2] * tensor.element_size()
            for layer in layers
            for tensor in (self.keys[layer], self.values[layer])
        )

    def block_bytes(self, layers: Sequence[int]) -> int:
        """Return the bytes of one block in `layers`."""
        return self.row_bytes(layers) * BLOCK_POSITIONS

    def read_rows(self, layers: Sequence[int], begin: int, end: int, target: Tensor) -> None:
        """Copy positions `[begin, end)` in `layers` to `target`, uint8.

        Layer by layer, keys before values, head by head.
        """
        for piece, held in self._pieces(layers, begin, end, target):
            piece.copy_(held)

    def write_rows(self, layers: Sequence[int], begin: int, end: int, source: Tensor) -> None:
        """Set positions `[begin, end)` in `layers` to what `read_rows` has copied."""
        for piece, held in self._pieces(layers, begin, end, source):
            held.copy_(piece)

    def read_block(self, layers: Sequence[int], block: int, target: Tensor) -> None:
        """Copy a block in `layers` to `target`, uint8 [block_bytes]."""
        self.read_rows(layers, block * BLOCK_POSITIONS, (block + 1) * BLOCK_POSITIONS, target)

    def write_block(self, layers: Sequence[int], block: int, source: Tensor) -> None:
        """Set a block in `layers` to what `read_block` has copied."""
        self.write_rows(layers, block * BLOCK_POSITIONS, (block + 1) * BLOCK_POSITIONS, source)

    def _pieces(
        self, layers: Sequence[int], begin: int, end: int, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the parts of `flat` with the rows that they hold: [KV heads, rows, W] each."""
        offset = 0
        for layer in layers:
            for values, tensor in enumerate((self.keys[layer], self.values[layer])):
                if not tensor.shape[2]:
                    continue
                shape = (tensor.shape[0], end - begin, tensor.shape[2])
                n_bytes = math.prod(shape) * tensor.element_size()
                piece = flat[offset : offset + n_bytes].view(tensor.dtype).view(shape)
                offset += n_bytes
                for first, held in self.parts(layer, values=bool(values)):
                    low, high = max(begin, first), min(end, first + held.shape[1])
                    if low < high:
                        rows = held[:, low - first : high - first]
                        yield piece[:, low - begin : high - begin], rows


class BlockDigests:
    """Digests of the blocks of one slot, which holds its first `end` positions."""

    def __init__(self, end: int = 0) -> None:
        self.end = end
        self._digests: dict[tuple[int, int], int] = {}  # by block and layer
        self._n_blocks = 0  # no digest is of a block behind these

    def cut(self, n_positions: int) -> BlockDigests:
        """Return those of a copy of the first `n_positions`."""
        copied = BlockDigests(self.end)
        copied._digests, copied._n_blocks = dict(self._digests), self._n_blocks
        copied.writes(n_positions, n_positions)
        return copied

    def writes(self, begin: int, end: int) -> None:
        """Note that positions `[begin, end)` are written next, and are the slot's last."""
        self.end = end
        n_whole = settled_blocks(begin)
        if n_whole < self._n_blocks:
            self._digests = {key: had for key, had in self._digests.items() if key[0] < n_whole}
            self._n_blocks = n_whole

    def look(self, layer: int, block: int, *rows: Tensor) -> int:
        """Note the digest of a block in a layer, or compare it with the one that was noted.

        `rows` are its keys and values, [KV heads, 256, W] each. Returns their bytes. Raises
        ChangedMemoryError if they are not what they were: twice, so that it is no slip of the look.
        """
        digest = _digest(rows)
        known = self._digests.setdefault((block, layer), digest)
        self._n_blocks = max(self._n_blocks, block + 1)
        if known != digest and known != _digest(rows):
            begin = block * BLOCK_POSITIONS
            raise ChangedMemoryError(
                f"keys or values of positions {begin} to {begin + BLOCK_POSITIONS} of a sequence "
                f"have changed in its memory since they were computed, in layer {layer} of its "
                "stage",
                remedy=CHECK_MACHINE,
            )
        return sum(tensor.nbytes for tensor in rows)


def _digest(rows: tuple[Tensor, ...]) -> int:
    digest = xxh3_64()
    for tensor in rows:
        for head in tensor if tensor.numel() else ():  # a block of one head is contiguous
            digest.update(to_bytes(head))
    return digest.intdigest()
