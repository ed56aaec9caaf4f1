"""What only the last stage does: it draws tokens, and knows what stood before each row.

Knows slots, the sequences that own them and the tokens at their positions. Must not know layers,
links or threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardnet.model.penalties import RowContext, looks_back
from shardnet.model.sampler import Sampler, SampleRow
from shardnet.model.token_history import TokenHistory
from shardnet.runtime.compute import Samples, SequenceOpened
from shardnet.types import MicroBatch, RowGroup, SlotId

Owners = Mapping[SlotId, SequenceOpened]


class Tail:
    """The sampler and the token history of a stage that is the tail.

    `owners` are the sequences that own slots now: the stage keeps them.
    """

    def __init__(self, sampler: Sampler, owners: Owners) -> None:
        self._sampler = sampler
        self._owners = owners
        self.history = TokenHistory()

    def sample(self, batch: MicroBatch, logits: Tensor) -> Samples:
        """Draw a token for each of the last `n_sampled` rows of the batch's groups.

        `logits` is float32 [n_sampled, V]. The rows' own tokens become part of their history.
        """
        rows = []
        start = 0
        for group in batch.groups:
            end = start + group.n_rows
            self.history.write(group.slot, group.position, batch.token_ids[start:end])
            rows += self._sample_rows(group)
            start = end
        if not rows:
            return Samples(token_ids=(), logprobs=())
        result = self._sampler.sample(logits, rows)
        return Samples(token_ids=result.token_ids, logprobs=result.logprobs)

    def _sample_rows(self, group: RowGroup) -> list[SampleRow]:
        owner = self._owners[group.slot]
        end = group.position + group.n_rows
        positions = range(end - group.n_sampled, end)
        params = owner.sampling
        if not looks_back(params):
            return [SampleRow(params=params, position=position) for position in positions]
        return [
            SampleRow(
                params=params,
                position=position,
                context=RowContext(
                    tokens=self.history.tokens(group.slot, position + 1),
                    n_prompt=owner.n_prompt,
                    stop_ids=owner.stop_ids,
                ),
            )
            for position in positions
        ]
