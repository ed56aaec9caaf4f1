"""Requests to the engine, who drafts for one, and the events it answers with.

Knows their fields. Must not know how a request is carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from shardnet.errors import SamplingError, UsageError
from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.runtime.engine.guide import Constrained
from shardnet.runtime.engine.outputs import OutputEvent
from shardnet.runtime.engine.thoughts import Thoughts
from shardnet.runtime.ring.pipeline import StepAnswered
from shardnet.runtime.scheduling.drafting import (
    MAX_DRAFT_TOKENS,
    MTP,
    NGRAM,
    AdaptiveDrafter,
    DraftSource,
    RingDrafts,
)
from shardnet.runtime.scheduling.sequences import FinishReason
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.sampling_params import MAX_STOP_IDS, SamplingParams, TokenLogprobs
from shardnet.slot_operations import AdapterUse, PicturePlace, Pictures
from shardnet.types import LiveState, RowGroup
from shardnet.wire.messages.activity import MAX_TRACED_STEPS, TracedStep
from shardnet.wire.messages.generation import Timing

if TYPE_CHECKING:
    from shardnet.model.vision.picture import PreparedPicture


class TextAssembler(Protocol):
    """Turns a sequence's tokens into text that may be shown (tokenizers/detokenizer.py)."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return the text that is final now, and whether a stop string is met."""

    def finish(self) -> str:
        """Return the text that was held back; no token follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Draft tokens and have the ring verify several at once (design decision 5).

    `make_draft_source` makes the draft source of one request; it gets a callback to call when
    drafts are ready, and drafts are counted by its `name`. It is None where the ring's tail drafts
    (MTP), at most `most_by_ring` behind a token. What `look_up` makes drafts behind the source's
    drafts, and beside it. `most` caps the drafts of one step. A source that takes states
    (TakesStates) is given the ring's hidden states after so many layers as each of `layers` says.
    """

    make_draft_source: Callable[[Callable[[], None]], DraftSource] | None
    name: str = ""
    look_up: Callable[[], DraftSource] | None = None
    most: int = MAX_DRAFT_TOKENS
    most_by_ring: int = 0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeToken:
    """A token of the answer that was made before, on a ring of another head."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPicture:
    """A picture of a prompt: where its rows are, and what prepares it for the tower, if need be."""

    place: PicturePlace
    prepare: Callable[[], Awaitable[PreparedPicture]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue. `stop_ids` end it and their text is not shown.

    A larger `priority` goes first. A request that has not ended after `deadline_s` fails.
    `deterministic` asks for bits that do not depend on the batch (design decision 4), `lockstep`
    for decode steps with all that run. What
    `constrained` matches ends with the output, whatever the stop ids are. With `is_traced` its end
    has its steps. A text that no stop string can end says so by `stops_by_text`: its next row need
    not wait for it. The answer begins with the tokens `made`, which are reported again. All stages
    add `adapters` to its rows, in the order of their ids. Rows of `pictures` take the place of
    tokens of the prompt. `thoughts` follow its reasoning, and end it.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    text: TextAssembler
    priority: int = 0
    deadline_s: float | None = None
    speculation: Speculation | None = None
    deterministic: bool = False
    lockstep: bool = False
    outputs: OutputParams = NO_OUTPUTS
    constrained: Constrained | None = None
    is_traced: bool = False
    stops_by_text: bool = True
    made: tuple[MadeToken, ...] = ()
    adapters: tuple[AdapterUse, ...] = ()
    pictures: tuple[RequestPicture, ...] = ()
    thoughts: Thoughts | None = None

    @property
    def places(self) -> Pictures:
        """Where its pictures are."""
        return tuple(picture.place for picture in self.pictures)

    def check(self) -> None:
        """Raise SamplingError, naming the parameter, if one is outside its range."""
        self.sampling.check()
        self.outputs.check()
        if self.sampling.min_tokens and len(self.stop_ids) > MAX_STOP_IDS:
            raise SamplingError(
                f"min-tokens works with at most {MAX_STOP_IDS} stop ids, got {len(self.stop_ids)}",
                remedy="give fewer stop ids or leave --min-tokens out",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoved:
    """A request changed state: queued behind `ahead` others, running, paused, or resumed.

    When it starts, `n_kept` positions of its prompt were in the KV cache already. While its ring
    recovers, `why` says what happened or what is waited for, and `expected_s` how long that may
    take, 0 if not known; while it runs again, how many tokens are read before it goes on.
    """

    state: LiveState
    ahead: int = 0
    n_kept: int = 0
    why: str = ""
    expected_s: float = 0.0


class TokenGenerated(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token, and the text that became final with it."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(slots=True, kw_only=True)
class StepTrace:
    """The steps of a request that came to the engine at `submitted_us`, by the head's clock.

    The stages' moments are those of their own clocks. `n_left_out` steps followed that are not
    kept, or went before.
    """

    submitted_us: int
    steps: list[TracedStep] = field(default_factory=list)
    n_left_out: int = 0

    def begin_anew(self) -> None:
        """Leave out the steps so far: those that follow run on other stages."""
        self.n_left_out += len(self.steps)
        self.steps.clear()

    def add(self, group: RowGroup, answered: StepAnswered) -> None:
        """Add a step, of which the rows of `group` are the request's."""
        if len(self.steps) >= MAX_TRACED_STEPS:
            self.n_left_out += 1
            return
        batch = answered.batch
        self.steps.append(
            TracedStep(
                step=batch.step,
                position=group.position,
                n_rows=group.n_rows,
                n_sampled=group.n_sampled,
                n_batch_rows=batch.n_rows,
                sent_us=answered.sent_ns // 1000,
                answered_us=answered.sent_ns // 1000 + answered.round_trip_us,
                timings=list(answered.answer.timings),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The end of a request. `text` is what the detokenizer held back until now.

    `timing.load_s` is 0: the engine knows nothing of loading. `alone_s` are the seconds that each
    stage computed for one token, () unless the request had the ring to itself all the time.
    """

    reason: FinishReason
    text: str
    timing: Timing
    alone_s: tuple[float, ...] = ()
    trace: StepTrace | None = None


RequestEvent = RequestMoved | TokenGenerated | OutputEvent | GenerationFinished


def drafter_of(
    request: GenerationRequest,
    ring_drafts: RingDrafts | None,
    *,
    cost: StepCost,
    exact_rows: int,
    on_ready: Callable[[], None],
    clock: Callable[[], float],
) -> AdaptiveDrafter | None:
    """Make the drafter of a request, of `ring_drafts` if they are not None.

    `exact_rows` are those of the ring's limits; `on_ready` is called when drafts are there, which
    are waited for by `clock`, in seconds. Raises
    UsageError where drafts could change the request's bits.
    """
    if request.speculation is None:
        return None
    if request.deterministic and exact_rows == 1:
        raise UsageError(
            "--deterministic and --speculate exclude each other on this ring: the bits of a "
            "row depend on the batch",
            remedy="leave one of them out",
        )
    source: DraftSource | None = ring_drafts
    if request.speculation.make_draft_source is not None:
        source = request.speculation.make_draft_source(on_ready)
    assert source is not None
    return AdaptiveDrafter(
        draft_source=source,
        name=request.speculation.name or (MTP if source is ring_drafts else NGRAM),
        look_up=request.speculation.look_up and request.speculation.look_up(),
        cost=cost,
        most=request.speculation.most,
        clock=clock,
    )
