"""A stage that is loaded, and what the next one may take of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardnet.runtime.loading.model_facts import Stamp, stamp
from shardnet.runtime.stage.compute import StageCompute
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.types import LayerRange

if TYPE_CHECKING:
    from shardnet.stage.kept_linears import KeptLinears
    from shardnet.stage.moves.slot_moves import Moves
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
    from shardnet.stage.stage_audit import StageAudit


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What is kept of a stage, of this order and stamp, for the next one."""

    order: StageOrder
    stamp: Stamp
    linears: KeptLinears

    def serves(self, order: StageOrder, stamped: Stamp) -> bool:
        """Whether a stage of `order` holds weights of the same files in the same form."""
        own = self.order
        alike = replace(
            own,
            layers=order.layers,
            is_tail=order.is_tail,
            context=order.context,
            n_streamed=order.n_streamed,
            adapters=order.adapters,
        )
        return alike == order and self.stamp == stamped


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """A stage ready to compute. `stamp` is that of the checkpoint's files when it was loaded.

    `prefixes` are those on disk of finished prompts, None where none are kept; `arithmetic` is "".
    A slot that is copied `shares_blocks` with its source. `moves` takes the sequences of other
    stages in, None where it cannot. `linears` are those that a later stage may take. `audit` looks
    for wrong bits, None where nothing does. A stage that has grown has `parts`, which were loaded
    one by one.
    """

    order: StageOrder
    stamp: Stamp
    compute: StageCompute
    weight_bytes: int
    room_blocks: int
    load_s: float
    kernel: str
    exact_rows: int
    prefixes: StagePrefixes | None = None
    arithmetic: str = ""
    shares_blocks: bool = False
    moves: Moves | None = None
    linears: KeptLinears | None = None
    audit: StageAudit | None = None
    parts: tuple[LoadedStage, ...] = ()

    @property
    def kept(self) -> list[KeptWeights]:
        """What the next stage may take of this one, of each of its parts."""
        return [
            KeptWeights(
                order=part.order,
                stamp=part.stamp,
                linears=replace(part.linears, linears={**part.linears.linears}),
            )
            for part in self.parts or (self,)
            if part.linears is not None and not part.is_lost
        ]

    @property
    def is_lost(self) -> bool:
        """Whether it cannot be used any more: a shard of it, or of a part, is lost, or is wrong."""
        parts = self.parts or (self,)
        return any(
            getattr(part.compute, "is_lost", False) or (part.audit and part.audit.is_wrong)
            for part in parts
        )

    @property
    def weight_bytes_by_place(self) -> Counter[int]:
        """The bytes of its weights on each device of the node, by the device's place."""
        n_bytes: Counter[int] = Counter()
        for part in self.parts or (self,):
            places = [device.place for device in part.order.shards] or [part.order.place]
            for place in places:
                n_bytes[place] += part.weight_bytes // len(places)
        return n_bytes

    def with_layer(self, layer: int) -> LoadedStage | None:
        """Return the part that has a layer of the model, None if none has."""
        parts = self.parts or (self,)
        return next((part for part in parts if layer in part.order.layers), None)

    def fits(self, order: StageOrder) -> bool:
        """Whether loading `order` now would give the same stage."""
        return self.order == order and self.stamp == stamp(order.folder) and not self.is_lost

    def part(self, order: StageOrder) -> LoadedStage | None:
        """Return what loading `order` now would give: this stage, or a part of it."""
        return next((one for one in (self, *self.parts) if one.fits(order)), None)

    def lacks(self, order: StageOrder) -> list[StageOrder]:
        """Return the orders of what has to be loaded beside this stage to have that of `order`.

        There are none if it is no part of that stage, or cannot be joined to one.
        """
        own, whole = self.order.layers, order.layers
        if order.adapters_within(own) != self.order.adapters:
            return []
        alike = replace(
            self.order,
            layers=whole,
            is_tail=order.is_tail,
            parts=order.parts,
            adapters=order.adapters,
        )
        if order.parts:
            alike = replace(alike, device=order.device, place=order.place, cores=order.cores)
        is_part = whole.start <= own.start and own.end <= whole.end
        if self.moves is None or order.n_streamed or alike != order or not is_part:
            return []
        if self.is_lost or self.stamp != stamp(order.folder):
            return []
        ranges = [(whole.start, own.start), (own.end, whole.end)]
        return [
            part
            for start, end in ranges
            if start < end
            for part in order.within(LayerRange(start, end))
        ]
