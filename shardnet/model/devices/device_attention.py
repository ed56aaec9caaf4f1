"""Attention of rows over the pages of their slots on a device, by the kernel text.

Knows which attention the text computes, and how blocks of positions are spread over groups of
threads. Must not know the layer around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from shardnet.model.devices.device_kv import PAGE, StepBuffers
from shardnet.model.devices.driver import Array, Buffer, Driver, Kernel, Kernels, launch
from shardnet.model.devices.products import DeviceProduct, Rows
from shardnet.model.layers.mixed_attention import GatedAttention
from shardnet.model.layers.modules import Attention, SelfAttention

ATTENTION_PARTS: Final = ("vectors", "attention")
"""Of the text."""
ATTENTION_NAMES: Final = ("attend", "join_blocks")
_KEYS: Final = 128
"""Positions of a block."""
_BESIDE_COLUMNS: Final = 17
"""What is written down of a block beside the sums of its values."""
_ENOUGH_GROUPS: Final = 256
"""So many groups of threads keep a device busy: with fewer, a row's blocks are spread."""


def attention_macros(n_queries: int, size: int) -> dict[str, int]:
    """Return what the text must know: by query heads of a KV head, and their columns.

    A group of threads computes as many of them as it has memory for: they read keys together.
    """
    most = 8 if size <= 256 else 4
    n_heads = next(n for n in (8, 6, 4, 2, 1) if n <= most and n_queries % n == 0)
    return {"HEADS": n_heads, "SIZE": size}


def blocks_within(position: int) -> int:
    """Return a power of two, at least the blocks of a row at a position: it changes seldom."""
    return int(1 << (position // _KEYS).bit_length())


def why_no_attention(own: Attention) -> str:
    """Say what the text does not compute of an attention but for its linears, "" for nothing."""
    if isinstance(own, GatedAttention):
        return "" if own.qk_norm.per_head else "a norm over all heads"
    if not isinstance(own, SelfAttention) or own.is_joined:
        return "this attention"
    if own.norms_rotated or own.norms_values or own.is_value_key:
        return "this attention"
    if own.has_pairs and own.qk_norm is not None:  # a norm adds columns in their own order
        return "this attention"
    if own.qk_norm is not None and own.qk_norm.per_head is None:
        return "a norm over all heads"
    return ""


class DeviceAttention:
    """The attention of one layer, of which `why_no_attention` says nothing.

    `projection` gives queries, with their gates in a GatedAttention, keys and values.
    """

    def __init__(
        self,
        kernels: Kernels,
        driver: Driver,
        scratch: Rows,
        own: SelfAttention | GatedAttention,
        linears: tuple[DeviceProduct, DeviceProduct],
        put: Callable[[Array], Buffer],
        rotate: Kernel,
        pages_of: Callable[[int], tuple[Buffer, Buffer]],
    ) -> None:
        """Upload what it has besides its `linears`. Raises CapacityError."""
        macros = attention_macros(own.n_heads // own.n_kv_heads, own.head_size)
        self._kernels = kernels.of(macros, ATTENTION_PARTS, ATTENTION_NAMES)
        self._driver, self._scratch, self._own = driver, scratch, own
        self._qkv, self._output = linears
        self._rotate, self._pages_of = rotate, pages_of
        self._heads_of_group = macros["HEADS"]
        self._has_gates = isinstance(own, GatedAttention)
        self._has_pairs = isinstance(own, SelfAttention) and own.has_pairs
        sinks, norm = own.kind.sinks, None if own.qk_norm is None else own.qk_norm.per_head
        self._sinks = None if sinks is None else put(sinks.float().numpy())
        self._norm = None if norm is None else put(norm.weight.float().numpy())
        self._eps = np.float32(0.0 if norm is None else norm.eps)

    def __call__(self, rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it in layer `index` within the stage: `inner`."""
        own, n_rows = self._own, step.n_rows
        n_heads, n_kv_heads, size = own.n_heads, own.n_kv_heads, own.head_size
        heads = self._scratch.of("heads", 4 * n_rows * self._qkv.shape[0])
        cosines, sines, n_rotated = step.tables[index]
        pages = self._pages_of(index)
        self._qkv(rows, n_rows, heads)
        launch(
            self._driver,
            self._rotate,
            (n_rows, n_heads + 2 * n_kv_heads),
            [heads, heads if self._norm is None else self._norm, cosines, sines, *step.at, *pages],
            *(n_heads, n_kv_heads, size, n_rotated, PAGE),
            *(int(self._norm is not None), int(self._has_pairs), int(self._has_gates)),
            self._eps,
        )
        self._output(self._attend(heads, pages, step), n_rows, inner)

    def _attend(self, heads: Buffer, pages: tuple[Buffer, Buffer], step: StepBuffers) -> Buffer:
        """Attend with the queries in `heads`: [T, heads, size]."""
        own, kind, of, n_rows = self._own, self._own.kind, self._scratch.of, step.n_rows
        size, n_heads, n_blocks = own.head_size, own.n_heads, step.n_blocks
        attended = of("attended", 4 * n_rows * n_heads * size)
        n_groups = n_heads // self._heads_of_group
        n_splits = max(1, min(n_blocks, _ENOUGH_GROUPS // (n_rows * n_groups)))
        blocks = heads
        if n_splits > 1:
            blocks = of("blocks", 4 * n_rows * n_heads * n_blocks * (size + _BESIDE_COLUMNS))
        factor = np.float32(size**-0.5 if kind.scale is None else kind.scale)
        if kind.soft_cap:
            factor = np.float32(factor / np.float32(kind.soft_cap))
        sinks = heads if self._sinks is None else self._sinks
        of_kind = kind.window or 0, int(self._sinks is not None), int(self._has_gates)
        row_stride = self._qkv.shape[0]
        launch(
            self._driver,
            self._kernels["attend"],
            (n_groups * n_splits, n_rows),
            [heads, *step.at, *pages, sinks, attended, blocks],
            *(n_heads, own.n_kv_heads, row_stride, PAGE, *of_kind, n_splits, n_blocks),
            factor,
            np.float32(kind.soft_cap or 0),
        )
        if n_splits > 1:
            launch(
                self._driver,
                self._kernels["join_blocks"],
                (n_heads, n_rows),
                [heads, step.at[0], sinks, blocks, attended],
                *(n_heads, row_stride, *of_kind, n_blocks),
            )
        return attended
