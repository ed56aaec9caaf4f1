"""What changes the slots of every stage: sequences take them, leave them, free them."""

from __future__ import annotations

from dataclasses import dataclass

from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.types import SequenceId, SlotId

MAX_DRAFTS = 31
"""Draft tokens of a sequence in one step."""


MAX_ADAPTERS = 16
"""LoRA adapters that a ring can have."""
MAX_ADAPTER_SCALE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """An adapter of a sequence, by its id, and what its part is multiplied by."""

    adapter_id: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence:
    """A slot operation: a sequence takes a slot.

    Its first `n_kept` positions stay as they are, are copied from the slot `source`, or with
    `is_restored` are those that every stage has read from its disk for this sequence. Its output
    begins at position `n_prompt`; `stop_ids` are those that `min_tokens` holds back. Only the tail
    uses `sampling` and `stop_ids`, and makes at most `n_drafts` drafts behind a sampled token.
    Every stage adds the `adapters` to the sequence's rows, whose positions so far had the same.
    """

    sequence_id: SequenceId
    slot: SlotId
    sampling: SamplingParams
    n_kept: int = 0
    source: SlotId | None = None
    is_restored: bool = False
    n_prompt: int = 0
    stop_ids: tuple[int, ...] = ()
    outputs: OutputParams = NO_OUTPUTS
    n_drafts: int = 0
    adapters: tuple[AdapterUse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSequence:
    """A slot operation: a sequence leaves its slot.

    The slot keeps the first `n_kept` positions for another sequence; with 0 it is free. Its first
    blocks are kept on disk too, under the keys `stored`.
    """

    sequence_id: SequenceId
    slot: SlotId
    n_kept: int = 0
    stored: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlot:
    """A slot operation: a slot that no sequence owns gives its positions and blocks back."""

    slot: SlotId


SlotOperation = OpenSequence | CloseSequence | FreeSlot
"""What changes the slots of every stage, in data order with the steps."""
