"""Which stage a node is to load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.stage_form import StageForm
from shardnet.types import Arith, LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevice:
    """A device of a node: the one at `place` in its list, called `name` there and `torch` by torch.

    By `driver` the kernel text computes there, and torch's device is its host. Its threads run on
    `cores`, on any where there are none.
    """

    place: int
    name: str
    torch: str = "cpu"
    cores: tuple[int, ...] = ()
    driver: str = ""


ONE_DEVICE: Final = (StageDevice(place=0, name="cpu"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Neighbouring layers of a stage, and the device that computes them.

    Where there are several `devices`, each has a shard of every one of these layers.
    """

    layers: LayerRange
    devices: tuple[StageDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAdapter:
    """A LoRA adapter of a stage: the files of its parts, by absolute layer, in their order."""

    adapter_id: str
    files: tuple[tuple[int, Path], ...]

    def within(self, layers: LayerRange) -> StageAdapter:
        """Return what it has for `layers`."""
        files = tuple((layer, file) for layer, file in self.files if layer in layers)
        return replace(self, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """Which stage to load, in the ring's `form`. Equal orders give the same stage.

    `folder` is where its checkpoint lies on this machine. Where there are several `devices`, each
    has a shard of every layer; the first one leads.
    """

    form: StageForm
    folder: Path
    layers: LayerRange
    is_tail: bool
    """Whether the stage has the last layer, so that it samples."""
    devices: tuple[StageDevice, ...] = ONE_DEVICE
    n_streamed: int = 0
    """How many of the layers are streamed from disk."""
    arith: Arith = Arith.FAST
    shard: int = 0
    """Which part of a stage that spans `n_nodes` this node has."""
    n_nodes: int = 1
    shares: tuple[int, ...] = ()
    """What of a layer each of those nodes has, compared with the others; () for as much."""
    parts: tuple[StagePart, ...] = ()
    """Which layers are on which device, where they are not all on one."""
    adapters: tuple[StageAdapter, ...] = ()
    border_width: int = 0
    """How many columns rows have between stages, 0 for as many as the stage says."""

    def opened(self) -> Checkpoint:
        """Open its checkpoint. Raises CheckpointError, UnsupportedModelError for unknown keys."""
        ignored = self.form.ignore_unknown_config
        return Checkpoint.open(self.folder, ignore_unknown_config=ignored)

    def on(self, part: StagePart) -> StageOrder:
        """Return the order of the layers of this stage that are on one device, or its shards."""
        return replace(
            self,
            layers=part.layers,
            is_tail=self.is_tail and part.layers.end == self.layers.end,
            devices=part.devices,
            arith=Arith.PORTABLE if part.devices[0].driver else self.arith,
            parts=(),
            adapters=self.adapters_within(part.layers),
        )

    def adapters_within(self, layers: LayerRange) -> tuple[StageAdapter, ...]:
        """Return what its adapters have for `layers`."""
        return tuple(adapter.within(layers) for adapter in self.adapters)

    @property
    def device(self) -> StageDevice:
        """The device that computes it, or leads those that do."""
        return self.devices[0]

    @property
    def shards(self) -> tuple[StageDevice, ...]:
        """The devices that share each layer, where there are several."""
        return self.devices if len(self.devices) > 1 else ()

    @property
    def share(self) -> str:
        """What this node has of a stage that spans several, in a word; "" for all of it."""
        if self.n_nodes == 1:
            return ""
        return f"shard {self.shard} of {self.n_nodes}, heads apportioned by {[*self.shares]}"

    @property
    def by_device(self) -> list[StageOrder]:
        """The orders of its parts; of a stage on one device that is itself."""
        return [self.on(part) for part in self.parts] or [self]

    def within(self, layers: LayerRange) -> list[StageOrder]:
        """Return the orders of its parts, or what is left of them, that lie in `layers`."""
        return [
            replace(
                order,
                layers=LayerRange(start, end),
                is_tail=self.is_tail and end == self.layers.end,
                adapters=order.adapters_within(LayerRange(start, end)),
            )
            for order in self.by_device
            if (start := max(order.layers.start, layers.start))
            < (end := min(order.layers.end, layers.end))
        ]

    @property
    def caching(self) -> LayerRange:
        """The layers of which it has keys, values or states."""
        return LayerRange(self.layers.start, self.layers.end + (self.form.mtp and self.is_tail))
