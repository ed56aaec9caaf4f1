"""Have the nodes of a ring to come made ready while the ring before it goes on.

Knows what each node is told: load beside the stage in use, then bring what sequences hold. Must not
know when a ring is replaced, nor hold or resume requests.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Sequence
from typing import Final

from msgspec.structs import replace

from shardnet.cluster.ring.ring import Ring
from shardnet.cluster.ring.stage_port import ask_all
from shardnet.errors import ShardnetError, UsageError
from shardnet.runtime.scheduling.sequences import ComputedSequence
from shardnet.types import BLOCK_POSITIONS, MAX_STORED_BLOCKS, SequenceId, SlotId
from shardnet.wire.messages.stages import KvMoved, KvSource, MoveKv, StageReady

MOST_POSITIONS: Final = BLOCK_POSITIONS * MAX_STORED_BLOCKS
"""A longer sequence is computed again: its tokens do not fit one message."""


class RingMoves:
    """Moves what `former` holds to the nodes of `ring`, which is not built yet.

    Nothing is brought from the nodes at addresses in `lost`: what they had has followed before.
    """

    def __init__(self, former: Ring, ring: Ring, lost: Collection[str] = ()) -> None:
        self._former = former
        self._ring = ring
        self._lost = lost
        self.n_bytes = 0
        """What went over links so far."""

    async def prepare(self) -> list[StageReady]:
        """Have every stage loaded beside the one in use.

        Raises the first error of any node; `drop` frees what the others have.
        """
        return await ask_all(
            [
                port.load(replace(self._ring.order(rank, shard), beside=True), lambda *_: None)
                for rank, shard, port in self._ring.seats
            ]
        )

    async def bring(
        self, sequences: Sequence[ComputedSequence], *, is_last: bool
    ) -> dict[SequenceId, int]:
        """Have every node bring what it will need of some sequences.

        Returns how many positions each has on all nodes now. A sequence that cannot be moved is
        left out: it is computed again. Before `is_last` none is whole where layers stay in place.
        """
        moved = await asyncio.gather(*(self._bring(one, is_last) for one in sequences))
        return {
            one.sequence_id: len(one.token_ids)
            for one, is_whole in zip(sequences, moved, strict=True)
            if is_whole
        }

    async def follow(self, rank: int, source: int, one: ComputedSequence) -> None:
        """Have the node `rank` bring what the node `source` of the former ring has of a sequence.

        Both go on meanwhile. Raises as `KvOrders.move`, and UsageError for too long a sequence.
        """
        if len(one.token_ids) > MOST_POSITIONS:
            raise UsageError(f"{len(one.token_ids)} positions do not fit one message")
        message = self._message(one, [self._sources()[source]], is_last=False)
        self.n_bytes += (await self._ring.ports[rank].order(message, KvMoved)).n_bytes

    async def forget(self, rank: int, sequence_id: SequenceId) -> None:
        """Have the node `rank` drop what it has brought of a sequence."""
        ended = ComputedSequence(sequence_id=sequence_id, slot=SlotId(0), token_ids=())
        await self._ring.ports[rank].order(self._message(ended, [], is_last=False), KvMoved)

    async def drop(self) -> None:
        """Free what was loaded and brought."""
        await self._ring.release()

    async def _bring(self, one: ComputedSequence, is_last: bool) -> bool:
        if len(one.token_ids) > MOST_POSITIONS:
            return False
        asked = []
        for _, shard, port in self._ring.seats:
            sources = [each for each in self._sources(shard) if each.address not in self._lost]
            asked.append(port.order(self._message(one, sources, is_last=is_last), KvMoved))
        try:
            answers = await ask_all(asked)
        except ShardnetError:
            return False
        self.n_bytes += sum(answer.n_bytes for answer in answers)
        return all(answer.is_whole for answer in answers)

    def _sources(self, shard: int = 0) -> list[KvSource]:
        """Return where a part of a stage finds its rows: at the part of that number, if any.

        Rows of other heads than its own are refused by their form.
        """
        spec = self._former.spec
        return [
            KvSource(layers=(layers.start, layers.end), address=nodes[min(shard, len(nodes) - 1)])
            for rank, layers in enumerate(spec.caching)
            for nodes in [spec.shard_nodes(rank)]
        ]

    def _message(
        self, one: ComputedSequence, sources: Sequence[KvSource], *, is_last: bool
    ) -> MoveKv:
        return MoveKv(
            request=0,
            ring=self._former.name,
            epoch=self._former.epoch,
            to=self._ring.name,
            sequence_id=one.sequence_id,
            slot=one.slot,
            token_ids=struct.pack(f"<{len(one.token_ids)}I", *one.token_ids),
            sources=[*sources],
            is_last=is_last,
            state=one.state,
        )
