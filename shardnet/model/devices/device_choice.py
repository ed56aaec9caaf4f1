"""Which positions rows attend to on a device, where an indexer chooses them, by the kernel text.

Knows which indexers the text computes, and the order of launches. Must not know the attention that
looks there.

Axes in shape comments: T rows, E hidden size, I heads of an index, D columns of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from torch import Tensor

from shardnet.model.config.model_config import Indexer
from shardnet.model.devices.device_attention import KEYS
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import MixerDevice, StepBuffers
from shardnet.model.drivers.driver import THREADS, Array, Buffer, launch
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import Span
from shardnet.model.mixers.position_indexer import PositionIndexer

CHOICE_PARTS: Final = ("vectors", "choice")
"""Of the text."""
CHOICE_NAMES: Final = ("index_heads", "score_entries", "choose_entries")
_MOST_SCORE_BYTES: Final = 64 << 20
"""Rows whose scores take more choose one part after the other."""
_UNUSED: Final = 0xFFFFFFFF


def why_no_choice(own: PositionIndexer | None) -> str:
    """Say what the text does not compute of an indexer but for its linears, "" for nothing."""
    if own is None or own.projections is None:
        return ""
    if own.projections.pool is not None:
        return "a choice of entries"
    if own.projections.k_norm.bias is None:
        return "this norm"
    return ""


def linears_of_index(own: PositionIndexer | None) -> list[Linear]:
    """Return the linears of an indexer."""
    if own is None or own.projections is None:
        return []
    return [own.projections.wq_b, own.projections.wk, own.projections.weights_proj]


class Chooser:
    """Chooses among entries by their keys: for each row the best, and those behind the last one."""

    def __init__(self, config: Indexer, on: MixerDevice, factor: float) -> None:
        """Compile it; weights of heads are multiplied by `factor`."""
        self._on, self._config, self._factor = on, config, np.float32(factor)
        self.kernels = on.kernels.of({"SIZE": config.head_size}, CHOICE_PARTS, CHOICE_NAMES)

    def __call__(
        self, queries: Buffer, weights: Buffer, keys: tuple[Buffer, int], step: StepBuffers
    ) -> None:
        """Choose by queries [T, I, D] and weights [T, I], and keys that are so far apart."""
        on, config, n_rows, (stored, stride) = self._on, self._config, step.n_rows, keys
        n_pooled, n_entries = config.n_pooled, config.n_chosen // config.n_pooled
        n_columns = -(-step.n_blocks * KEYS // n_pooled)
        at_once = max(1, min(n_rows, _MOST_SCORE_BYTES // (4 * n_columns)))
        scores = on.scratch.of("scores of index", 4 * at_once * n_columns)
        chosen, looked = chosen_buffers(on, config, n_rows)
        for first in range(0, n_rows, at_once):
            n = min(at_once, n_rows - first)
            launch(
                on.driver,
                self.kernels["score_entries"],
                (-(-n_columns // THREADS), n),
                [queries, weights, *step.at, stored, scores],
                *(first, config.n_heads, stride, PAGE // n_pooled, n_pooled, n_entries, n_columns),
                self._factor,
            )
            launch(
                on.driver,
                self.kernels["choose_entries"],
                (n, 1),
                [scores, step.at[0], chosen, looked],
                *(first, n_pooled, n_entries, n_columns),
            )


class DeviceIndexer:
    """What chooses positions in one layer, of which `why_no_choice` says nothing."""

    def __init__(self, own: PositionIndexer, on: MixerDevice) -> None:
        """Upload it. Raises CapacityError."""
        assert own.projections is not None
        self._on, self._config, norm = on, own.config, own.projections.k_norm
        self._queries, self._keys, self._weights = map(on.make, linears_of_index(own))
        assert norm.bias is not None
        self._norm = on.put(np.stack([norm.weight.float().numpy(), norm.bias.float().numpy()]))
        self._eps = np.float32(norm.eps)
        self._turning = own.config.head_size - own.rope_size if own.config.rotates_last else 0
        factor = (own.config.n_heads * own.config.head_size) ** -0.5
        self._chooser = Chooser(own.config, on, factor)

    def __call__(self, rows: Buffer, low_rank: Buffer, index: int, step: StepBuffers) -> None:
        """Store the keys of normalised rows [T, E] in layer `index`, and choose what they see."""
        on, of, n_rows, config = self._on, self._on.scratch.of, step.n_rows, self._config
        n_heads, size, (_, stored) = config.n_heads, config.head_size, on.pages_of(index)
        cosines, sines, n_rotated = step.tables[index]
        queries = of("queries of index", 4 * n_rows * n_heads * size)
        keys = of("keys of index", 4 * n_rows * size)
        weights = of("weights of index", 4 * n_rows * n_heads)
        self._keys(rows, n_rows, keys)
        if step.chooses:
            self._weights(rows, n_rows, weights, behind=self._keys)
            self._queries(low_rank, n_rows, queries)
        launch(
            on.driver,
            self._chooser.kernels["index_heads"],
            (n_rows, 1 + n_heads * step.chooses),
            [queries, keys, keys, self._norm, cosines, sines, *step.at, stored],
            *(n_heads, self._turning, n_rotated, config.width, PAGE, int(config.interleaved)),
            self._eps,
        )
        if step.chooses:
            self._chooser(queries, weights, (stored, config.width), step)


def chosen_buffers(on: MixerDevice, config: Indexer, n_rows: int) -> tuple[Buffer, Buffer]:
    """Return the scratch of what rows have chosen, and of what `places` is for attention there."""
    of = on.scratch.of
    return of("chosen", 4 * n_rows * config.n_attended), of("looked", 12 * n_rows)


def bring_choice(on: MixerDevice, config: Indexer, chosen: Tensor, at: Array) -> None:
    """Upload what rows have chosen, int32 [T, n], on another stage; `at` as for `StepBuffers`."""
    numbers = chosen.numpy().view(np.uint32)
    looked = at.copy()
    looked[:, 0] = (numbers != _UNUSED).sum(1) - 1
    for buffer, array in zip(chosen_buffers(on, config, len(at)), (numbers, looked), strict=True):
        on.driver.upload(buffer, np.ascontiguousarray(array))


def sees_more(config: Indexer, spans: Sequence[Span]) -> bool:
    """Whether a row of a step sees more than it may choose."""
    ends = (span.position + span.end - span.start for span in spans)
    return max(ends) // config.n_pooled > config.n_chosen // config.n_pooled
