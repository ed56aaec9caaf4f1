"""Attention of rows over the pages of their slots on a device, by the kernel text.

Knows which attention the text computes, and how blocks of positions are spread over groups of
threads. Must not know the layer around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import MixerDevice, StepBuffers
from shardnet.model.drivers.driver import Buffer, launch
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.modules import Attention, SelfAttention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.mixers.mixed_attention import GatedAttention

ATTENTION_PARTS: Final = ("vectors", "attention")
"""Of the text."""
ATTENTION_NAMES: Final = ("attend", "join_blocks")
KEYS: Final = 128
"""Positions of a block."""
_BESIDE_COLUMNS: Final = 17
"""What is written down of a block beside the sums of its values."""
_KEY_COLUMNS: Final = 33
"""Of keys that a group has in its memory at a time, with one that is not used."""
_GROUP_BYTES: Final = 48 << 10
"""Memory of a group of threads, on NVIDIA's and AMD's GPUs at least."""
_OTHER_GROUP_BYTES: Final = {"metal": 32 << 10, "opencl": 32 << 10}
"""By a driver's dialect."""
_TOGETHER: Final = 8
"""Rows of a prompt that a group of threads computes, at most: they read keys and values once."""
_ENOUGH_GROUPS: Final = 256
"""So many groups of threads keep a device busy: with fewer, a row's blocks are spread."""
_MOST_BLOCK_BYTES: Final = 256 << 20
"""What blocks that are written down may take: beyond that a group computes all of a row."""


