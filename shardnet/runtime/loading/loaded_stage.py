"""A stage that is loaded, whole or joined of ranges, and what the next one may take of it.

What passes from one part to the next is rounded as on a link in the ring's dtype, which rounds
nothing that the layers have not rounded (design decision 4). It stays in memory, and on its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from shardnet.errors import CapacityError
from shardnet.runtime.loading.model_facts import Stamp, stamp
from shardnet.runtime.stage.compute import (
    Activations,
    AheadCompute,
    AnyThreadCompute,
    PartCompute,
    Samples,
    StageCompute,
)
from shardnet.runtime.stage.executor import on_cores
from shardnet.runtime.stage.picture_store import PictureStore
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.slot_operations import SlotOperation
from shardnet.types import LEAST_STATES, LayerRange, MicroBatch, WireDType, blocks_for

if TYPE_CHECKING:
    from shardnet.model.vision.picture import PictureEncoder
    from shardnet.stage.file_table import FileTable
    from shardnet.stage.kept_linears import KeptLinears
    from shardnet.stage.moves.slot_moves import Moves
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
    from shardnet.stage.stage_audit import StageAudit
    from shardnet.stage.streaming.streamed_linear import ExpertPool


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
            form=replace_struct(own.form, context=order.form.context),
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
    for wrong bits, None where nothing does. `experts` are those of streamed layers, `tables` are
    looked up in files. A stage that has grown has `parts`, which were loaded one by one.
    """

    order: StageOrder
    stamp: Stamp
    compute: StageCompute
    weight_bytes: int
    room_blocks: int
    room_states: int
    load_s: float
    kernel: str
    exact_rows: int
    prefixes: StagePrefixes | None = None
    arithmetic: str = ""
    shares_blocks: bool = False
    moves: Moves | None = None
    linears: KeptLinears | None = None
    audit: StageAudit | None = None
    experts: ExpertPool | None = None
    tables: tuple[FileTable, ...] = ()
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
        """The bytes of its weights, and of rows that other nodes give, on each device of the node,
        by the device's place.
        """
        n_bytes: Counter[int] = Counter()
        for part in self.parts or (self,):
            places = [device.place for device in part.order.devices]
            for place in places:
                n_bytes[place] += part.weight_bytes // len(places)
            n_bytes[places[0]] += max((table.kept_bytes for table in part.tables), default=0)
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
        if order.parts and not alike.shards and alike.device.driver == order.device.driver:
            alike = replace(alike, devices=order.devices)
        is_part = whole.start <= own.start and own.end <= whole.end
        if self.moves is None or order.n_streamed or order.share or alike != order or not is_part:
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


Progress = Callable[[int, int], None]
LoadPart = Callable[[StageOrder, int, Progress, KeptWeights | None], LoadedStage]
"""Loads a part of a stage into so many bytes of its device, with what was kept there."""


