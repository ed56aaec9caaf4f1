"""What rows give: tokens on the last stage, prompt logprobs, logits, hidden states of any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from shardnet.errors import WrongValuesError
from shardnet.model.drivers.driver import Array
from shardnet.model.kernels.codec import to_bytes
from shardnet.model.sampling.penalties import (
    RowContext,
    TokenHistory,
    changes_logits,
    needs_context,
)
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.output_params import OutputKind
from shardnet.runtime.stage.compute import Samples, ScoredToken
from shardnet.runtime.stage.mtp_drafts import MtpDrafts
from shardnet.slot_operations import OpenSequence
from shardnet.stage.runs import sampled_rows
from shardnet.types import MicroBatch, RowGroup, SlotId
from shardnet.wire.payloads.rows import RowBlock

_PIECE_ROWS = 64
"""Rows whose logits are computed at once: with 128 000 columns they take 33 MB."""


class TailModel(Protocol):
    """What the last stage computes of hidden states [R, E]."""

    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and LM head: float32 [R, V]."""

    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm: [R, E]."""


class GroupRows(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a step on the tail: its token ids and hidden states [n_rows, E].

    `logits` are those of its last `n_sampled` rows, float32 [n_sampled, V].
    """

    group: RowGroup
    token_ids: Sequence[int]
    hidden: Tensor
    logits: Tensor


