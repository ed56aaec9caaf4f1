"""A sequence as the scheduler sees it: request, progress, outcomes. Pure.

Knows token ids, positions and counts. Must not know slots' room or steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Protocol

import msgspec

from shardnet.constraints import TokenMask
from shardnet.errors import ShardnetError
from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.runtime.scheduling.kv_block_manager import Slot
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import AdapterUse, PicturePlace, Pictures, SlotOperation
from shardnet.types import MicroBatch, SequenceId, SlotId, StateId

_GREEDY: Final = SamplingParams()


class FinishReason(Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Company:
    """Other sequences that decode while drafts are verified: `n_others`.

    Drafts may lengthen a step by the part `slack`, where not all of them have asked for drafts.
    """

    n_others: int = 0
    slack: float = math.inf


ALONE: Final = Company()


class Drafter(Protocol):
    """Proposes draft tokens for a sequence (design decision 5)."""

    def prepare(self, tokens: Sequence[int]) -> bool:
        """Start drafting after `tokens`; return whether `propose` can be called now.

        A sequence is not scheduled until it can.
        """

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        ahead: Sequence[int] | None = None,
        n_frames: int = 1,
        company: Company = ALONE,
    ) -> list[int]:
        """Return at most `limit` draft tokens after `tokens`, possibly none.

        Where `tokens` is in flight already they go behind it and the drafts `ahead`. `n_frames`
        frames of the sequence may be in flight at once. Steps are shared with the `company`.
        """

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        """Record how many of the first drafts in flight were accepted; the rest of them are not."""


class Guide(Protocol):
    """Says which tokens may come next in a sequence whose output is constrained."""

    @property
    def may_fly(self) -> bool:
        """Whether it knows the masks behind drafts in flight."""

    @property
    def forced(self) -> Drafter:
        """Drafts what must follow, where only one text can."""

    def prepare(self) -> bool:
        """Start making the mask of the next token; return whether it is there.

        A sequence is not scheduled until it is.
        """

    def masks(self, drafts: Sequence[int], ahead: Sequence[int] = ()) -> Sequence[TokenMask | None]:
        """Return the mask of the next token, and that after each draft up to the first forbidden.

        None allows all. Called when `prepare` has returned True; with the drafts `ahead`, which are
        in flight before these, where it `may_fly`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One prompt to continue. `stop_ids` end it, the id itself included in its tokens.

    A larger `priority` goes first. With `max_tokens` 0 the prompt is computed and nothing is
    sampled. With `whole_prompt` every row of the prompt is computed even if a slot holds its
    prefix. With `deterministic` its rows are batched as design decision 4 says. While one with
    `lockstep` runs, prompts are computed first, then all decode together. `sampling` and `outputs`
    are for the tail, and so are the masks of `guide`.
    """

    sequence_id: SequenceId
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    deterministic: bool = False
    whole_prompt: bool = False
    lockstep: bool = False
    sampling: SamplingParams = _GREEDY
    outputs: OutputParams = NO_OUTPUTS
    drafter: Drafter | None = None
    guide: Guide | None = None
    n_stored: int = 0
    """Positions of the prompt that every stage has on disk."""
    n_drafts: int = 0
    """Most drafts that the tail makes behind a sampled token."""
    draft_layers: tuple[int, ...] = ()
    """Numbers of layers behind which a drafter reads hidden states."""
    made: tuple[int, ...] = ()
    """Tokens of its output that are known already; they end nothing."""
    adapters: tuple[AdapterUse, ...] = ()
    """What every stage adds to its rows, in the order of their ids."""
    pictures: Pictures = ()
    """Those among its prompt; the first stage has their rows in place of their tokens."""


# --- instructions -------------------------------------------------------------------------------


class SendStep(msgspec.Struct, frozen=True, kw_only=True):
    """Send these rows round the ring."""

    batch: MicroBatch
    is_decode: bool


class OperateSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Send every stage a slot operation, in data order.

    `is_resumed`: the sequence that opens was paused before. `is_pause`: the sequence that closes
    resumes later.
    """

    operation: SlotOperation
    is_resumed: bool = False
    is_pause: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePrefix:
    """Have every stage read the first positions of a sequence from disk, before it is opened."""

    sequence_id: SequenceId
    n_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodePictures:
    """Have the first stage hold the rows of these pictures of a sequence that has been opened."""

    sequence_id: SequenceId
    places: Sequence[PicturePlace]


Instruction = SendStep | OperateSlot | RestorePrefix | EncodePictures


# --- outcomes -----------------------------------------------------------------------------------


class TokenSampled(msgspec.Struct, frozen=True, kw_only=True):
    """The ring sampled the next token of a sequence. `row` is its place in the token frame."""

    sequence_id: SequenceId
    token_id: int
    row: int


class SequenceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence ended; no further event names it."""

    sequence_id: SequenceId
    reason: FinishReason


class SequenceFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence failed; no further event names it."""

    sequence_id: SequenceId
    error: ShardnetError


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedSequence:
    """A sequence in a slot: every stage has computed the rows of `token_ids`, from position 0.

    Every stage keeps what layers that cannot be rewound need behind them as `state`; without one
    they are the slot's last rows.
    """

    sequence_id: SequenceId
    slot: SlotId
    token_ids: Sequence[int]
    state: StateId | None = None

    def cut(self, n_positions: int, state: StateId | None) -> ComputedSequence:
        """Return its first positions, which end with `state` if any."""
        return replace(self, token_ids=self.token_ids[:n_positions], state=state)


Outcome = TokenSampled | SequenceFinished | SequenceFailed


# --- state --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """A sequence that waits, runs or is paused.

    `tokens` holds prompt and output; the rows of the first `n_sent` positions have been sent and
    are valid, if the drafts `ahead` are right, which were sent behind `tokens`; `drafted_by` made
    them. `n_in_flight` counts its steps in flight. Those sent in another `flight` than the present
    one say nothing: a draft before them was wrong. It `is_unsure` while it is not known whether
    every stage has computed what its slot was started with. It has a slot and no rows are sent
    while it `is_restoring`, or `is_encoding` its pictures. Every stage of the next ring has its
    first `n_moved` positions, and gives them to the slot that it opens. Rows of its prompt are cut
    at the `marks`.
    """

    request: SequenceRequest
    order: int
    tokens: list[int]
    slot: Slot | None = None
    n_sent: int = 0
    n_in_flight: int = 0
    ahead: list[int] = field(default_factory=list)
    drafted_by: Drafter | None = None
    flight: int = 0
    is_unsure: bool = False
    is_restoring: bool = False
    is_encoding: bool = False
    may_restore: bool = True
    n_moved: int = 0
    marks: tuple[int, ...] = ()
    sequence_id: SequenceId = field(init=False)
    n_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequence_id = self.request.sequence_id
        self.n_prompt = len(self.request.prompt)

    def lose_slot(self) -> None:
        """Forget what was sent: nothing of it will be answered, nor is it in any KV cache.

        What the stages had on disk counts no more: others may compute it otherwise.
        """
        self.slot = None
        self.n_sent = self.n_in_flight = self.n_moved = 0
        self.is_restoring = self.is_encoding = self.may_restore = False
        self.land()

    def land(self) -> None:
        """End the flight: what is in flight behind the rows that were answered says nothing."""
        self.ahead.clear()
        self.flight += 1
        self.is_unsure = False

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key, the smaller first: by priority, then by arrival."""
        return (-self.request.priority, self.order)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def is_prefilling(self) -> bool:
        """Whether rows before that of the newest token must be sent before one is sampled."""
        if self.n_generated:
            return self.n_sent < len(self.tokens) - 1
        return self.n_sent < len(self.tokens)

    @property
    def may_travel(self) -> bool:
        """Whether it can be scheduled now: its mask and its drafts, if any, are ready."""
        drafter = self.request.drafter
        return self.may_sample and (drafter is None or drafter.prepare(self.tokens))

    @property
    def may_sample(self) -> bool:
        """Whether a row that samples a token can be scheduled now: its mask, if any, is ready."""
        guide = self.request.guide
        return guide is None or guide.prepare()

    @property
    def is_decoding(self) -> bool:
        """Whether it is past its prompt and generates tokens."""
        return not self.is_prefilling and self.request.max_tokens > 0

    @property
    def is_ready_to_decode(self) -> bool:
        """Whether the row of its newest token can be sent."""
        return self.n_sent == len(self.tokens) - 1 and self.n_generated > 0

    @property
    def may_fly(self) -> bool:
        """Whether drafts can go behind those in flight: masks of grammars come one by one."""
        request = self.request
        if request.drafter is None or (request.guide is not None and not request.guide.may_fly):
            return False
        is_over = not request.stop_ids.isdisjoint(self.ahead)
        return self.n_generated > 0 and self.n_sent > len(self.tokens) - 1 and not is_over

    @property
    def computed(self) -> ComputedSequence | None:
        """What it has on every stage, and what can go on from there alone; None for nothing.

        What it begins with does not count alone: not every stage has come to where it begins. Where
        prompts are scored the tail keeps the row before the next one, and no other stage can take
        its place.
        """
        slot, outputs = self.slot, self.request.outputs
        if slot is None or self.is_restoring:
            return None
        n_positions = min(slot.n_answered, slot.n_held)
        is_scored = outputs.n_prompt_logprobs is not None and n_positions < self.n_prompt
        if n_positions <= slot.n_kept or is_scored:
            return None
        return ComputedSequence(
            sequence_id=self.sequence_id,
            slot=slot.slot,
            token_ids=self.tokens[:n_positions],
        )
