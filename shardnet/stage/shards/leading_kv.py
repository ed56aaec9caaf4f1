"""The KV cache of a shard: it has the keys and values of some heads.

The first shard of a stage speaks for all: what goes into its cache goes into every shard's, and
what is taken out is that of all heads, as a whole stage has it. So slots move between sharded and
whole stages. What the first shard asks of the others is a protocol here; how a call travels is a
matter of runtime/shards. Must not know processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.model.shards.cut import Cut
from shardnet.slot_operations import SlotMethod
from shardnet.types import MicroBatch, SlotId, StateId


class LeadingKvCache(KvCache):
    """The KV cache of a stage's first shard."""

    is_cut = True

    def __init__(self, *arguments: Any, cut: Cut, followers: Followers) -> None:
        """Take what KvCache takes, for the KV heads of the first shard."""
        super().__init__(*arguments)
        self._cut = cut
        self._followers = followers

    @property
    def whole_kv_heads(self) -> int:
        """See KvCache."""
        return self._cut.n_kv_heads

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """See KvCache."""
        super().trim(slot, n_positions)
        self._followers.change_slots("trim", slot, n_positions)

    def copy(
        self, source: SlotId, target: SlotId, n_positions: int, state: StateId | None = None
    ) -> None:
        """See KvCache."""
        super().copy(source, target, n_positions, state)
        self._followers.change_slots("copy", source, target, n_positions, state)

    def keep_state(self, slot: SlotId, n_positions: int, state: StateId) -> None:
        """See KvCache."""
        super().keep_state(slot, n_positions, state)
        self._followers.change_slots("keep_state", slot, n_positions, state)

    def drop_states(self, states: Sequence[StateId]) -> None:
        """See KvCache."""
        super().drop_states(states)
        self._followers.change_slots("drop_states", [*states])

    def rest(self, slot: SlotId) -> None:
        """See KvCache."""
        super().rest(slot)
        self._followers.change_slots("rest", slot)

    def clear(self) -> None:
        """See KvCache."""
        super().clear()
        self._followers.change_slots("clear")

    def adopt(self, slot: SlotId, contents: SlotContents, n_blocks: int) -> None:
        """See KvCache."""
        super().adopt(slot, own_heads(contents, self._cut), n_blocks)
        self._followers.adopt(slot, contents, n_blocks)

    def contents(self, slot: SlotId) -> SlotContents:
        """See KvCache: keys and values of all heads, each asked for when it is used."""
        own = super().contents(slot)
        return WholeContents(
            keys=cast(Any, _Layers(self, slot, own, values=False)),  # as a list is read
            values=cast(Any, _Layers(self, slot, own, values=True)),
            firsts=[own.first(layer) for layer in range(len(own.keys))],
            states=own.states,
            own=own,
            share=Fraction(self.n_kv_heads, self.whole_kv_heads),
        )

    def whole_rows(
        self, slot: SlotId, own: SlotContents, layer: int, rows: tuple[int, int], *, values: bool
    ) -> Tensor:
        """Join what all shards have of a layer's rows, counted from the first one of the slot."""
        first = own.first(layer)
        mine = own.rows(layer, first + rows[0], first + rows[1], values=values)
        if not self._cut.cuts_heads or not mine.numel():
            return mine
        parts = [mine, *self._followers.read(slot, layer, *rows, values=values)]
        ranges = [self._cut.kv_heads_of(index) for index in range(self._cut.size)]
        distinct = [index for index, heads in enumerate(ranges) if ranges.index(heads) == index]
        return torch.cat([parts[index] for index in distinct])


class _Layers(Sequence[Tensor]):
    """Keys or values of all heads, layer by layer."""

    def __init__(
        self, kv: LeadingKvCache, slot: SlotId, own: SlotContents, *, values: bool
    ) -> None:
        self._kv, self._slot, self._own, self._is_values = kv, slot, own, values

    def __len__(self) -> int:
        return len(self._own.keys)

    def __getitem__(self, layer: Any) -> Any:
        return self.rows(layer, 0, self._own.end(layer) - self._own.first(layer))

    def rows(self, layer: int, begin: int, end: int) -> Tensor:
        """Return some rows of one layer."""
        return self._kv.whole_rows(
            self._slot, self._own, layer, (begin, end), values=self._is_values
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeContents(SlotContents):
    """What all shards hold of a slot; `own` is what the first one holds."""

    own: SlotContents
    share: Fraction
    """What of all heads the own ones are."""

    def row_bytes(self, layers: Sequence[int]) -> int:
        """See SlotContents."""
        return int(self.own.row_bytes(layers) / self.share)

    def _pieces(
        self, layers: Sequence[int], begin: int, end: int, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        offset = 0
        for layer in layers:
            first = self.firsts[layer]
            for tensors, own in (
                (cast(_Layers, self.keys), self.own.keys),
                (cast(_Layers, self.values), self.own.values),
            ):
                if not own[layer].shape[2]:
                    continue
                held = tensors.rows(layer, begin - first, end - first)
                n_bytes = held.numel() * held.element_size()
                yield flat[offset : offset + n_bytes].view(held.dtype).view(held.shape), held
                offset += n_bytes


def own_heads(contents: SlotContents, cut: Cut) -> SlotContents:
    """Return what a shard has of contents with all KV heads, in memory of its own."""
    own = slice(*cut.kv_heads) if cut.cuts_heads else slice(None)

    def cut_out(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor[own].clone() if tensor.shape[0] else tensor for tensor in tensors]

    return replace(contents, keys=cut_out(contents.keys), values=cut_out(contents.values))


class Followers(Protocol):
    """The shards of a stage but the first. Called on the compute thread only.

    Nothing is waited for but room for the call. Raises LostShardError once a shard is lost.
    """

    def run(self, batch: MicroBatch, hidden: Tensor | None, pictures: PictureRows | None) -> None:
        """Have them run a micro-batch through their layers, as StageModel.run_alone does."""

    def logits(self, rows: Tensor) -> None:
        """Have them apply norm and LM head to rows [R, E]."""

    def change_slots(self, method: SlotMethod, *arguments: int | list[int] | None) -> None:
        """Have them call this method of their KV caches."""

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
