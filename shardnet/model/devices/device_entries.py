"""Attention over a window and entries of several positions on a device, by the kernel text.

Knows which of it the text computes, and the order of launches. Groups of heads are multiplied by
id, as experts are. Must not know the layer around it.

Axes in shape comments: T rows, H heads, D columns of a key, which is a value too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from shardnet.model.config.model_config import RopeKind
from shardnet.model.devices.device_attention import Attend, Seen
from shardnet.model.devices.device_choice import CHOICE_NAMES, CHOICE_PARTS, choose
from shardnet.model.devices.device_experts import shape_of
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.device_recurrence import KeptRows
from shardnet.model.devices.device_states import Cell
from shardnet.model.devices.mixer_device import LINE, MixerDevice, StepBuffers
from shardnet.model.drivers.driver import THREADS, Buffer, launch
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.mixers.compressed_attention import CompressedAttention, Compressor

ENTRY_PARTS: Final = ("vectors", "entries")
"""Of the text."""
ENTRY_NAMES: Final = ("make_entries", "slide_rows")
_PAIRS, _BACK = 1, 2
"""As the text numbers what `rotate_heads` turns."""
_MOST_GROUPS: Final = 64
"""Groups of threads that copy a state."""


def why_no_entries(own: CompressedAttention, is_computed: Callable[[Linear], bool]) -> str:
    """Say what the text does not compute of it, "" for nothing."""
    config, makers = own.config, own.makers
    if own.kind.window is not None or config.head_size % 2 or config.rope_size % 2:
        return "this attention"
    if not all(map(is_computed, _linears(own))):
        return "linears whose weights do not stay packed in memory"
    groups = [group for group in own.groups if isinstance(group, PanelLinear)]
    if len(groups) < len(own.groups) or len(set(map(shape_of, groups))) > 1:
        return "groups of unlike forms"
    if any(maker.rope.kind in (RopeKind.DYNAMIC, RopeKind.LONGROPE) for maker in makers):
        return "entries whose positions depend on the context"
    widest = max([config.head_size, *(maker.norm.weight.shape[0] for maker in makers)])
    if widest > MAX_HEAD:
        return f"heads of {widest} columns"
    return f"queries of {config.query_rank} columns" if config.query_rank > LINE else ""


def _linears(own: CompressedAttention) -> list[Linear]:
    made = [own.q_a_proj, own.kv_proj, own.q_b_proj, *own.groups, own.o_b_proj]
    made += [maker.project for maker in own.makers]
    return made if own.indexer is None else [*made, own.indexer.q_b_proj, own.indexer.weights_proj]


class DeviceEntries:
    """The attention of one layer, of which `why_no_entries` says nothing."""

    def __init__(self, own: CompressedAttention, on: MixerDevice) -> None:
        """Upload it. Raises CapacityError."""
        assert own.q_b_norm is not None
        self._on, config = on, own.config
        self._config, self._index = config, None if own.indexer is None else config.indexer
        self.rate, size = config.rates[own.layer], config.head_size
        n_queries = own.q_b_proj.shape[0]
        self._n_heads, self.n_groups = n_queries // size, config.n_groups
        self._n_columns = n_queries + size  # of queries and a key
        self._first, self._output = on.make(own.q_a_proj), on.make(own.o_b_proj)
        self._second = on.make(own.q_b_proj, n_columns=self._n_columns)
        self._key = on.make(own.kv_proj, n_columns=self._n_columns, begin=n_queries)
        groups = [group for group in own.groups if isinstance(group, PanelLinear)]
        makers = [maker for maker in own.makers if isinstance(maker, Compressor)]
        self._groups = on.make_by_id(*groups)
        self._n_pending, self._n_waiting = config.pending(own.layer)
        ends = [*itertools.accumulate([maker.project.shape[0] for maker in makers], initial=0)]
        self._makers = [
            on.make(maker.project, n_columns=self._n_waiting, begin=begin)
            for maker, begin in zip(makers, ends, strict=False)
        ]
        self._kernels = on.kernels.of({}, ENTRY_PARTS, ENTRY_NAMES)
        ones = torch.ones(n_queries)
        self._norms = [
            (on.put(weight.float().numpy()), np.float32(norm.eps))
            for norm, weight in (
                (own.q_a_norm, own.q_a_norm.weight),
                (own.q_b_norm, torch.cat((ones, own.kv_norm.weight.float()))),
            )
        ]
        self._kept = KeptRows(on, [size, self._n_waiting] if makers else [size])
        self.row_bytes = 4 * self._kept.width
        window, n_state = config.window, config.state(own.layer).n_inputs
        self._cell = window * size, n_state
        stride = self.rate * config.row_size(own.layer)
        seen = Seen(window=window, rate=self.rate, stride=stride, cell_size=n_state)
        if makers:
            parts = [part for maker in makers for part in (maker.bias, maker.norm.weight)]
            self._numbers = on.put(torch.cat([part.float().flatten() for part in parts]).numpy())
            self._sizes = (size, self._index.head_size if self._index else 0)
            self._eps = np.float32(makers[0].norm.eps)
        if own.indexer is not None and self._index is not None:
            self._index_queries = on.make(own.indexer.q_b_proj)
            self._index_weights = on.make(own.indexer.weights_proj)
            seen, size_of = replace(seen, n_chosen=self._index.n_chosen), self._index.head_size
            self._choice = on.kernels.of({"SIZE": size_of}, CHOICE_PARTS, CHOICE_NAMES)
        self._stride, heads = seen.stride, (self._n_heads, 1)
        self._attend = Attend(on, own.kind, heads, (size,) * 3, self._n_columns, seen=seen)

    def __call__(self, rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it in layer `index` within the stage: `inner`."""
        on, of, n_rows, size = self._on, self._on.scratch.of, step.n_rows, self._config.head_size
        (entries, _), states = on.pages_of(index), on.states_of(index)
        low_rank = of("queries", 4 * n_rows * self._first.shape[0])
        heads = of("heads", 4 * n_rows * self._n_columns)
        waiting = of("waiting", 4 * n_rows * max(1, self._n_waiting))
        self._first(rows, n_rows, low_rank)
        behind = self._first
        for product, made in [(self._key, heads), *((each, waiting) for each in self._makers)]:
            product(rows, n_rows, made, behind=behind)
            behind = product
        self._turn(low_rank, 1, self._first.shape[0], index, step, norm=self._norms[0], n_turned=0)
        self._second(low_rank, n_rows, heads)
        if self._makers:
            self._make(waiting, states, entries, index, step)
        if self._index is not None and step.chooses:
            self._choose(rows, low_rank, entries, index, step)
        self._turn(heads, self._n_heads + 1, size, index, step, norm=self._norms[1])
        attended = self._attend(heads, (entries, states), step)
        self._turn(attended, self._n_heads, size, index, step, how=_BACK)
        joined = of("low ranks of groups", 4 * n_rows * self._output.shape[1])
        self._groups(attended, n_rows * self.n_groups, joined, visits=step.heads)
        self._output(joined, n_rows, inner)
        n_queries = self._n_heads * size
        strides = self._n_columns, n_queries, self._n_waiting, 0
        self._slide([heads, waiting, step.runs, states], n_rows, strides)
        if step.kept is not None:
            keys, sizes = of("keys", 4 * n_rows * size), (self._n_columns, n_queries, size)
            on.launch("take_columns", (-(-size // THREADS), n_rows), [heads, keys], *sizes)
            self._kept.keep([keys, waiting][: 1 + bool(self._makers)], index, step)

    def _turn(
        self,
        heads: Buffer,
        n_heads: int,
        size: int,
        index: int,
        step: StepBuffers,
        *,
        norm: tuple[Buffer, np.float32] | None = None,
        n_turned: int | None = None,
        how: int = _PAIRS,
    ) -> None:
        """Norm heads [T, heads, size], if there is a norm, and turn their last columns."""
        cosines, sines, n_rotated = step.tables[index]
        n_rotated = n_rotated if n_turned is None else n_turned
        weight, eps = norm or (heads, np.float32(0))
        self._on.launch(
            "rotate_heads",
            (step.n_rows, n_heads),
            [heads, weight, cosines, sines, *step.at, heads, heads],
            *(
                n_heads,
                0,
                size,
                0,
                size - n_rotated,
                n_rotated,
                PAGE,
                int(norm is not None),
                how,
                0,
            ),
            eps,
        )

    def _make(
        self, waiting: Buffer, states: Buffer, entries: Buffer, index: int, step: StepBuffers
    ) -> None:
        """Make the entries that rows are the last of."""
        given = [waiting, states, step.runs, self._numbers, *step.of_entries[self.rate]]
        launch(
            self._on.driver,
            self._kernels["make_entries"],
            (step.n_rows, len(self._makers)),
            [*given, *step.at, entries],
            *(self.rate, int(self._n_pending > self.rate), *self._sizes, step.tables[index][2]),
            *(self._stride, PAGE, self._n_waiting, *self._cell, self._eps),
        )

    def _choose(
        self, rows: Buffer, low_rank: Buffer, entries: Buffer, index: int, step: StepBuffers
    ) -> None:
        """Choose among the entries that rows see."""
        on, of, n_rows, config = self._on, self._on.scratch.of, step.n_rows, self._index
        assert config is not None
        queries = of("queries of index", 4 * n_rows * config.n_heads * config.head_size)
        weights = of("weights of index", 4 * n_rows * config.n_heads)
        self._index_queries(low_rank, n_rows, queries, behind=self._second)
        self._index_weights(rows, n_rows, weights)
        self._turn(queries, config.n_heads, config.head_size, index, step)
        given = [queries, weights, *step.at, entries]
        keys = self.rate, self._stride, self._config.head_size
        choose(on, self._choice, config, given, step, keys)

    def _slide(self, buffers: Sequence[Buffer], n_rows: int, strides: tuple[int, ...]) -> None:
        """Write the states behind rows: keys, what waits, `runs` and states."""
        config, (_, n_state) = self._config, self._cell
        n_groups = min(_MOST_GROUPS, -(-n_state // THREADS))
        launch(
            self._on.driver,
            self._kernels["slide_rows"],
            (n_groups, n_rows),
            buffers,
            *(*strides, config.head_size, config.window, self._n_waiting, self._n_pending),
            *(n_state, n_groups),
        )

    def replay(
        self, index: int, inputs: Sequence[Cell], n_rows: int, before: int, after: int
    ) -> None:
        """See StateLayer."""
        rows, runs = self._kept.bring(index, inputs, n_rows, (before, after))
        width, size = self._kept.width, self._config.head_size
        buffers = [rows, rows, runs, self._on.states_of(index)]
        self._slide(buffers, n_rows, (width, 0, width, size))
