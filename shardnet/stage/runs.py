"""A micro-batch on its way through the layers of a stage, whole or in two parts.

Rows with adapters and rows without take different ways through the layers: the library's joined
calls compute without adapters only, and a row must have the same bits whoever stands beside it. So
a step of both kinds goes through the layers in two parts. Must not know layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from shardnet.errors import RemoteProtocolError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.slot_operations import AdapterUse
from shardnet.stage.adapters.adapted_linear import RowsOfAdapter
from shardnet.types import MicroBatch


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-batch on its way through the layers; see StageModel.run.

    `states` collects hidden states [T, E] by how many of the model's layers have computed them, for
    the numbers `kept_states` that this stage passes. Its keys and values are kept in `kv`, None for
    the stage's own. `adapters` are those of each row group, () for none of any. `pictures` are
    those of its rows, None for none. `choices` are the positions that layers have chosen, from the
    last one before the stage on: see Choose.
    """

    batch: MicroBatch
    hidden: Tensor | None
    experts: dict[int, Tensor] | None = None
    kept_states: frozenset[int] = frozenset()
    kv: KvCache | None = None
    states: dict[int, Tensor] = msgspec.field(default_factory=dict)
    adapters: tuple[tuple[AdapterUse, ...], ...] = ()
    pictures: PictureRows | None = None
    choices: list[Tensor | None] = msgspec.field(default_factory=list)

    @property
    def is_adapted(self) -> bool:
        """Whether any row has an adapter."""
        return any(self.adapters)

    def split(self) -> list[Run]:
        """Return this run, or where only some of its rows have adapters, one of each kind."""
        kinds = [bool(uses) for uses in self.adapters]
        if all(kinds) or not any(kinds):
            return [self]
        return [self._part(kinds, kind) for kind in (False, True)]

    def _part(self, kinds: Sequence[bool], kind: bool) -> Run:
        places = [place for place, each in enumerate(kinds) if each is kind]
        rows = self._rows(kinds, kind)
        return Run(
            batch=MicroBatch(
                epoch=self.batch.epoch,
                step=self.batch.step,
                groups=tuple(self.batch.groups[place] for place in places),
                token_ids=[self.batch.token_ids[row] for row in rows],
            ),
            hidden=None if self.hidden is None else self.hidden[rows],
            experts=None if self.experts is None else {},
            kv=self.kv,
            kept_states=self.kept_states,
            adapters=tuple(self.adapters[place] for place in places),
            pictures=None if self.pictures is None else self.pictures.take(rows),
            choices=[None if each is None else each[rows] for each in self.choices],
        )

    def _rows(self, kinds: Sequence[bool], kind: bool) -> list[int]:
        """Return the rows of the groups of one kind."""
        rows: list[int] = []
        start = 0
        for group, each in zip(self.batch.groups, kinds, strict=True):
            if each is kind:
                rows += range(start, start + group.n_rows)
            start += group.n_rows
        return rows

    def join(self, parts: Sequence[Run], outputs: Sequence[Tensor]) -> Tensor:
        """Put together what the parts of `split` gave: hidden states [T, E] in row order.

        Experts and states that they have collected are collected here.
        """
        if len(parts) == 1:
            return outputs[0]
        kinds = [bool(uses) for uses in self.adapters]
        order = self._rows(kinds, False) + self._rows(kinds, True)
        places = torch.tensor(order, device=outputs[0].device).argsort()
        if self.experts is not None:
            for layer in parts[0].experts or {}:
                found = [part.experts[layer] for part in parts if part.experts is not None]
                self.experts[layer] = torch.cat(found)[places]
        if parts[0].choices:
            chosen = [part.choices[-1] for part in parts]
            width = max((len(each[0]) for each in chosen if each is not None), default=0)
            rows = [
                part.all_positions(width) if each is None else each
                for part, each in zip(parts, chosen, strict=True)
            ]
            self.choices.append(torch.cat(rows)[places] if width else None)
        for number in parts[0].states:
            self.states[number] = torch.cat([part.states[number] for part in parts])[places]
        return torch.cat([*outputs])[places]

    def all_positions(self, width: int) -> Tensor:
        """Return all that rows see, at most `width` positions, as a choice: int32 [T, width]."""
        own = [g.position + row for g in self.batch.groups for row in range(g.n_rows)]
        every, ends = torch.arange(width, dtype=torch.int32), torch.tensor(own)[:, None]
        return torch.where(every <= ends, every, -1)

    def rows_of_adapters(
        self, known: frozenset[str], device: torch.device
    ) -> tuple[RowsOfAdapter, ...]:
        """Return the rows of each adapter, in the order of their ids.

        Raises RemoteProtocolError for an adapter that is not among the `known` ones.
        """
        if not self.is_adapted:
            return ()
        found: dict[str, list[tuple[int, float]]] = {}
        start = 0
        for group, uses in zip(self.batch.groups, self.adapters, strict=True):
            for use in uses:
                rows = range(start, start + group.n_rows)
                found.setdefault(use.adapter_id, []).extend((row, use.scale) for row in rows)
            start += group.n_rows
        unknown = found.keys() - known
        if unknown:
            raise RemoteProtocolError(
                f"step {self.batch.step} has rows with adapter {min(unknown)[:12]}, which is not "
                "loaded here"
            )
        return tuple(
            _rows_of(name, rows, is_all=len(rows) == start, device=device)
            for name, rows in sorted(found.items())
        )


def _rows_of(
    adapter_id: str, rows: Sequence[tuple[int, float]], *, is_all: bool, device: torch.device
) -> RowsOfAdapter:
    """Describe rows with an adapter, given with their scales; `is_all` says that no other is."""
    index, scales = None, None
    if not is_all:
        index = torch.tensor([row for row, _ in rows], device=device)
    if any(scale != 1 for _, scale in rows):
        scales = torch.tensor([[scale] for _, scale in rows], device=device)
    return RowsOfAdapter(adapter_id=adapter_id, index=index, scales=scales)


def sampled_rows(rows: Tensor, batch: MicroBatch) -> Tensor:
    """Select the last `n_sampled` rows of each group from [T, E]: [n_sampled, E]."""
    if batch.n_sampled == batch.n_rows:
        return rows
    kept = []
    end = 0
    for group in batch.groups:
        end += group.n_rows
        kept.append(rows[end - group.n_sampled : end])
    return torch.cat(kept)
