"""A stage of several ranges of layers that were loaded one by one, each with a KV cache of its own.

Knows how their computes follow each other. Must not know why a stage has grown.

What passes from one part to the next is rounded as on a link in the ring's dtype, which rounds
nothing that the layers have not rounded (design decision 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace as replace_struct

from shardnet.errors import CapacityError
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.runtime.stage.compute import Activations, AnyThreadCompute, Samples, StageCompute
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.slot_operations import SlotOperation
from shardnet.types import MicroBatch, WireDType, blocks_for


class JoinedCompute:
    """StageCompute over `parts`, one behind the other; they exchange activations in `own`."""

    def __init__(self, parts: Sequence[StageCompute], own: WireDType) -> None:
        self._parts = tuple(parts)
        self._own = own

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now: the same in every part."""
        return self._parts[0].used_blocks

    @property
    def on_any_thread(self) -> bool:
        """See AnyThreadCompute."""
        return all(
            isinstance(part, AnyThreadCompute) and part.on_any_thread for part in self._parts
        )

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """See StageCompute."""
        borders = [received, *[self._own] * (len(self._parts) - 1), sent]
        for part, before, after in zip(self._parts, borders, borders[1:], strict=False):
            part.use_wire(after, before)

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

    The KV room of the one that was loaded last is what all of them share. No prefixes are kept on
    disk. Raises CapacityError if that room does not hold a context.
    """
    from shardnet.stage.joined_moves import JoinedMoves

    stages = sorted(stages, key=lambda stage: stage.order.layers.start)
    parts = [part for stage in stages for part in stage.parts or (stage,)]
    moves = [part.moves for part in parts if part.moves is not None]
    assert len(moves) == len(parts), "what cannot be moved is not joined"
    joined_moves = JoinedMoves(moves)
    block_bytes = joined_moves.block_bytes
    rooms = [
        part.room_blocks * moves.block_bytes // block_bytes if block_bytes else part.room_blocks
        for part, moves in zip(parts, moves, strict=True)
    ]
    room_blocks = min(rooms)
    if room_blocks < blocks_for(order.context):
        raise CapacityError(
            f"{order.layers.words} together have room for {room_blocks} KV blocks, fewer than a "
            f"context of {order.context} takes",
            remedy="lower --context or raise --memory",
        )
    return LoadedStage(
        order=order,
        stamp=parts[-1].stamp,
        compute=JoinedCompute([part.compute for part in parts], WireDType.own(order.dtype)),
        weight_bytes=sum(part.weight_bytes for part in parts),
        room_blocks=room_blocks,
        load_s=sum(part.load_s for part in parts),
        kernel=parts[0].kernel,
        exact_rows=min(part.exact_rows for part in parts),
        moves=joined_moves,
        parts=tuple(parts),
    )