def attention_macros(
    n_queries: int,
    size: int,
    n_columns: int,
    most_rows: int = 1,
    n_bytes: int = _GROUP_BYTES,
    stride: int = 0,
) -> dict[str, int]:
    """Return what the text must know: by query heads of a KV head, their columns, and values'.

    Values are `stride` columns apart, as many as keys have if that is 0.

    A group of threads computes as many of them as its memory of `n_bytes` holds, and of up to
    `most_rows` rows, a power of two: they read keys together. Of 0 rows it is one whose positions
    are chosen, or which has entries: then `CHOSEN` is to be ENTRIES.
    """
    of_query = 4 * (size + n_columns + KEYS + 2 * _BESIDE_COLUMNS)
    most = min(16, (n_bytes - 4 * KEYS * (_KEY_COLUMNS + 2 * (most_rows == 0))) // of_query)
    most = most // 4 * 4 or most  # numbers of queries lie four by four
    n_heads = next(n for n in (8, 6, 4, 2, 1) if n <= most and n_queries % n == 0)
    n_rows = 1 << min(most_rows or 1, most // n_heads).bit_length() - 1
    macros = {"HEADS": n_heads, "TOGETHER": n_rows, "SIZE": size, "OF_VALUE": n_columns}
    return macros | {"STRIDE": stride or size, "CHOSEN": int(most_rows == 0)}


def blocks_within(position: int) -> int:
    """Return a power of two, at least the blocks of a row at a position: it changes seldom."""
    return int(1 << (position // KEYS).bit_length())


def why_no_attention(own: Attention) -> str:
    """Say what the text does not compute of an attention but for its linears, "" for nothing."""
    if isinstance(own, GatedAttention):
        if own.gates_behind:
            return "gates behind values"
        return "" if own.qk_norm.per_head else "a norm over all heads"
    if not isinstance(own, SelfAttention) or own.is_joined:
        return "this attention"
    if own.norms_rotated or own.norms_values or own.is_value_key:
        return "this attention"
    if own.kind.are_chunks and (own.kind.window or 1).bit_count() > 1:
        return f"chunks of {own.kind.window} positions, which is no power of two"
    if own.value_size is not None:
        return "values of another width than keys"
    if own.has_pairs and own.qk_norm is not None:  # a norm adds columns in their own order
        return "this attention"
    if own.qk_norm is not None and own.qk_norm.per_head is None:
        return "a norm over all heads"
    return ""


ENTRIES: Final = 2
"""Of the text: what CHOSEN is for rows that see a window and entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What rows see in place of all positions before: up to `n_chosen` of them, 0 for all.

    With a `window` its rows instead, and entries of `rate` positions, 0 for none: those chosen. An
    entry's place has `stride` columns, and a state that begins with a window has `cell_size`.
    """

    n_chosen: int = 0
    window: int = 0
    rate: int = 0
    stride: int = 0
    cell_size: int = 0

    def n_blocks(self, n_positions: int, n_chosen: int) -> int:
        """Return a power of two, at least the blocks of what a row sees of so many positions."""
        n = n_positions if not self.window else n_positions // self.rate if self.rate else 0
        return blocks_within(self.window + min(n, n_chosen or n) - 1)


class Attend:
    """Attention of one kind: queries over the pages of their slots.

    Of `sizes` the first are the columns of keys, the second those of values, which are the first of
    so many as the third says. `row_stride` is from row to row of queries, which may grow with their
    position.
    """

    def __init__(
        self,
        on: MixerDevice,
        kind: AttentionKind,
        n_heads: tuple[int, int],
        sizes: tuple[int, int, int],
        row_stride: int,
        *,
        has_gates: bool = False,
        grows: bool = False,
        seen: Seen = Seen(),
    ) -> None:
        """Compile it for query and KV heads. Raises CapacityError."""
        n_bytes = _OTHER_GROUP_BYTES.get(on.driver.dialect, _GROUP_BYTES)
        size, n_columns, stride = sizes
        of_rows = [
            attention_macros(n_heads[0] // n_heads[1], size, n_columns, n_rows, n_bytes, stride)
            for n_rows in ((1, _TOGETHER, 0) if seen.n_chosen else (1, _TOGETHER))
        ]
        if seen.window:
            only = attention_macros(n_heads[0], size, n_columns, 0, n_bytes) | {"CHOSEN": ENTRIES}
            of_rows = [only] * 3
        self._few, self._many, *self._chosen = (
            (each["TOGETHER"], each["HEADS"], on.kernels.of(each, ATTENTION_PARTS, ATTENTION_NAMES))
            for each in of_rows
        )
        self._seen, self._driver, self._scratch = seen, on.driver, on.scratch
        self._n_heads = n_heads
        self._n_columns, self._row_stride = n_columns, row_stride
        factor = np.float32(size**-0.5 if kind.scale is None else kind.scale)
        self._soft_cap = np.float32(kind.soft_cap or 0)
        self._factor = np.float32(factor / self._soft_cap) if kind.soft_cap else factor
        self._sinks = None if kind.sinks is None else on.put(kind.sinks.float().numpy())
        self._grows = int(grows)
        self._of_kind = seen.window or kind.reach, int(kind.sinks is not None), int(has_gates)

    def __call__(self, heads: Buffer, pages: tuple[Buffer, Buffer], step: StepBuffers) -> Buffer:
        """Attend with the queries in `heads`: [T, heads, columns of a value].

        With entries these are in the first of `pages`, the states of slots in the other, and the
        rows' own keys behind their queries.
        """
        of, columns, (n_heads, n_kv_heads) = self._scratch.of, self._n_columns, self._n_heads
        n_rows, n_blocks, (places, numbers) = step.n_rows, step.n_blocks, step.at
        attended = of("attended", 4 * n_rows * n_heads * columns)
        together, n_together, kernels = self._few
        if n_rows * (n_heads // n_together) > _ENOUGH_GROUPS:
            together, n_together, kernels = self._many
        chosen, seen = heads, self._seen
        n_chosen = seen.n_chosen if step.chooses else 0
        if n_chosen or seen.window:
            [(together, n_together, kernels)] = self._chosen
            n_blocks = seen.n_blocks(n_blocks * KEYS, n_chosen)
        if n_chosen:
            places, chosen = places if seen.window else of("looked", 0), of("chosen", 0)
        n_groups = n_heads // n_together
        n_bytes = 4 * n_rows * n_heads * n_blocks * (columns + _BESIDE_COLUMNS)
        n_tiles = -(-n_rows // together)
        n_splits = max(1, min(n_blocks, _ENOUGH_GROUPS // (n_tiles * n_groups)))
        if n_bytes > _MOST_BLOCK_BYTES:
            n_splits = 1
        blocks = heads if n_splits == 1 else of("blocks", n_bytes)
        sinks = heads if self._sinks is None else self._sinks
        launch(
            self._driver,
            kernels["attend"],
            (n_groups * n_splits, n_tiles),
            [heads, places, numbers, *pages, sinks, attended, blocks, chosen, step.runs],
            *(n_rows, n_heads, n_kv_heads, self._row_stride, PAGE, *self._of_kind),
            *(n_splits, n_blocks, self._grows, n_chosen, seen.rate, seen.stride),
            *(seen.cell_size, self._factor, self._soft_cap),
        )
        if n_splits > 1:
            launch(
                self._driver,
                kernels["join_blocks"],
                (n_heads, n_rows),
                [heads, places, sinks, blocks, attended],
                *(n_heads, self._row_stride, *self._of_kind, n_blocks, n_chosen, seen.rate),
            )
        return attended


class DeviceAttention:
    """The attention of one layer, of which `why_no_attention` says nothing.

    `projection` gives queries, with their gates in a GatedAttention, keys and values. Queries may
    grow with their position. Of an attention with an indexer `choose` is what does its part.
    """

    def __init__(
        self,
        own: SelfAttention | GatedAttention,
        on: MixerDevice,
        projection: Linear,
        *,
        grows: bool = False,
        choose: Callable[[Buffer, int, StepBuffers], None] | None = None,
    ) -> None:
        """Upload it. Raises CapacityError."""
        self._own, self._on, self._choose = own, on, choose
        self._qkv, self._output = on.make(projection), on.make(own.o_proj)
        self._has_gates = isinstance(own, GatedAttention)
        self._has_pairs = isinstance(own, SelfAttention) and own.has_pairs
        norm = None if own.qk_norm is None else own.qk_norm.per_head
        self._norm = None if norm is None else on.put(norm.weight.float().numpy())
        self._eps = np.float32(0.0 if norm is None else norm.eps)
        heads, size = (own.n_heads, own.n_kv_heads), own.head_size
        row_stride, self._stride, n_chosen = self._qkv.shape[0], size, 0
        if isinstance(own, GatedAttention) and own.indexer is not None:
            self._stride += own.indexer.config.beside_values(own.n_kv_heads)
            n_chosen = own.indexer.config.n_attended
        self._attend = Attend(
            on,
            own.kind,
            heads,
            (size, size, self._stride),
            row_stride,
            has_gates=self._has_gates,
            grows=grows,
            seen=Seen(n_chosen=n_chosen),
        )

    def __call__(self, rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it in layer `index` within the stage: `inner`."""
        own, on, n_rows = self._own, self._on, step.n_rows
        n_heads, n_kv_heads, size = own.n_heads, own.n_kv_heads, own.head_size
        heads = on.scratch.of("heads", 4 * n_rows * self._qkv.shape[0])
        cosines, sines, n_rotated = step.tables[index]
        pages = on.pages_of(index)
        self._qkv(rows, n_rows, heads)
        on.launch(
            "rotate_heads",
            (n_rows, n_heads + 2 * n_kv_heads),
            [heads, heads if self._norm is None else self._norm, cosines, sines, *step.at, *pages],
            *(n_heads, n_kv_heads, size, self._stride, 0, n_rotated, PAGE),
            *(int(self._norm is not None), int(self._has_pairs), int(self._has_gates)),
            self._eps,
        )
        if self._choose is not None:
            self._choose(rows, index, step)
        self._output(self._attend(heads, pages, step), n_rows, inner)
