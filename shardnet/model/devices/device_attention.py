"""Attention of rows over the pages of their slots on a device, by the kernel text.

Knows how blocks of positions are spread over groups of threads. Must not know the layer around it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.driver import Buffer, Driver, Kernels, launch
from shardnet.model.devices.products import Rows
from shardnet.model.layers.modules import SelfAttention

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


class DeviceAttention:
    """The attention of one layer, between rotated heads and the output's product."""

    def __init__(
        self,
        kernels: Kernels,
        driver: Driver,
        scratch: Rows,
        own: SelfAttention,
        sinks: Buffer | None,
    ) -> None:
        macros = attention_macros(own.n_heads // own.n_kv_heads, own.head_size)
        self._kernels = kernels.of(macros, ATTENTION_PARTS, ATTENTION_NAMES)
        self._driver, self._scratch, self._own, self._sinks = driver, scratch, own, sinks
        self._heads_of_group = macros["HEADS"]

    def __call__(
        self,
        heads: Buffer,
        at: tuple[Buffer, Buffer],
        pages: tuple[Buffer, Buffer],
        n_rows: int,
        n_blocks: int,
    ) -> Buffer:
        """Attend with the queries in `heads` [T, heads and KV heads twice, size]: [T, heads, size].

        `at` is what `DeviceKvCache.bring` returns; no row has more than `n_blocks` blocks.
        """
        own, kind, of = self._own, self._own.kind, self._scratch.of
        size, n_heads = own.head_size, own.n_heads
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
        of_kind = kind.window or 0, int(self._sinks is not None)
        row_stride = (n_heads + 2 * own.n_kv_heads) * size
        launch(
            self._driver,
            self._kernels["attend"],
            (n_groups * n_splits, n_rows),
            [heads, *at, *pages, sinks, attended, blocks],
            *(n_heads, own.n_kv_heads, row_stride, PAGE, *of_kind, n_splits, n_blocks),
            factor,
            np.float32(kind.soft_cap or 0),
        )
        if n_splits > 1:
            launch(
                self._driver,
                self._kernels["join_blocks"],
                (n_heads, n_rows),
                [at[0], sinks, blocks, attended],
                *(n_heads, *of_kind, n_blocks),
            )
        return attended
