"""Chooses the rows of the next step: newest tokens, their drafts, prompt chunks. Pure.

Must not know steps in flight, nor what is answered (scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final

import msgspec

from shardnet.constraints import MAX_STEP_MASK_BYTES, RowMask, TokenMask
from shardnet.runtime.scheduling.admission_queue import AdmissionQueue
from shardnet.runtime.scheduling.sequences import ALONE, Company, LiveSequence
from shardnet.runtime.scheduling.step_cost import StepLimits
from shardnet.slot_operations import whole_before
from shardnet.types import BLOCK_POSITIONS, MAX_ROWS_IN_FLIGHT, RowGroup

_UNNOTICED: Final = 0.03
"""The part by which drafts may lengthen the steps of those who have not asked for any."""
_MAY_TRAVEL: Final = attrgetter("may_travel")
_IS_DETERMINISTIC: Final = attrgetter("request.deterministic")


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The next `n_rows` rows of a sequence, the last of them `drafts`.

    `masks` are those of its sampled rows, if its output is constrained. All are drafts where they
    go behind others that are in flight.
    """

    sequence: LiveSequence
    n_rows: int
    drafts: tuple[int, ...] = ()
    masks: tuple[TokenMask | None, ...] = ()

    @property
    def is_behind(self) -> bool:
        """Whether they go behind drafts in flight."""
        return self.n_rows == len(self.drafts)

    def inputs(self, group: RowGroup) -> list[int]:
        """Return the token ids of the rows, which travel as `group`."""
        end = group.position + group.n_rows - len(self.drafts)
        return [*self.sequence.tokens[group.position : end], *self.drafts]


