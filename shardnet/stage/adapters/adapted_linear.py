"""Linear layers of a stage to whose outputs LoRA adapters add, each to the rows that have it.

Axes in shape comments: T rows of the micro-batch, R rank, K inputs, N outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Unpack

import torch
from torch import Tensor

from shardnet.checkpoint.adapters.layer_files import read_layer_file
from shardnet.checkpoint.adapters.stored_adapter import LowRank, linear_shapes
from shardnet.errors import UnsupportedModelError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.library import NativeMatmul, native_kernels
from shardnet.model.kernels.linear import (
    MAX_EXACT_ROWS,
    Kernel,
    KernelChoice,
    Linear,
    is_batch_invariant,
    is_native,
    make_linear,
)
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import (
    LinearOptions,
    RowsOf,
    StoredTable,
    Table,
    WholeSource,
)
from shardnet.model.shards.cut import Axis
from shardnet.types import DType

_PLAIN_MIN_ROWS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfAdapter:
    """The rows of a step that have one adapter, by its id, and what each multiplies it by.

    `index` is None where all rows have it, `scales` where it is 1 for each.
    """

    adapter_id: str
    index: Tensor | None  # [T'], int64
    scales: Tensor | None  # [T', 1], float32


class ActiveAdapters:
    """The adapters that linears add now, to the rows that have them. Not thread-safe."""

    def __init__(self) -> None:
        self.rows: Sequence[RowsOfAdapter] = ()


class LowRankProduct:
    """The part of an adapter for one linear, in float32: rows [T, K] to factor * B(A x), [T, N].

    Every output of a row is added up in one order, whatever rows stand beside it: by the compiled
    library, or by torch in batches for which that was tested.
    """

    def __init__(self, low_rank: LowRank, device: torch.device) -> None:
        is_cpu = device.type == "cpu"
        self._choice = KernelChoice(
            dtype=DType.FLOAT32,
            kernel=Kernel.NATIVE if is_cpu and native_kernels() is not None else Kernel.PLAIN,
            exact_rows=MAX_EXACT_ROWS,
            min_rows=_PLAIN_MIN_ROWS,
            device=device.type,
        )
        self._linears = [
            make_linear(self._choice, [matrix], [], device)
            for matrix in (low_rank.a.float(), low_rank.b.float() * low_rank.factor)
        ]
        self._most_rows = self._exact_rows(device)

    def _exact_rows(self, device: torch.device) -> int | None:
        """Return the largest batch that changes no row's bits, None for any."""
        if all(linear.is_native for linear in self._linears):
            return None
        tested = [is_batch_invariant(linear, self._choice, device) for linear in self._linears]
        return MAX_EXACT_ROWS if all(tested) else 1

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply float32 rows."""
        if self._most_rows is None:
            return self._multiply(rows)
        return torch.cat([self._multiply(some) for some in torch.split(rows, self._most_rows)])

    def _multiply(self, rows: Tensor) -> Tensor:
        a, b = self._linears
        return b(a(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedPart:
    """What one adapter adds to the outputs `[begin, end)` of a linear."""

    begin: int
    end: int
    product: LowRankProduct


class AdaptedLinear:
    """A linear layer to which adapters add: rows [T, K] to [T, N], in the dtype of `base`.

    Without adapters in `active` it is `base`, which the library's joined calls compute instead.
    """

    def __init__(
        self, base: Linear, added: dict[str, list[AddedPart]], active: ActiveAdapters
    ) -> None:
        """Take the parts that adapters add, by their ids."""
        self._base = base
        self._added = added
        self._active = active
        self.shape, self.weights_stay = base.shape, base.weights_stay

    @property
    def is_native(self) -> bool:
        """Whether the compiled library computes it where no row has an adapter."""
        return self._base.is_native

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """See Linear: those of the linear without adapters."""
        return self._base.weights

    def native_matmul(self) -> NativeMatmul:
        """Return the library's matmul of the linear without adapters."""
        assert is_native(self._base), "self.is_native says so"
        return self._base.native_matmul()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row, and add the adapters of those that have some."""
        out = self._base(rows)
        for some in self._active.rows:
            for part in self._added.get(some.adapter_id, ()):
                self._add(part, some, rows, out)
        return out

    @staticmethod
    def _add(part: AddedPart, some: RowsOfAdapter, rows: Tensor, out: Tensor) -> None:
        taken = rows if some.index is None else rows.index_select(0, some.index)
        more = part.product(taken.float())
        if some.scales is not None:
            more.mul_(some.scales)
        own = out[:, part.begin : part.end]
        if some.index is None:
            own.copy_(more.add_(own))
        else:
            own[some.index] = more.add_(own[some.index]).to(out.dtype)


_LINEAR: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(eq=False, repr=False)
class AdaptedWeights:
    """The WeightSource of a stage with adapters: `weights`, whose linears are wrapped."""

    weights: WholeSource
    config: ModelConfig
    adapters: Sequence[LoadedAdapter]
    active: ActiveAdapters
    device: torch.device

    def __post_init__(self) -> None:
        self._left = {
            (adapter.adapter_id, layer, name)
            for adapter in self.adapters
            for layer, linears in adapter.layers.items()
            for name in linears
        }
        self._kept: dict[str, Sequence[tuple[int, int]]] = {}

    def keep(self, name: str, ranges: Sequence[tuple[int, int]], axis: int) -> None:
        """See WholeSource: nor of what adapters add to these outputs."""
        self.weights.keep(name, ranges, axis)
        self._kept[name] = ranges
        match = _LINEAR.fullmatch(name.removesuffix(".weight"))
        if match is not None and not ranges:  # other shards have all of it
            at = int(match[1]), match[2]
            self._left -= {(adapter.adapter_id, *at) for adapter in self.adapters}

    def check_all_used(self) -> None:
        """Raise UnsupportedModelError if the model's layers have not asked for a linear.

        Then nothing would be added to it.
        """
        if self._left:
            _, layer, name = min(self._left)
            raise UnsupportedModelError(
                f"the adapter is for {name} of layer {layer}, which {self.config.family} models "
                "do not compute as a linear of its own",
                remedy="merge the adapter into the model, and use that instead",
            )

    def linear(self, *names: str, **how: Unpack[LinearOptions]) -> Linear:
        """See WeightSource."""
        base = self.weights.linear(*names, **how)
        added: dict[str, list[AddedPart]] = {}
        begin = 0
        for name in names:
            match = _LINEAR.fullmatch(name)
            if match is None or int(match[1]) >= self.config.n_layers:
                return base
            layer, own = int(match[1]), match[2]
            shape = linear_shapes(self.config, layer).get(own)
            if shape is None:
                return base
            kept = self._kept.get(f"{name}.weight", [(0, shape[0])])
            self._collect(added, layer, own, begin, kept)
            begin += sum(stop - start for start, stop in kept)
        return AdaptedLinear(base, added, self.active) if added else base

    def _collect(
        self,
        added: dict[str, list[AddedPart]],
        layer: int,
        name: str,
        begin: int,
        kept: Sequence[tuple[int, int]],
    ) -> None:
        """Add to `added` what the adapters have for the `kept` outputs of one linear."""
        for adapter in self.adapters:
            low_rank = adapter.layers.get(layer, {}).get(name)
            if low_rank is not None:
                b = torch.cat([low_rank.b[start:stop] for start, stop in kept])
                product = LowRankProduct(replace(low_rank, b=b), self.device)
                part = AddedPart(begin=begin, end=begin + len(b), product=product)
                added.setdefault(adapter.adapter_id, []).append(part)
                self._left.discard((adapter.adapter_id, layer, name))

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """See WeightSource."""
        return self.weights.norm(name, eps, offset)

    def table(self, name: str) -> Table:
        """See WeightSource."""
        return self.weights.table(name)

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """See WeightSource."""
        return self.weights.stored_table(*names, rows_of=rows_of)

    def token_classes(self) -> Tensor:
        """See WeightSource."""
        return self.weights.token_classes()

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        return self.weights.matrix(name, rows=rows)

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        return self.weights.parameter(name, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """What an adapter has for the layers of a stage, by absolute layer and by linear."""

    adapter_id: str
    layers: Mapping[int, Mapping[str, LowRank]]

    @classmethod
    def read(cls, adapter_id: str, files: Iterable[tuple[int, Path]]) -> LoadedAdapter:
        """Read the files of some layers. Raises CheckpointError if one is damaged."""
        layers = {layer: read_layer_file(file) for layer, file in files}
        return cls(adapter_id=adapter_id, layers=layers)

    def bytes_of(self, layer: int) -> int:
        """Return the bytes that its part for a layer takes, in float32."""
        linears = self.layers.get(layer, {}).values()
        return sum(4 * (one.a.numel() + one.b.numel()) for one in linears)
