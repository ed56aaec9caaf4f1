"""The linears of a stage with what adapters add to them.

Knows which linears adapters name, which outputs of joined linears are theirs, and what parts of
adapters take of memory. Must not know how
weights are read, nor who asks for an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from shardnet.checkpoint.adapters.layer_files import read_layer_file
from shardnet.checkpoint.adapters.stored_adapter import LowRank, linear_shapes
from shardnet.errors import UnsupportedModelError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.tables import Table
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.shards.cut import Axis
from shardnet.stage.adapters.adapted_linear import (
    ActiveAdapters,
    AdaptedLinear,
    AddedPart,
    LowRankProduct,
)

_LINEAR: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(eq=False, repr=False)
class AdaptedWeights:
    """The WeightSource of a stage with adapters: `weights`, whose linears are wrapped."""

    weights: WeightSource
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

    def linear(
        self,
        *names: str,
        transposed: bool = False,
        precise: bool = False,
        wide: bool = False,
        outputs: Sequence[Axis] = (),
        inputs: Axis | None = None,
    ) -> Linear:
        """See WeightSource."""
        base = self.weights.linear(
            *names,
            transposed=transposed,
            precise=precise,
            wide=wide,
            outputs=outputs,
            inputs=inputs,
        )
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
            self._collect(added, layer, own, begin, begin + shape[0])
            begin += shape[0]
        return AdaptedLinear(base, added, self.active) if added else base

    def _collect(
        self, added: dict[str, list[AddedPart]], layer: int, name: str, begin: int, end: int
    ) -> None:
        """Add to `added` what the adapters have for one linear."""
        for adapter in self.adapters:
            low_rank = adapter.layers.get(layer, {}).get(name)
            if low_rank is not None:
                product = LowRankProduct(low_rank, self.device)
                part = AddedPart(begin=begin, end=end, product=product)
                added.setdefault(adapter.adapter_id, []).append(part)
                self._left.discard((adapter.adapter_id, layer, name))

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """See WeightSource."""
        return self.weights.norm(name, eps, offset)

    def table(self, name: str) -> Table:
        """See WeightSource."""
        return self.weights.table(name)

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