@dataclass(slots=True, kw_only=True)
class Given:
    """What came of a step's rows."""

    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    blocks: list[RowBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    """The logits [1, V] of a slot's last prompt row; its successor comes with the next step."""

    position: int
    logits: Tensor


class RowOutputs:
    """The outputs of the sequences that asked for some."""

    def __init__(self, model: TailModel, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler
        self._carried: dict[SlotId, _Carried] = {}

    def forget(self, slot: SlotId) -> None:
        """Drop what is kept for the slot."""
        self._carried.pop(slot, None)

    def clear(self) -> None:
        """Drop what is kept for any slot."""
        self._carried.clear()

    def add(self, owner: OpenSequence, rows: GroupRows, given: Given) -> None:
        """Add to `given` what the group's rows give, as its owner asked.

        The logits of sampled rows are taken as they are; the other rows' are computed apart from
        them, so that asking changes no token.
        """
        self._score_carried(owner, rows, given)
        for piece in _pieces(rows.group):
            self._add_piece(owner, rows, piece, given)

    def _add_piece(self, owner: OpenSequence, rows: GroupRows, piece: range, given: Given) -> None:
        group, outputs = rows.group, owner.outputs
        hidden = rows.hidden[piece.start - group.position : piece.stop - group.position]
        scores = outputs.n_prompt_logprobs is not None and piece.start < owner.n_prompt - 1
        first = outputs.first_row(OutputKind.LOGITS, owner.n_prompt)
        if scores or (first is not None and first < piece.stop):
            first_sampled = group.position + group.n_rows - group.n_sampled
            is_sampled = piece.start >= first_sampled
            logits = rows.logits if is_sampled else self._model.logits(hidden)
            if scores:
                self._score(owner, rows, piece, logits, given)
            if first is not None:
                _add_block(given, OutputKind.LOGITS, owner, piece, first, logits)
        first = outputs.first_row(OutputKind.HIDDEN, owner.n_prompt)
        if first is not None and first < piece.stop:
            states = hidden if outputs.before_norm else self._model.normed(hidden)
            _add_block(given, OutputKind.HIDDEN, owner, piece, first, states.float())

    def _score(
        self, owner: OpenSequence, rows: GroupRows, piece: range, logits: Tensor, given: Given
    ) -> None:
        """Score the prompt's tokens behind the rows of a piece; the last may have to wait."""
        group = rows.group
        last = min(piece.stop, owner.n_prompt - 1)  # behind the prompt's end comes output
        targets = rows.token_ids[piece.start + 1 - group.position : last + 1 - group.position]
        self._add_scores(owner, piece.start + 1, targets, logits[: len(targets)], given)
        if len(targets) < last - piece.start:
            self._carried[group.slot] = _Carried(position=last - 1, logits=logits[-1:].clone())

    def _score_carried(self, owner: OpenSequence, rows: GroupRows, given: Given) -> None:
        carried = self._carried.pop(rows.group.slot, None)
        if carried is not None and carried.position == rows.group.position - 1:
            self._add_scores(owner, rows.group.position, rows.token_ids[:1], carried.logits, given)

    def _add_scores(
        self,
        owner: OpenSequence,
        position: int,
        token_ids: Sequence[int],
        logits: Tensor,
        given: Given,
    ) -> None:
        if not token_ids:
            return
        n_top = owner.outputs.n_prompt_logprobs or 0
        given.prompt_logprobs += [
            ScoredToken(sequence_id=owner.sequence_id, position=position + index, logprobs=logprobs)
            for index, logprobs in enumerate(self._sampler.logprobs(logits, token_ids, n_top))
        ]


def layer_blocks(
    batch: MicroBatch, owners: Mapping[SlotId, OpenSequence], states: Mapping[int, Tensor]
) -> list[RowBlock]:
    """Return what a stage's hidden states [T, E], by number of layers, give the rows that ask."""
    given = Given()
    start = 0
    for group in batch.groups:
        owner = owners[group.slot]
        first = owner.outputs.first_row(OutputKind.HIDDEN, owner.n_prompt)
        if first is not None:
            piece = range(group.position, group.position + group.n_rows)
            for number in owner.outputs.hidden_layers:
                if number in states:
                    rows = states[number][start : start + group.n_rows].float()
                    _add_block(given, OutputKind.HIDDEN, owner, piece, first, rows, number)
        for number in owner.draft_layers:
            if number in states:
                piece = range(group.position, group.position + group.n_rows)
                rows = states[number][start : start + group.n_rows].to(torch.bfloat16)
                _add_block(given, OutputKind.STATES, owner, piece, owner.draft_from, rows, number)
        start += group.n_rows
    return given.blocks


def _pieces(group: RowGroup) -> Iterator[range]:
    """Cut a group's positions into pieces, the sampled rows one of them."""
    end = group.position + group.n_rows
    first_sampled = end - group.n_sampled
    for start in range(group.position, first_sampled, _PIECE_ROWS):
        yield range(start, min(start + _PIECE_ROWS, first_sampled))
    if group.n_sampled:
        yield range(first_sampled, end)


def _add_block(
    given: Given,
    kind: OutputKind,
    owner: OpenSequence,
    piece: range,
    first: int,
    rows: Tensor,
    layer: int | None = None,
) -> None:
    """Add the rows of a piece from position `first` on: `rows` is [len(piece), width]."""
    start = max(first, piece.start)
    if start < piece.stop:
        given.blocks.append(
            RowBlock(
                sequence_id=owner.sequence_id,
                kind=kind,
                position=start,
                width=rows.shape[1],
                payload=to_bytes(rows[start - piece.start :]),
                layer=layer,
            )
        )


Owners = Mapping[SlotId, OpenSequence]


@dataclass(eq=False, repr=False)
class SamplingStage:
    """The sampler and the token history of a stage that is the tail.

    `owners` are the sequences that own slots now: the stage keeps them. `drafts` drafts for them,
    None where nothing can.
    """

    model: TailModel
    sampler: Sampler
    owners: Owners
    drafts: MtpDrafts | None = None
    best: Callable[[Tensor], Array | None] = lambda _: None
    """See StageModel.best."""

    def __post_init__(self) -> None:
        self._history = TokenHistory()
        self._outputs = RowOutputs(self.model, self.sampler)

    def keep(self, slot: SlotId, n_positions: int, source: SlotId | None) -> None:
        """Keep what is known of the slot's first positions, its own or copied from `source`."""
        if source is not None:
            self._history.copy(source, slot, n_positions)
        self._history.trim(slot, n_positions)
        self._outputs.forget(slot)
        if self.drafts is not None:
            self.drafts.keep(slot, n_positions, source)

    def restore(self, slot: SlotId, token_ids: Sequence[int]) -> None:
        """Take the tokens at the first positions of an empty slot, whose rows are not computed."""
        self._history.write(slot, 0, token_ids)
        if self.drafts is not None:
            self.drafts.restore(slot, len(token_ids))

    def clear(self) -> None:
        """Forget all slots."""
        self._history.clear()
        self._outputs.clear()
        if self.drafts is not None:
            self.drafts.clear()

    def answer(self, batch: MicroBatch, hidden: Tensor) -> Samples:
        """Draw a token for each of the last `n_sampled` rows of the batch's groups.

        `hidden` is [T, E], what the last layer gave. The rows' own tokens become part of their
        history.
        """
        sampled = sampled_rows(hidden, batch)
        best = self.best(sampled) if self._is_greedy(batch) else None
        result = None if best is None else self.sampler.take_best(best)
        logits = self.model.logits(sampled) if result is None else sampled[:0]  # [n_sampled, V]
        rows: list[SampleRow] = []
        masks = {each.row: each.mask for each in batch.masks}
        given = Given()
        start = 0
        for group in batch.groups:
            end = start + group.n_rows
            token_ids = batch.token_ids[start:end]
            self._history.write(group.slot, group.position, token_ids)
            owner = self.owners[group.slot]
            if owner.outputs.asks:
                part = GroupRows(
                    group=group,
                    token_ids=token_ids,
                    hidden=hidden[start:end],
                    logits=logits[len(rows) : len(rows) + group.n_sampled],
                )
                try:
                    self._outputs.add(owner, part, given)
                except WrongValuesError as error:  # its rows are not all sampled ones
                    error.sequence = owner.sequence_id
                    raise
            drawn = self._sample_rows(owner, group)
            if masks:
                drawn = [
                    replace(row, mask=masks.get(number))
                    for number, row in enumerate(drawn, start=len(rows))
                ]
            rows += drawn
            start = end
        if result is None:
            result = self.sampler.sample(logits, rows)
        drafts = None
        if self.drafts is not None:
            drafts = self.drafts.draft(batch, hidden, result.token_ids, self.owners, self._history)
        return Samples(
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            prompt_logprobs=given.prompt_logprobs,
            blocks=given.blocks,
            drafts=drafts or (),
        )

    def _is_greedy(self, batch: MicroBatch) -> bool:
        """Whether all that is asked for is the token with the largest logit of each row."""
        owners = [self.owners[group.slot] for group in batch.groups]
        others = [each for each in owners if each.sampling.temperature or each.outputs.asks]
        params = [each.sampling for each in owners]
        is_plain = not any(changes_logits(one) or one.n_logprobs is not None for one in params)
        return is_plain and not others and not batch.masks

    def _sample_rows(self, owner: OpenSequence, group: RowGroup) -> list[SampleRow]:
        end = group.position + group.n_rows
        positions = range(end - group.n_sampled, end)
        params = owner.sampling
        if not needs_context(params):
            return [SampleRow(params=params, position=position) for position in positions]
        return [
            SampleRow(
                params=params,
                position=position,
                context=RowContext(
                    tokens=self._history.tokens(group.slot, position + 1),
                    n_prompt=owner.n_prompt,
                    stop_ids=owner.stop_ids,
                ),
            )
            for position in positions
        ]
