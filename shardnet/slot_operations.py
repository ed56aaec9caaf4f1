"""What changes the slots of every stage, as it travels: sequences take, leave and free them."""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Literal

from msgspec import Meta

from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.sampling_params import MAX_STOP_IDS, SamplingParams
from shardnet.types import (
    MAX_STATES,
    MAX_STORED_BLOCKS,
    U32,
    BlockKeys,
    Digest,
    LayerNumber,
    Positions,
    Row,
    SequenceId,
    SlotId,
    StateId,
    Tagged,
)

MAX_DRAFTS = 31
"""Draft tokens of a sequence in one step."""


MAX_DRAFT_LAYERS = 16
"""Numbers of layers behind which a drafter reads hidden states."""

MAX_ADAPTERS = 16
"""LoRA adapters that a ring can have."""
MAX_ADAPTER_SCALE = 100.0

Sequence = Annotated[SequenceId, Meta(ge=0)]
Slot = Annotated[SlotId, Meta(ge=0, le=2**32 - 1)]
State = Annotated[StateId, Meta(ge=0, le=2**32 - 1)]


class AdapterUse(Row, frozen=True, array_like=True):
    """An adapter of a sequence, by its id, and what its part is multiplied by."""

    adapter_id: Digest
    scale: Annotated[float, Meta(ge=-MAX_ADAPTER_SCALE, le=MAX_ADAPTER_SCALE)]


MAX_PICTURES = 100
"""Pictures of one sequence."""
PICTURE_DIGEST_BYTES = 16

_Rows = Annotated[int, Meta(ge=1, le=1 << 24)]


class PicturePlace(Row, frozen=True, array_like=True):
    """A picture of a sequence: its `n_positions` from its first row's `position` to its last one's.

    `grid` counts its rows by time, height and width. Where they `see_each_other` they attend in
    both directions, and so are computed in one step. Equal digests mean equal rows.
    """

    position: Positions
    n_positions: _Rows
    grid: tuple[_Rows, _Rows, _Rows]
    see_each_other: bool
    digest: Annotated[bytes, Meta(min_length=PICTURE_DIGEST_BYTES, max_length=PICTURE_DIGEST_BYTES)]

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.position + self.n_positions


Pictures = tuple[PicturePlace, ...]
"""Those of a sequence, in their order."""


def alike_until(one: Pictures, other: Pictures) -> int | None:
    """Return the position of the first picture that is not in both sequences; None for none."""
    for mine, others in zip_longest(one, other):
        if mine != others:
            return min(place.position for place in (mine, others) if place is not None)
    return None


def whole_before(pictures: Pictures, position: int) -> int:
    """Return `position`, or that of the picture which must not be cut there."""
    for place in pictures:
        if place.see_each_other and place.position < position < place.end:
            return place.position
    return position


class OpenSequence(Tagged, frozen=True, kw_only=True):
    """A slot operation: a sequence takes a slot.

    Its first `n_kept` positions stay as they are, are copied from the slot `source`, or with
    `is_restored` are those that every stage has read from its disk for this sequence. Layers that
    keep a state go on from what was kept as `state`, without one from that of the slot. Its output
    begins at position `n_prompt`; `stop_ids` are those that `min_tokens` holds back. Only the tail
    uses `sampling` and `stop_ids`, and makes at most `n_drafts` drafts behind a sampled token.
    Every stage adds the `adapters`, each once, to the sequence's rows, whose positions so far had
    the same, and knows the `pictures` among them. Rows from position `draft_from` on give their
    hidden states after so many layers as each of `draft_layers` says, for a drafter.
    """

    sequence_id: Sequence
    slot: Slot
    sampling: SamplingParams
    n_kept: Positions = 0
    source: Slot | None = None
    state: State | None = None
    n_prompt: Positions = 0
    stop_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    outputs: OutputParams = NO_OUTPUTS
    is_restored: bool = False
    n_drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0
    adapters: Annotated[tuple[AdapterUse, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    pictures: Annotated[tuple[PicturePlace, ...], Meta(max_length=MAX_PICTURES)] = ()
    draft_layers: Annotated[tuple[LayerNumber, ...], Meta(max_length=MAX_DRAFT_LAYERS)] = ()
    draft_from: Positions = 0


class StoredState(Row, frozen=True, array_like=True):
    """A kept state: that after the first `n_blocks` blocks of a slot."""

    n_blocks: Annotated[int, Meta(ge=1, le=MAX_STORED_BLOCKS)]
    state: State


class CloseSequence(Tagged, frozen=True, kw_only=True):
    """A slot operation: a sequence leaves its slot.

    The slot keeps the first `n_kept` positions for another sequence; with 0 it is free. Its first
    blocks are written to disk under the keys `stored`, where they are not there yet, and so are
    `stored_states` under the keys of the blocks that they follow.
    """

    sequence_id: Sequence
    slot: Slot
    n_kept: Positions = 0
    stored: BlockKeys = ()
    stored_states: Annotated[tuple[StoredState, ...], Meta(max_length=MAX_STORED_BLOCKS)] = ()


class FreeSlot(Tagged, frozen=True, kw_only=True):
    """A slot operation: a slot that no sequence owns gives its positions and blocks back."""

    slot: Slot


class KeepState(Tagged, frozen=True, kw_only=True):
    """Keep a copy of what layers keep a state of, after the first `n_positions` of a slot.

    A sequence may begin with it until it is dropped, whatever becomes of the slot.
    """

    slot: Slot
    n_positions: Positions
    state: State


class DropStates(Tagged, frozen=True, kw_only=True):
    """Give kept states back."""

    states: Annotated[tuple[State, ...], Meta(max_length=MAX_STATES)]


SlotOperation = OpenSequence | CloseSequence | FreeSlot | KeepState | DropStates
"""What changes the slots of every stage, in data order with the steps."""

SlotMethod = Literal["trim", "copy", "keep_state", "drop_states", "rest", "clear"]
"""The methods of a KV cache that change its slots, and take no rows."""