class JoinedCompute:
    """StageCompute over `parts`, one behind the other; they exchange activations in `own`."""

    def __init__(self, parts: Sequence[StageCompute], own: WireDType) -> None:
        self._parts = tuple(parts)
        self._ahead = [
            part for part in parts if isinstance(part, AheadCompute) and part.reads_ahead
        ]
        self._own = own

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now: the same in every part."""
        return self._parts[0].used_blocks

    @property
    def encoder(self) -> PictureEncoder | None:
        """The tower of the first part, None without one."""
        return getattr(self._parts[0], "encoder", None)

    @property
    def pictures(self) -> PictureStore | None:
        """Where the first part finds the rows of pictures."""
        return getattr(self._parts[0], "pictures", None)

    @pictures.setter
    def pictures(self, store: PictureStore | None) -> None:
        if hasattr(self._parts[0], "pictures"):
            self._parts[0].pictures = store

    @property
    def on_any_thread(self) -> bool:
        """See AnyThreadCompute."""
        return all(
            isinstance(part, AnyThreadCompute) and part.on_any_thread for part in self._parts
        )

    @property
    def reads_ahead(self) -> bool:
        """See AheadCompute."""
        return bool(self._ahead)

    def read_ahead(self, batch: MicroBatch) -> None:
        """See AheadCompute."""
        for part in self._ahead:
            part.read_ahead(batch)

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """See StageCompute."""
        *others, last = self._parts
        for part in others:
            if isinstance(part, PartCompute):
                part.hand_over(received)
            else:
                part.use_wire(self._own, received)
            received = self._own
        last.use_wire(sent, received)

    def operate(self, operation: SlotOperation) -> None:
        """See StageCompute."""
        for part in self._parts:
            part.operate(operation)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """See StageCompute."""
        first, *others = self._parts
        results = [first.compute(batch, activations)]
        for part in others:
            given = results[-1]
            assert isinstance(given, Activations), "only the last part has the head"
            results.append(part.compute(batch, given))
        routing = tuple(chain.from_iterable(result.routing for result in results))
        blocks = tuple(chain.from_iterable(result.blocks for result in results))
        return replace_struct(results[-1], routing=routing, blocks=blocks)

    def reset(self) -> None:
        """See StageCompute."""
        for part in self._parts:
            part.reset()


def join(order: StageOrder, stages: Sequence[LoadedStage]) -> LoadedStage:
    """Join loaded stages of neighbouring layers to that of `order`.

    The KV room of the one that was loaded last is what all of them on one device share. No prefixes
    are kept on disk. Raises CapacityError if that room does not hold a context.
    """
    from shardnet.stage.moves.slot_moves import JoinedMoves, SlotMoves

    stages = sorted(stages, key=lambda stage: stage.order.layers.start)
    parts = [part for stage in stages for part in stage.parts or (stage,)]
    moves = [part.moves for part in parts if isinstance(part.moves, SlotMoves)]
    assert len(moves) == len(parts), "what cannot be moved is not joined"
    joined_moves = JoinedMoves(moves)
    block_bytes: Counter[int] = Counter()
    state_bytes: Counter[int] = Counter()
    for part, own in zip(parts, moves, strict=True):
        block_bytes[part.order.device.place] += own.block_bytes
        state_bytes[part.order.device.place] += own.state_bytes
    room_blocks = min(
        part.room_blocks * own.block_bytes // block_bytes[part.order.device.place]
        if own.block_bytes
        else part.room_blocks
        for part, own in zip(parts, moves, strict=True)
    )
    room_states = min(
        max(
            LEAST_STATES, part.room_states * own.state_bytes // state_bytes[part.order.device.place]
        )
        if own.state_bytes
        else part.room_states
        for part, own in zip(parts, moves, strict=True)
    )
    if room_blocks < blocks_for(order.form.context):
        raise CapacityError(
            f"{order.layers.words} together have room for {room_blocks} KV blocks, fewer than a "
            f"context of {order.form.context} takes",
            remedy="lower --context or raise --memory",
        )
    return LoadedStage(
        order=order,
        stamp=parts[-1].stamp,
        compute=JoinedCompute([part.compute for part in parts], WireDType.own(order.form.dtype)),
        weight_bytes=sum(part.weight_bytes for part in parts),
        room_blocks=room_blocks,
        room_states=room_states,
        load_s=sum(part.load_s for part in parts),
        kernel=parts[0].kernel,
        exact_rows=min(part.exact_rows for part in parts),
        shares_blocks=all(part.shares_blocks for part in parts),
        moves=joined_moves,
        parts=tuple(parts),
    )


def load_by_device(
    order: StageOrder,
    memory_bytes: Sequence[int],
    load_part: LoadPart,
    progress: Progress,
    kept: Sequence[KeptWeights] = (),
) -> LoadedStage:
    """Load the parts of a stage, each onto its device, and join them.

    `memory_bytes` are what each of the node's devices has for it. `load_part` loads one part into
    so much, with what was `kept` on its device; it is given what to call with the bytes that are
    done and all there are. Raises what loading raises, and CapacityError as `join`.
    """
    stages: list[LoadedStage] = []
    left_bytes = [*memory_bytes]
    kept_at = {each.order.device.place: each for each in reversed(kept)}
    del kept  # what a part does not take is to be freed
    done_bytes = 0
    for part in order.by_device:
        sizes = [0, 0]

        def told(done: int, total: int, sizes: list[int] = sizes, before: int = done_bytes) -> None:
            sizes[:] = done, total
            progress(before + done, before + total)

        sizes_left = [left_bytes[device.place] for device in part.devices]
        room_bytes, first = len(sizes_left) * min(sizes_left), part.device  # shares are equal
        with on_cores(first.cores):  # what a thread touches first lies in the memory of its core
            own = kept_at.pop(first.place, None)
            stages.append(load_part(part, room_bytes, told, own))
            del own
        for place, n_bytes in stages[-1].weight_bytes_by_place.items():
            left_bytes[place] -= n_bytes
        done_bytes += sizes[1]
    return join(order, stages) if order.parts else stages[0]


def computes_by_device(stage: LoadedStage) -> list[tuple[int, StageCompute]]:
    """List the devices of a stage in the order of its layers, each with what it computes there.

    A device is the node's first, second and so on, and comes twice if other layers lie between.
    """
    own = WireDType.own(stage.order.form.dtype)
    parts = groupby(stage.parts or (stage,), key=lambda part: part.order.device.place)
    lanes = [(place, [part.compute for part in neighbours]) for place, neighbours in parts]
    if len(lanes) == 1:
        return [(lanes[0][0], stage.compute)]
    return [
        (place, computes[0] if len(computes) == 1 else JoinedCompute(computes, own))
        for place, computes in lanes
    ]