@dataclass(slots=True)
class RowChooser:
    """Chooses among the running sequences of `queue`."""

    queue: AdmissionQueue

    @property
    def limits(self) -> StepLimits:
        """What bounds the rows of a step."""
        return self.queue.ring.limits

    def decode_rows(self, share: int, n_frames: int = 1) -> list[Rows]:
        """Select the newest token's row of up to `share` sequences, each followed by its drafts.

        `n_frames` steps of each may be in flight at once.
        """
        chosen = [*islice(filter(_MAY_TRAVEL, self.queue.ready.values()), share)]
        is_exact = any(map(_IS_DETERMINISTIC, chosen))
        if is_exact:
            chosen = chosen[: self.limits.exact_rows]
        secured = [*filter(self.queue.secure_row, chosen)]
        secured = [sequence for sequence in secured if sequence.slot is not None]
        most = self.limits.exact_rows if is_exact else self.limits.cheap_rows
        spare = max(0, most - len(secured))
        company = self._company(secured)
        rows: list[Rows] = []
        mask_bytes = 0
        for n_left, sequence in zip(range(len(secured), 0, -1), secured, strict=True):
            found = self._drafts(sequence, spare // n_left, n_frames, company)
            drafts, masks = _masked(sequence, found)
            if masks:
                mask_bytes += sum(len(mask.data) for mask in masks if mask is not None)
                if rows and mask_bytes > MAX_STEP_MASK_BYTES:
                    break  # the others go with the next step
            spare -= len(drafts)
            rows.append(
                Rows(
                    sequence=sequence,
                    n_rows=1 + len(drafts),
                    drafts=tuple(drafts),
                    masks=tuple(masks),
                )
            )
        return rows

    def flight_rows(self, n_frames: int) -> list[Rows]:
        """Select drafts that go behind the drafts in flight of the sequence with the fewest steps.

        They are right if all those before them are, and take no room that is not booked.
        """
        flying = [each for each in self.queue.running.values() if each.may_fly]
        company = self._company(flying)
        if not self.queue.ring.rewinds or math.isfinite(company.slack):
            return []
        for sequence in sorted(flying, key=lambda each: each.n_in_flight):
            is_exact = sequence.request.deterministic
            limit = self.limits.exact_rows if is_exact else self.limits.cheap_rows
            limit = min(limit, MAX_ROWS_IN_FLIGHT - len(sequence.ahead))
            drafts = self._drafts(sequence, limit, n_frames, company, is_behind=True)
            drafts, masks = _masked(sequence, drafts, sequence.ahead)
            if drafts:
                behind = tuple(masks[1:])  # the first is that of the row before them
                return [
                    Rows(sequence=sequence, n_rows=len(drafts), drafts=tuple(drafts), masks=behind)
                ]
        return []

    def _company(self, drafting: Collection[LiveSequence]) -> Company:
        """Say with how many others a sequence decodes, and what drafts of some may cost these."""
        for each in drafting:
            if each.request.drafter or each.request.guide:
                break
        else:
            return ALONE
        decoding = [each for each in self.queue.running.values() if each.is_decoding]
        n_drafting = sum(each.request.drafter is not None for each in decoding)
        is_shared = n_drafting < len(decoding)
        slack = _UNNOTICED / max(1, n_drafting) if is_shared else math.inf
        return Company(max(0, len(decoding) - 1), slack)

    def _drafts(
        self,
        sequence: LiveSequence,
        limit: int,
        n_frames: int,
        company: Company,
        *,
        is_behind: bool = False,
    ) -> Sequence[int]:
        """Ask for drafts within what is left of the request, the context and the booked room.

        What a constraint forces goes before what a drafter guesses.
        """
        request, slot = sequence.request, sequence.slot
        if slot is None:
            return ()
        ahead = sequence.ahead
        left = self.queue.longest_life(request) - len(sequence.tokens) - len(ahead) - 1
        room = slot.n_blocks * BLOCK_POSITIONS - sequence.n_sent - 1
        limit = min(limit, left, room)
        forced = request.guide.forced if request.guide and self.queue.ring.rewinds else None
        for drafter in (forced, request.drafter):
            if drafter is not None and limit > 0:
                drafts = drafter.propose(
                    sequence.tokens, limit, ahead if is_behind else None, n_frames, company
                )
                if drafts:
                    sequence.drafted_by = drafter
                    return drafts
        return ()

    def prompt_rows(self, budget: int, beside: Sequence[Rows] = ()) -> list[Rows]:
        """Select prompt chunks in order of rank, up to `budget` rows, or a picture of more.

        A deterministic sequence is batched with no other.
        """
        rows: list[Rows] = []
        running = self.queue.running.values()
        waiting = [s for s in running if s.is_prefilling and not (s.is_restoring or s.is_encoding)]
        for sequence in sorted(waiting, key=lambda waiting: waiting.rank):
            if sequence.request.deterministic:
                if rows or beside:
                    break
                n_rows = self._exact_chunk(sequence)
                if self._waits_for_mask(sequence, n_rows):
                    continue
                return [self._prompt_part(sequence, n_rows)]
            n_rows = self._any_chunk(sequence, budget)
            if self._waits_for_mask(sequence, n_rows):
                continue
            left = budget - sum(taken.n_rows for taken in rows)
            if n_rows > left and rows:
                break
            rows.append(self._prompt_part(sequence, n_rows))
        return rows

    def _samples(self, sequence: LiveSequence, n_rows: int) -> bool:
        """Say whether the last of the next `n_rows` rows, drafts aside, samples a token."""
        is_last = sequence.n_sent + n_rows >= len(sequence.tokens)
        return is_last and sequence.request.max_tokens > 0

    def _waits_for_mask(self, sequence: LiveSequence, n_rows: int) -> bool:
        return self._samples(sequence, n_rows) and not sequence.may_sample

    def _prompt_part(self, sequence: LiveSequence, n_rows: int) -> Rows:
        masks = _masked(sequence, ())[1] if self._samples(sequence, n_rows) else ()
        return Rows(sequence=sequence, n_rows=n_rows, masks=tuple(masks))

    def _chunk(self, sequence: LiveSequence, n_most: int, end: int) -> int:
        """Count the rows to `end`, at most `n_most`.

        Whole chunks end at the next multiple of their size, unless that is near. A picture that
        must not be cut there is left for the next chunk, or is one of its own.
        """
        n_sent, size = sequence.n_sent, self.limits.chunk_rows
        n_rows = n_most if n_most < size or 2 * (n_sent % size) > size else size - n_sent % size
        cut = min(n_sent + n_rows, end)
        whole = whole_before(sequence.request.pictures, cut)
        if whole == n_sent:
            pictures = sequence.request.pictures
            return next(place.end for place in pictures if place.end > n_sent) - n_sent
        return whole - n_sent

    def _any_chunk(self, sequence: LiveSequence, budget: int) -> int:
        """Count the rows of the next chunk, which ends where a state is kept."""
        end, n_sent = len(sequence.tokens), sequence.n_sent
        if self.queue.ring.room_states is not None:
            block_end = (n_sent // BLOCK_POSITIONS + 1) * BLOCK_POSITIONS
            end = min(end, block_end, *(mark for mark in sequence.marks if mark > n_sent))
        return self._chunk(sequence, budget, end)

    def _exact_chunk(self, sequence: LiveSequence) -> int:
        """Count the rows of the next chunk such that a replay gives the same bits."""
        if sequence.n_sent < sequence.n_prompt:
            return self._chunk(sequence, self.limits.chunk_rows, sequence.n_prompt)
        return min(self.limits.exact_rows, len(sequence.tokens) - sequence.n_sent)

    def group(self, rows: Rows) -> RowGroup:
        """Return the rows as they travel."""
        sequence = rows.sequence
        assert sequence.slot is not None
        makes_token = self._samples(sequence, rows.n_rows - len(rows.drafts))
        return RowGroup(
            sequence_id=sequence.sequence_id,
            slot=sequence.slot.slot,
            position=sequence.n_sent,
            n_rows=rows.n_rows,
            n_sampled=min(1 + len(rows.drafts), rows.n_rows) if makes_token else 0,
            n_drafts=len(sequence.ahead) + len(rows.drafts),
        )


def _masked(
    sequence: LiveSequence, drafts: Sequence[int], ahead: Sequence[int] = ()
) -> tuple[Sequence[int], Sequence[TokenMask | None]]:
    """Return the drafts up to the first that the sequence's constraint forbids, and the masks."""
    guide = sequence.request.guide
    if guide is None:
        return drafts, ()
    masks = guide.masks(drafts, ahead)
    return drafts[: len(masks) - 1], masks


def row_masks(rows: Sequence[Rows], groups: Sequence[RowGroup]) -> Iterator[RowMask]:
    """Number the masks of a step by its sampled rows."""
    first = 0
    for part, group in zip(rows, groups, strict=True):
        yield from (RowMask(first + at, mask) for at, mask in enumerate(part.masks) if mask)
        first += group.n_sampled
