"""The tail's drafts by the layer that predicts further tokens (MTP).

Knows the slots whose rows went through that layer, and how far. Must not know what becomes of the
drafts: the head sends them back as rows, or does not (design decision 5).

That layer takes the output at a position together with the token behind it. So the last row of a
step waits for the next one, unless it is sampled; a draft that was rejected was no such token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from shardnet.errors import NumericalError
from shardnet.model.sampling.penalties import RowContext, TokenHistory, needs_context
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.slot_operations import MAX_DRAFTS, OpenSequence
from shardnet.types import MicroBatch, RowGroup, SlotId
from shardnet.wire.messages.extras import Drafts

if TYPE_CHECKING:
    from shardnet.stage.stage_model import StageModel

_PATIENCE, _PAUSE = 2, 16
"""Where none was sent for more than two steps, drafts are made behind every 16th step."""
_JUDGED = 6
"""So many of the last drafts say how many are made: two more than were right at most. Where none
was, they count as not sent: what is sent is looked up."""
_RECENT = 8
"""Steps after which it counts no more how many drafts were in flight with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """What the layer takes [1, E] of the output at a slot's last position that counts.

    With `token_id` the layer has run there already; None where the token behind was not known.
    """

    position: int
    inputs: Tensor
    token_id: int | None


@dataclass(slots=True, kw_only=True)
class _Part:
    """Rows of one slot to be run: from `position` on, each with the token behind it."""

    group: RowGroup
    position: int
    inputs: list[Tensor] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.position + len(self.token_ids)

    @property
    def rows(self) -> RowGroup:
        """The rows as a group."""
        n_rows = len(self.token_ids)
        return msgspec.structs.replace(self.group, position=self.position, n_rows=n_rows)


@dataclass(slots=True, kw_only=True)
class _Drafting:
    """A sequence that gets drafts: `hidden` [1, E] is what the layer gave at the last row."""

    owner: OpenSequence
    part: _Part
    most: int
    hidden: Tensor
    token_ids: list[int] = field(default_factory=list)


