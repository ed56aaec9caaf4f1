"""The parts of adapters that a stage has in memory, and what they take of it.

Knows the files of single layers. Must not know linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardnet.checkpoint.adapters.layer_files import read_layer_file
from shardnet.checkpoint.adapters.stored_adapter import LowRank


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
