"""Control messages between a head and a node that drafts for its ring (docs/protocol.md section 8).

Knows the fields, their types and their bounds. Knows nothing of what drafts.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from shardnet.slot_operations import MAX_DRAFT_LAYERS, Slot
from shardnet.stage_form import StageForm
from shardnet.types import MAX_ROWS_IN_FLIGHT, U32, LayerNumber, Positions
from shardnet.wire.framing.schema import Numbered, Reply, RequestId, Seconds

MAX_DRAFTED: Final = 256
MAX_READ_TOKENS: Final = 1 << 20
MAX_STATES_BYTES: Final = 1 << 24
_NDrafts = Annotated[int, Meta(ge=0, le=MAX_DRAFTED)]
_Model = Annotated[str, Meta(max_length=4096)]


class LoadDrafter(Numbered, frozen=True, kw_only=True):
    """Order a node to load a drafter for the ring of the sender, and keep it until Cancel.

    `drafter` is a path there or a name of the Hub, `form` that of the ring, whose model has
    `vocab_size` token ids. LoadProgress precedes the answer.
    """

    drafter: _Model
    form: StageForm
    vocab_size: U32


class DrafterReady(Reply, frozen=True, kw_only=True):
    """Answers LoadDrafter; Failed follows if the drafter is lost.

    It reads hidden states after so many layers as each of `layers` says, and makes at most `most`
    drafts at once. One takes `draft_s`.
    """

    layers: Annotated[tuple[LayerNumber, ...], Meta(max_length=MAX_DRAFT_LAYERS)]
    most: _NDrafts
    draft_s: Seconds


class Draft(Numbered, frozen=True, kw_only=True):
    """Have the drafter of LoadDrafter number `drafter` read tokens into a slot, and draft.

    What the slot has from `position` on is overwritten. `token_ids`, u32 little-endian, are those
    of the positions from there on, of which the last `n_drafts` may be wrong. With `states`,
    bfloat16 little-endian, these are of the positions, and each token is the one behind. The drafts
    follow the last token, at most `limit`.
    """

    drafter: RequestId
    slot: Slot
    position: Positions
    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_READ_TOKENS)]
    limit: _NDrafts
    n_drafts: Annotated[int, Meta(ge=0, le=MAX_ROWS_IN_FLIGHT)] = 0
    states: Annotated[bytes, Meta(max_length=MAX_STATES_BYTES)] = b""


class DraftReply(Reply, frozen=True, kw_only=True):
    """Answers Draft."""

    token_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_DRAFTED)]


class FreeDraftSlot(Numbered, frozen=True, kw_only=True):
    """Have a drafter forget a slot. Answered by Done."""

    drafter: RequestId
    slot: Slot


DraftRequest: TypeAlias = LoadDrafter | Draft | FreeDraftSlot
DraftMessage: TypeAlias = DraftRequest | DrafterReady | DraftReply
