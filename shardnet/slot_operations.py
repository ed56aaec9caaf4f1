"""What changes the slots of every stage, as it travels: sequences take, leave and free them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.sampling_params import MAX_STOP_IDS, SamplingParams
from shardnet.types import U32, BlockKeys, Digest, Positions, Row, SequenceId, SlotId, Tagged

MAX_DRAFTS = 31
"""Draft tokens of a sequence in one step."""


MAX_ADAPTERS = 16
"""LoRA adapters that a ring can have."""
MAX_ADAPTER_SCALE = 100.0

Sequence = Annotated[SequenceId, Meta(ge=0)]
Slot = Annotated[SlotId, Meta(ge=0, le=2**32 - 1)]


class AdapterUse(Row, frozen=True, array_like=True):
    """An adapter of a sequence, by its id, and what its part is multiplied by."""

    adapter_id: Digest
    scale: Annotated[float, Meta(ge=-MAX_ADAPTER_SCALE, le=MAX_ADAPTER_SCALE)]


class OpenSequence(Tagged, frozen=True, kw_only=True):
    """A slot operation: a sequence takes a slot.

    Its first `n_kept` positions stay as they are, are copied from the slot `source`, or with
    `is_restored` are those that every stage has read from its disk for this sequence. Its output
    begins at position `n_prompt`; `stop_ids` are those that `min_tokens` holds back. Only the tail
    uses `sampling` and `stop_ids`, and makes at most `n_drafts` drafts behind a sampled token.
    Every stage adds the `adapters`, each once, to the sequence's rows, whose positions so far had
    the same.
    """

    sequence_id: Sequence
    slot: Slot
    sampling: SamplingParams
    n_kept: Positions = 0
    source: Slot | None = None
    n_prompt: Positions = 0
    stop_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    outputs: OutputParams = NO_OUTPUTS
    is_restored: bool = False
    n_drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0
    adapters: Annotated[tuple[AdapterUse, ...], Meta(max_length=MAX_ADAPTERS)] = ()


class CloseSequence(Tagged, frozen=True, kw_only=True):
    """A slot operation: a sequence leaves its slot.

    The slot keeps the first `n_kept` positions for another sequence; with 0 it is free. Its first
    blocks are written to disk under the keys `stored`, where they are not there yet.
    """

    sequence_id: Sequence
    slot: Slot
    n_kept: Positions = 0
    stored: BlockKeys = ()


class FreeSlot(Tagged, frozen=True, kw_only=True):
    """A slot operation: a slot that no sequence owns gives its positions and blocks back."""

    slot: Slot


SlotOperation = OpenSequence | CloseSequence | FreeSlot
"""What changes the slots of every stage, in data order with the steps."""
