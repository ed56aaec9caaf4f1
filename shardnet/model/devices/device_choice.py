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

from shardnet.model.config.model_config import Indexer
from shardnet.model.devices.device_attention import KEYS
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import MixerDevice, StepBuffers
from shardnet.model.drivers.driver import THREADS, Array, Buffer, Kernel, launch
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.mixers.position_indexer import PositionIndexer

CHOICE_PARTS: Final = ("vectors", "choice")
"""Of the text."""
CHOICE_NAMES: Final = ("index_heads", "pool_entries", "score_entries", "choose_entries")
_MOST_SCORE_BYTES: Final = 64 << 20
"""Rows whose scores take more choose one part after the other."""


def why_no_choice(own: PositionIndexer | None) -> str:
    """Say what the text does not compute of an indexer but for its linears, "" for nothing."""
    if own is None:
        return ""
    if PAGE % own.config.n_pooled:
        return f"entries of {own.config.n_pooled} positions"
    return "this norm" if own.projections and own.projections.k_norm.bias is None else ""


def linears_of_index(own: PositionIndexer | None) -> list[Linear]:
    """Return the linears of an indexer."""
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


def choose(
    on: MixerDevice,
    kernels: Mapping[str, Kernel],
    config: Indexer,
    given: Sequence[Buffer],
    step: StepBuffers,
    entries: tuple[int, int, int] | None = None,
) -> None:
    """Choose positions by the `given` queries [T, I, D], weights [T, I], places, pages and keys.

    Keys are those of entries, if these have several positions each; `entries` says of how many
    positions, how many columns lie from one to the next, and where keys begin, if it is their own
    numbers that are chosen.
    """
    n_pooled, stride, first_key = entries or (config.n_pooled, config.head_size, 0)
    n_rows, n_chosen = step.n_rows, config.n_chosen // config.n_pooled
    n_columns = -(-step.n_blocks * KEYS // n_pooled)
    at_once = max(1, min(n_rows, _MOST_SCORE_BYTES // (4 * n_columns)))
    scores = on.scratch.of("scores of index", 4 * at_once * n_columns)
    both = chosen_buffers(on, config, n_rows)
    factor = np.float32((config.n_heads * config.head_size) ** -0.5)
    for first in range(0, n_rows, at_once):
        n = min(at_once, n_rows - first)
        launch(
            on.driver,
            kernels["score_entries"],
            (-(-n_columns // THREADS), n),
            [*given, scores],
            *(first, config.n_heads, PAGE // n_pooled, n_pooled, n_chosen, n_columns),
            *(stride, first_key, factor),
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
        indexers: Sequence[PositionIndexer],
        on: MixerDevice,
        of_entries: tuple[int, int] | None,
        *,
        hands_on: bool,
    ) -> None:
        self._on, self._hands_on, self._limits = on, hands_on, of_entries
        self._config = config = indexers[0].config if indexers else None
        if config is not None:
            self._limits = config.n_pooled, config.n_chosen // config.n_pooled
        self._takes = bool(indexers) and indexers[0].projections is None

    def are_missing(self, step: ForwardStep) -> bool:
        """Whether a layer takes the choice of one before, which has made none."""
        return self._takes and not step.choices

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
