"""What the first shard of a stage asks of the others, which do as it does.

Knows calls and their order. Must not know processes, nor how a call travels: runtime/shards does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.types import MicroBatch, SlotId


class Followers(Protocol):
    """The shards of a stage but the first. Called on the compute thread only.

    Nothing is waited for but room for the call. Raises LostShardError once a shard is lost.
    """

    def run(self, batch: MicroBatch, hidden: Tensor | None, pictures: PictureRows | None) -> None:
        """Have them run a micro-batch through their layers, as StageModel.run_alone does.

        Encoded rows of pictures are not sent: a first stage that is cut has none.
        """

    def logits(self, rows: Tensor) -> None:
        """Have them apply norm and LM head to rows [R, E]."""

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Have them free blocks of a slot, as KvCache.trim does."""

    def copy(self, source: SlotId, target: SlotId, n_positions: int) -> None:
        """Have them copy positions of a slot, as KvCache.copy does."""

    def clear(self) -> None:
        """Have them free all slots."""

    def adopt(self, slot: SlotId, contents: SlotContents, n_blocks: int) -> None:
        """Have a slot hold `contents`, of which each takes the KV heads that it has."""

    def read(
        self, slot: SlotId, layer: int, begin: int, end: int, *, values: bool
    ) -> Sequence[Tensor]:
        """Return the keys or values [own KV heads, end - begin, W] that each has of a layer.

        Positions are counted from the first one that the slot holds.
        """

    def fail(self) -> None:
        """Say that the first shard cannot go on: the others must not wait for it."""
