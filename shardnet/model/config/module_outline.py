"""What transformers' own modules hold of a model, for families without a record of ours.

Knows names, shapes and sizes. Must not know transformers or torch: what is written here is read
from a model on the meta device (model/modules/outline.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardnet.errors import UnsupportedModelError
from shardnet.types import BLOCK_POSITIONS, DType, LayerRange

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter names with their shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedPart:
    """A tensor that later layers read: number `output` of what `layer` returns, of `shape`.

    Layer -1 is the embedding. The axis of the rows is -1 in the shape.
    """

    layer: int
    output: int
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns that it takes in a row."""
        return -math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOutline:
    """A model of the family `model_type`, whose config.json is `config_text`.

    `layer_list` is the path of the modules of the layers, `layers` the parameters of each.
    `embedding` is needed by the first stage, `head` by the last one and `everywhere` by every
    stage. `output_counts` say how many values a layer returns, 0 for a bare hidden state, and
    `borders` what comes out of so many layers, from 1 on, side by side in `row_width` columns.
    `caches` say which layers of a cache each layer fills, `kv_numbers` are the numbers that it
    caches per position, and `state_bytes` the bytes that a slot has in it whatever its length.
    Layers run as often as `n_passes` says: those that run several times, all as often, follow each
    other. The KV of layer `shared_kv_from` is read by layers up to
    the last, which have none of their own; None where no layer does that.
    """

    model_type: str
    config_text: str
    layer_list: str = field(compare=False)
    layers: tuple[Shapes, ...] = field(compare=False)
    embedding: Shapes = field(compare=False)
    everywhere: Shapes = field(compare=False)
    head: Shapes = field(compare=False)
    output_counts: tuple[int, ...] = field(compare=False)
    borders: tuple[tuple[HandedPart, ...], ...] = field(compare=False)
    n_passes: tuple[int, ...] = field(compare=False)
    caches: tuple[tuple[int, ...], ...] = field(compare=False)
    kv_numbers: tuple[int, ...] = field(compare=False)
    state_bytes: tuple[int, ...] = field(compare=False)
    shared_kv_from: int | None = field(compare=False)

    @property
    def row_width(self) -> int:
        """Columns of a row between stages: as many as any border needs."""
        return max(sum(part.width for part in parts) for parts in self.borders)

    @property
    def has_state(self) -> bool:
        """Whether layers keep what cannot be rewound."""
        return any(self.state_bytes)

    def together(self, layers: LayerRange) -> LayerRange | None:
        """Return layers that run several times and of which `layers` have some, but not all."""
        looped = [n for n, passes in enumerate(self.n_passes) if passes > 1]
        n_own = sum(n in layers for n in looped)
        return LayerRange(looped[0], looped[-1] + 1) if 0 < n_own < len(looped) else None

    def refusal(self, flag: str) -> UnsupportedModelError:
        """Return the error for a `flag` that asks for what only layers of ours do."""
        return UnsupportedModelError(
            f"{flag}: {self.model_type} is computed by transformers' own modules, which do not do "
            "that",
            remedy=f"leave {flag} out",
        )

    def block_bytes(self, layers: LayerRange, dtype: DType) -> int:
        """Return the bytes of one KV block (256 positions) over `layers`."""
        return sum(self.kv_numbers[n] for n in layers) * dtype.size_bytes * BLOCK_POSITIONS

    def slot_bytes(self, layers: LayerRange) -> int:
        """Return the bytes of one slot's states over `layers`."""
        return sum(self.state_bytes[n] for n in layers)