class MtpDrafts:
    """Runs the rows of every step through that layer, and drafts for sequences that ask."""

    def __init__(self, model: StageModel, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler
        self._ends: dict[SlotId, int] = {}
        """The positions of each slot, from 0 on, that the layer has keys and values of."""
        self._last: dict[SlotId, _Last] = {}
        self._n_without: dict[SlotId, int] = {}
        """The last steps of each slot that sampled a token and had no drafts."""
        self._n_flown: dict[SlotId, deque[int]] = {}
        """How many drafts were in flight with each of the last steps of each slot, 0 for one that
        went behind none."""
        self._made: dict[SlotId, tuple[int, Sequence[int]]] = {}
        """The drafts made last for each slot, from a position on."""
        self._n_right: dict[SlotId, deque[int]] = {}
        """How many of the last ones of each slot were right, those not known yet among them."""

    def keep(self, slot: SlotId, n_positions: int, source: SlotId | None) -> None:
        """Keep what is known of the slot's first positions, its own or copied from `source`."""
        self._n_without.pop(slot, None)
        for counts in (self._n_flown, self._made, self._n_right):
            counts.pop(slot, None)
        if source is not None:
            self._ends[slot] = self._ends.get(source, 0)
        self._ends[slot] = min(self._ends.get(slot, 0), n_positions)
        last = self._last.get(slot)
        if last is not None and (source not in (None, slot) or last.position != n_positions - 1):
            del self._last[slot]

    def restore(self, slot: SlotId, n_positions: int) -> None:
        """Take an empty slot whose first positions have come from elsewhere, this layer's too."""
        self._last.pop(slot, None)
        self._ends[slot] = n_positions

    def clear(self) -> None:
        """Forget all slots."""
        self._n_without.clear()
        self._n_flown.clear()
        self._made.clear()
        self._n_right.clear()
        self._ends.clear()
        self._last.clear()

    def draft(
        self,
        batch: MicroBatch,
        hidden: Tensor,
        sampled: Sequence[int],
        owners: Mapping[SlotId, OpenSequence],
        history: TokenHistory,
    ) -> list[Drafts]:
        """Run the rows of a step, and draft behind the last token of its sequences.

        `hidden` is [T, E], what the last layer gave, `sampled` the tokens of its sampled rows;
        `history` has those of the rows.
        """
        parts, start, first = [], 0, 0
        for group in batch.groups:
            rows, end = slice(start, start + group.n_rows), first + group.n_sampled
            part = self._part(group, batch.token_ids[rows], hidden[rows], sampled[first:end])
            if part.token_ids:
                parts.append(part)
            start, first = rows.stop, end
        if not parts:
            return []
        groups = [part.rows for part in parts]
        ids = [token_id for part in parts for token_id in part.token_ids]
        inputs = torch.cat([row for part in parts for row in part.inputs])
        outputs = self._model.run_mtp(groups, ids, inputs)  # [T, E]
        drafting, end = [], 0
        for part in parts:
            end += len(part.token_ids)
            owner = owners[part.group.slot]
            most = min(owner.n_drafts, self._n_wanted(part.group))
            if most > 0:
                most = 1 + self._n_chained(part, most - 1)
                drafting.append(
                    _Drafting(owner=owner, part=part, most=most, hidden=outputs[end - 1 : end])
                )
        return self._drafts(drafting, history)

    def _part(
        self, group: RowGroup, token_ids: Sequence[int], hidden: Tensor, sampled: Sequence[int]
    ) -> _Part:
        """Take the rows of a group that are right and whose next token is known.

        What is known of the slot stays as it is where the group went behind a wrong draft.
        """
        slot, n_drafts = group.slot, max(0, group.n_sampled - 1)
        part, last = _Part(group=group, position=group.position), self._last.get(slot)
        if last is not None and last.position != group.position - 1:
            last = None
        if _is_behind(group) and (last is None or last.token_id != token_ids[0]):
            return part  # behind a wrong draft: the right rows are yet to come
        n_right = 0
        while n_right < n_drafts and token_ids[n_right - n_drafts] == sampled[n_right]:
            n_right += 1
        n_rows = group.n_rows - n_drafts + n_right
        inputs = self._model.mtp_inputs(hidden[:n_rows])
        following = [*token_ids[1:n_rows], *sampled[n_right : n_right + 1]]
        place, drafts = self._made.get(slot, (0, ()))
        if 0 <= (behind := place - group.position - 1) < len(following):
            pairs = enumerate(zip(drafts, following[behind:], strict=False))
            right = next((n for n, (draft, came) in pairs if draft != came), len(drafts))
            self._n_right.setdefault(slot, deque(maxlen=_JUDGED)).append(right)
        if last is not None and last.token_id != token_ids[0]:
            part.position -= 1
            part.inputs.append(last.inputs)
            part.token_ids.append(token_ids[0])
        self._last[slot] = _Last(
            position=group.position + n_rows - 1,
            inputs=inputs[-1:].clone(),
            token_id=following[-1] if len(following) == n_rows else None,
        )
        if self._ends.get(slot, 0) < part.position:  # what it would attend to is not there
            return _Part(group=group, position=group.position)
        part.inputs.append(inputs[: len(following)])
        part.token_ids += following
        self._ends[slot] = part.end
        return part

    def _n_wanted(self, group: RowGroup) -> int:
        """Count the drafts to make behind a group: one more than the head lately had in flight.

        That is enough for those in flight behind the group and a further frame. None where it has
        sent none for a while, but to let it measure again now and then.
        """
        if not group.n_sampled:
            return 0
        right = self._n_right.get(group.slot, ())
        longest = max(right) if len(right) == _JUDGED else MAX_DRAFTS
        is_sent = group.n_drafts > 0 and longest > 0
        n_without = 0 if is_sent else self._n_without.get(group.slot, 0) + 1
        self._n_without[group.slot] = n_without
        flown = self._n_flown.setdefault(group.slot, deque(maxlen=_RECENT))
        flown.append(group.n_drafts if _is_behind(group) else 0)
        n_most = max(group.n_drafts, *flown)
        is_wanted = n_without <= _PATIENCE or n_without % _PAUSE == 0
        return min(n_most + 1, longest + 2) if is_wanted else 0

    def _n_chained(self, part: _Part, most: int) -> int:
        """Count the positions behind a part's rows, up to `most`, for which the slot has room."""
        n_chained = 0
        while (
            n_chained < most
            and part.end + n_chained < self._model.context
            and self._model.kv.holds(part.group.slot, part.end + n_chained + 1)
        ):
            n_chained += 1
        return n_chained

    def _drafts(self, drafting: list[_Drafting], history: TokenHistory) -> list[Drafts]:
        """Draw the drafts of some sequences, each with the noise of its own position."""
        made = list(drafting)
        for place in range(max((one.most for one in drafting), default=0)):
            drafting = [one for one in drafting if one.most > place]
            if place:
                groups = [
                    msgspec.structs.replace(
                        one.part.group, position=one.part.end + place - 1, n_rows=1
                    )
                    for one in drafting
                ]
                ids = [one.token_ids[-1] for one in drafting]
                rows = torch.cat([one.hidden for one in drafting])
                outputs = self._model.run_mtp(groups, ids, rows)
                for number, one in enumerate(drafting):
                    one.hidden = outputs[number : number + 1]
            logits = self._model.mtp_logits(torch.cat([one.hidden for one in drafting]))
            try:
                drawn = self._sampler.sample(logits, [_row(one, history) for one in drafting])
            except NumericalError:  # a draft is not worth a step's failure
                break
            for one, token_id in zip(drafting, drawn.token_ids, strict=True):
                one.token_ids.append(token_id)
        for one in made:
            if one.token_ids:
                self._made[one.part.group.slot] = one.part.end + 1, one.token_ids
        return [
            Drafts(
                sequence_id=one.owner.sequence_id,
                position=one.part.end + 1,
                token_ids=one.token_ids,
            )
            for one in made
            if one.token_ids
        ]


def _is_behind(group: RowGroup) -> bool:
    """Say whether a group went behind drafts in flight: its first row is a draft too."""
    return group.n_drafts >= group.n_rows


def _row(one: _Drafting, history: TokenHistory) -> SampleRow:
    """Say how the token behind the drafts so far is drawn: as when it is verified."""
    end, owner = one.part.end, one.owner
    position = end + len(one.token_ids)
    params = msgspec.structs.replace(owner.sampling, n_logprobs=None)
    if not needs_context(params):
        return SampleRow(params=params, position=position)
    known = history.tokens(one.part.group.slot, end)
    tokens = np.append(known, [one.part.token_ids[-1], *one.token_ids]).astype(np.int32)
    context = RowContext(tokens=tokens, n_prompt=owner.n_prompt, stop_ids=owner.stop_ids)
    return SampleRow(params=params, position=position, context=context)
