"""Which positions rows attend to on a device, where an indexer chooses them, by the kernel text.

Knows which indexers the text computes, and the order of launches. Must not know the attention that
looks there.

Axes in shape comments: T rows, E hidden size, I heads of an index, D columns of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from shardnet.model.config.model_config import N_DIGITS, Indexer
from shardnet.model.devices.device_attention import KEYS
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import MixerDevice, StepBuffers
from shardnet.model.drivers.driver import THREADS, Array, Buffer, Kernel, launch
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.rotary import Rotary
from shardnet.model.mixers.position_indexer import BlockIndexer, PositionIndexer, to_digits

CHOICE_PARTS: Final = ("vectors", "choice")
"""Of the text."""
CHOICE_NAMES: Final = (
    *("index_heads", "pool_entries", "index_blocks"),
    *("score_entries", "choose_entries"),
)
_MOST_SCORE_BYTES: Final = 64 << 20
"""Rows whose scores take more choose one part after the other."""


def why_no_choice(own: PositionIndexer | BlockIndexer | None) -> str:
    """Say what the text does not compute of an indexer but for its linears, "" for nothing."""
    if own is None:
        return ""
    if PAGE % own.config.n_pooled:
        return f"entries of {own.config.n_pooled} positions"
    if isinstance(own, BlockIndexer):
        return "" if own.k_norm.bias is None else "this norm"
    return "this norm" if own.projections and own.projections.k_norm.bias is None else ""


def linears_of_index(own: PositionIndexer | BlockIndexer | None) -> list[Linear]:
    """Return the linears of an indexer."""
    if isinstance(own, BlockIndexer):
        return [own.qk_proj]
    if own is None or own.projections is None:
        return []
    made, pool = own.projections, own.projections.pool
    return [made.wq_b, made.wk, made.weights_proj, *([] if pool is None else [pool.scores])]


class DeviceIndexer:
    """What chooses positions in one layer, of which `why_no_choice` says nothing."""

    def __init__(self, own: PositionIndexer, on: MixerDevice) -> None:
        """Upload it. Raises CapacityError."""
        assert own.projections is not None
        self._on, self._config, norm = on, own.config, own.projections.k_norm
        products, pool = map(on.make, linears_of_index(own)), own.projections.pool
        self._queries, self._keys, self._weights, *self._scores = products
        self._places = None if pool is None else on.put(pool.places.numpy())
        assert norm.bias is not None
        self._norm = on.put(np.stack([norm.weight.float().numpy(), norm.bias.float().numpy()]))
        self._eps = np.float32(norm.eps)
        self._turning = own.config.head_size - own.rope_size if own.config.rotates_last else 0
        self._kernels = on.kernels.of({"SIZE": own.config.head_size}, CHOICE_PARTS, CHOICE_NAMES)

    def __call__(self, rows: Buffer, low_rank: Buffer, index: int, step: StepBuffers) -> None:
        """Store the keys of normalised rows [T, E] in layer `index`, and choose what they see."""
        on, of, n_rows, config = self._on, self._on.scratch.of, step.n_rows, self._config
        n_heads, size, (_, stored) = config.n_heads, config.head_size, on.pages_of(index)
        cosines, sines, n_rotated = step.tables[index]
        queries = of("queries of index", 4 * n_rows * n_heads * size)
        keys = of("keys of index", 4 * n_rows * size)
        weights = of("weights of index", 4 * n_rows * n_heads)
        self._keys(rows, n_rows, keys)
        beside = keys
        for scores in self._scores:
            beside = of("scores of keys", 4 * n_rows * size)
            scores(rows, n_rows, beside, behind=self._keys)
        if step.chooses:
            self._weights(rows, n_rows, weights)
            self._queries(low_rank, n_rows, queries)
        launch(
            on.driver,
            self._kernels["index_heads"],
            (n_rows, 1 + n_heads * step.chooses),
            [queries, keys, beside, self._norm, cosines, sines, *step.at, stored],
            *(n_heads, self._turning, n_rotated, config.width, PAGE, int(config.interleaved)),
            self._eps,
        )
        if self._places is not None:
            entries, n_pooled = on.entries_of(index), config.n_pooled
            buffers = [*step.at, stored, self._places, entries]
            launch(on.driver, self._kernels["pool_entries"], (n_rows, 1), buffers, PAGE, n_pooled)
            stored = entries
        if step.chooses:
            choose(on, self._kernels, config, [queries, weights, *step.at, stored], step)


class DeviceBlocks:
    """What chooses blocks of positions in one layer, of which `why_no_choice` says nothing."""

    def __init__(
        self, own: BlockIndexer, on: MixerDevice, every: Rotary, tables: Buffer, begin: int
    ) -> None:
        """Upload it; `tables` are those of `every` place. Raises CapacityError.

        What it stores stands behind `begin` columns of each value.
        """
        self._on, self._own, self._begin, config = on, own, begin, own.config
        self._heads = on.make(own.qk_proj)
        norms = own.q_norm.weight[0], own.k_norm.weight
        self._norm = on.put(np.stack([norm.float().numpy() for norm in norms]))
        self._eps, self._n_rotated = np.float32(own.k_norm.eps), every.cos.shape[-1]
        self._tables = tables
        axes = torch.zeros(self._n_rotated) if every.axes is None else every.axes
        self._axes = on.put(axes.numpy().astype(np.uint32))
        self._kernels = on.kernels.of({"SIZE": config.head_size}, CHOICE_PARTS, CHOICE_NAMES)

    def __call__(self, rows: Buffer, index: int, step: StepBuffers) -> None:
        """Store the keys of normalised rows [T, E] in layer `index`, and choose what they see."""
        on, of, n_rows, config = self._on, self._on.scratch.of, step.n_rows, self._own.config
        n_heads, n_kv_heads = config.n_heads, self._own.n_kv_heads
        heads = of("heads of index", 4 * n_rows * self._heads.shape[0])
        queries = of("queries of index", 4 * n_rows * n_heads * config.head_size)
        weights = of("weights of index", 4 * n_rows * n_heads)
        (_, values), entries = on.pages_of(index), on.entries_of(index)
        self._heads(rows, n_rows, heads)
        given = [heads, self._norm, self._tables, self._axes, step.more["digits"]]
        first = 0 if step.chooses else n_heads
        for begin, end in ((first, n_heads + 1), (n_heads + 1, n_heads + 2)):
            launch(
                on.driver,
                self._kernels["index_blocks"],
                (n_rows, end - begin),
                [*given, *step.at, values, queries, weights, entries],
                *(begin, n_heads, self._n_rotated, N_DIGITS * config.n_axes, n_kv_heads),
                *(self._begin, self._begin + config.beside_values(n_kv_heads), PAGE),
                *(config.n_pooled, self._eps),
            )
        if step.chooses:
            given = [queries, weights, *step.at, entries]
            choose(on, self._kernels, config, given, step, factor=config.head_size**-0.5)


def choose(
    on: MixerDevice,
    kernels: Mapping[str, Kernel],
    config: Indexer,
    given: Sequence[Buffer],
    step: StepBuffers,
    entries: tuple[int, int, int] | None = None,
    factor: float = 0,
) -> None:
    """Choose positions by the `given` queries [T, I, D], weights [T, I], places, pages and keys.

    Keys are those of entries, if these have several positions each; `entries` says of how many
    positions, how many columns lie from one to the next, and where keys begin, if it is their own
    numbers that are chosen. Weights are multiplied by `factor`, 0 for the usual one.
    """
    n_pooled, stride, first_key = entries or (config.n_pooled, config.head_size, 0)
    n_rows, n_chosen = step.n_rows, config.n_chosen // config.n_pooled
    n_columns = -(-step.n_blocks * KEYS // n_pooled)
    at_once = max(1, min(n_rows, _MOST_SCORE_BYTES // (4 * n_columns)))
    scores = on.scratch.of("scores of index", 4 * at_once * n_columns)
    both = chosen_buffers(on, config, n_rows)
    scale = np.float32(factor or (config.n_heads * config.head_size) ** -0.5)
    for first in range(0, n_rows, at_once):
        n = min(at_once, n_rows - first)
        launch(
            on.driver,
            kernels["score_entries"],
            (-(-n_columns // THREADS), n),
            [*given, scores],
            *(first, config.n_heads, PAGE // n_pooled, n_pooled, n_chosen, n_columns),
            *(stride, first_key, scale),
        )
        sizes = first, n_pooled, config.n_pooled, n_chosen, n_columns
        buffers = [scores, step.at[0], *both]
        launch(on.driver, kernels["choose_entries"], (n, 1), buffers, *sizes)


def chosen_buffers(on: MixerDevice, config: Indexer, n_rows: int) -> tuple[Buffer, Buffer]:
    """Return the scratch of what rows have chosen, and of what `places` is for attention there."""
    of = on.scratch.of
    return of("chosen", 4 * n_rows * config.n_attended), of("looked", 12 * n_rows)


class StageChoices:
    """What a stage's rows have chosen: what comes of a stage before, and what goes to the next.

    With `hands_on` the next one takes it. `of_entries` says of how many positions entries are that
    each layer chooses for itself, and of how many of them, None where there are none.
    """

    def __init__(
        self,
        indexers: Sequence[PositionIndexer | BlockIndexer],
        on: MixerDevice,
        of_entries: tuple[int, int] | None,
        *,
        hands_on: bool,
    ) -> None:
        self._on, self._hands_on, self._limits = on, hands_on, of_entries
        self._config = config = indexers[0].config if indexers else None
        if config is not None:
            self._limits = config.n_pooled, config.n_chosen // config.n_pooled
        self._takes = bool(indexers) and not linears_of_index(indexers[0])

    def are_missing(self, step: ForwardStep) -> bool:
        """Whether a layer takes the choice of one before, which has made none."""
        return self._takes and not step.choices

    def digits(self, step: ForwardStep) -> dict[str, Array]:
        """Return the digits of where rows are, by axis, if keys of blocks have any."""
        if self._config is None or not self._config.n_axes:
            return {}
        axes = step.rotary_positions.expand(self._config.n_axes, -1)
        digits = [to_digits(axis, torch.empty(0)) for axis in axes]
        return {"digits": torch.cat(digits, 1).numpy()}

    def bring(self, step: ForwardStep, at: Array) -> bool:
        """Upload what came, by `at` of StepBuffers; say whether rows see more than they choose."""
        config, chosen = self._config, step.choices[-1] if self._takes else None
        if self._limits is None:
            return False
        if config is not None and chosen is not None:
            looked = at.copy()
            looked[:, 0] = (chosen >= 0).sum(1).numpy() - 1
            both = chosen_buffers(self._on, config, len(at))
            for buffer, array in zip(both, (chosen.numpy(), looked), strict=True):
                self._on.driver.upload(buffer, np.ascontiguousarray(array))
        n_pooled, n_chosen = self._limits
        return (int(step.positions.max()) + 1) // n_pooled > n_chosen

    def hand_on(self, step: ForwardStep, n_rows: int, *, chooses: bool) -> None:
        """Write down what rows have chosen last, where the next stage takes it: see Choose."""
        if not self._hands_on or self._config is None:
            return
        chosen = torch.empty(n_rows, self._config.n_attended, dtype=torch.int32)
        if chooses:
            self._on.driver.download(self._on.scratch.of("chosen", 0), chosen.numpy())
        step.choices.append(chosen if chooses else None)
