"""What only the last stage does: it draws tokens, and gives what else its rows were asked for.

Knows slots, the sequences that own them and the tokens at their positions. Must not know layers,
links or threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from shardnet.model.sampling.penalties import RowContext, needs_context
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.model.sampling.token_history import TokenHistory
from shardnet.runtime.stage.compute import Samples
from shardnet.runtime.stage.mtp_drafts import MtpDrafts
from shardnet.runtime.stage.row_outputs import Given, GroupRows, RowOutputs, TailModel
from shardnet.slot_operations import OpenSequence
from shardnet.stage.runs import sampled_rows
from shardnet.types import MicroBatch, RowGroup, SlotId

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
        logits = self.model.logits(sampled_rows(hidden, batch))  # [n_sampled, V]
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
                self._outputs.add(owner, part, given)
            drawn = self._sample_rows(owner, group)
            if masks:
                drawn = [
                    replace(row, mask=masks.get(number))
                    for number, row in enumerate(drawn, start=len(rows))
                ]
            rows += drawn
            start = end
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
