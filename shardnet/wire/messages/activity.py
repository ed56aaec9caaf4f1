"""Control messages about what a ring does now, and where the time of a request went.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how
they are shown.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from shardnet.types import U32, U64, LiveState, PathText, Positions, Report, Row
from shardnet.wire.framing import schema
from shardnet.wire.messages.diagnostics import Drafters, RingBehind, RingLoad
from shardnet.wire.messages.extras import Microseconds, StageTiming
from shardnet.wire.messages.plans import ModelChoice, PlanReply

MAX_STEPS_SEEN: Final = 1024
MAX_REQUESTS_SEEN: Final = 1024
"""Most steps and requests in one message."""
MAX_RECOVERIES_SEEN: Final = 64
"""Most recoveries in one message: more than a quarter of an hour of the worst faults."""


MAX_TRACED_STEPS: Final = 1 << 14
"""Most steps of one request that are traced; the later ones are only counted."""
MAX_PIECE_STEPS: Final = 256


class GetActivity(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the ring that a node leads. Answered by RingActivity, or Redirect to its head.

    Steps up to number `after_step` of the ring `known_ring` are left out, and its plan too.
    """

    known_ring: schema.Name = ""
    after_step: schema.Count = 0


class StepRecord(Row, frozen=True, array_like=True):
    """A step that came round: sent `sent_us` after the ring was built, by the head's clock.

    `n_prompt_rows` of its rows sampled nothing; `n_tokens` were kept of what the others sampled.
    """

    step: schema.Count
    sent_us: Microseconds
    round_trip_us: Microseconds
    n_rows: U32
    n_prompt_rows: U32
    n_tokens: U32
    timings: Annotated[list[StageTiming], Meta(max_length=schema.MAX_STAGES)]


class RequestProgress(Report, frozen=True, kw_only=True):
    """A request of the ring. `n_computed` of its prompt's `n_prompt` tokens are in the KV cache.

    `n_kept` of these were there before it began to run. `ahead` requests go before it. Behind a
    lost ring it `waits_for` something, about `expected_s` seconds still, 0 if not known.
    """

    sequence: U64
    state: LiveState
    n_prompt: Positions
    n_computed: Positions
    n_kept: Positions
    n_tokens: U32
    max_tokens: U32
    age_s: schema.Seconds
    priority: schema.Priority = 0
    ahead: U32 = 0
    waits_for: schema.Explanation = ""
    expected_s: schema.Seconds = 0.0


class StageProgress(Row, frozen=True, array_like=True):
    """How far the node of a stage is with what it does before the ring is there."""

    rank: schema.Rank
    phase: schema.Phase
    done_bytes: schema.Count
    total_bytes: schema.Count


class RingOpening(Report, frozen=True, kw_only=True):
    """A ring that is being looked for or built, for a request; counts are those of NodeProgress."""

    model: PathText
    age_s: schema.Seconds
    stages: Annotated[list[StageProgress], Meta(max_length=schema.MAX_STAGES)]


class RecoveryReport(Report, frozen=True, kw_only=True):
    """A ring was replaced by another, or was to be: `error` says why that was given up.

    It was lost at `at_s`, counted from 1970, for the reason `why`. The oldest step had waited for
    `notice_s` then. Attempts took `plan_s` and `load_s` together, and `replay_s` later all requests
    that had run had a token again. The next ring has the nodes `nodes`, and not those in `lost`.
    """

    at_s: schema.Moment
    why: schema.Explanation
    n_requests: U32
    notice_s: schema.Seconds
    plan_s: schema.Seconds
    load_s: schema.Seconds
    replay_s: schema.Seconds
    n_attempts: U32
    lost: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)]
    nodes: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)]
    is_over: bool
    error: schema.Explanation = ""


class RingActivity(schema.Reply, frozen=True, kw_only=True):
    """Answers GetActivity. `ring` is the name of the ring, "" without one.

    `plan` is there unless the asking side knows the ring. `age_us` is the time since it was built,
    by the clock of `steps`, which has the newest ones, oldest first. `opening` is another one.
    While it `is_recovering` it is lost, and requests wait for another one. `recoveries` are those
    of this node, oldest first. `rings` are those behind this head where there are several, its own
    first. `drafters` made drafts for requests that have ended.
    """

    ring: schema.Name = ""
    is_broken: bool = False
    is_recovering: bool = False
    age_us: Microseconds = 0
    load: RingLoad | None = None
    plan: PlanReply | None = None
    opening: RingOpening | None = None
    requests: Annotated[list[RequestProgress], Meta(max_length=MAX_REQUESTS_SEEN)] = []
    steps: Annotated[list[StepRecord], Meta(max_length=MAX_STEPS_SEEN)] = []
    recoveries: Annotated[list[RecoveryReport], Meta(max_length=MAX_RECOVERIES_SEEN)] = []

    rings: Annotated[list[RingBehind], Meta(max_length=schema.MAX_STAGES)] = []
    drafters: Drafters = []


class KeepRing(schema.Numbered, frozen=True, kw_only=True):
    """Have the head of a ring build it for `choice`, keep it, and tell how it is until cancelled.

    Answered by NodeProgress while it is built, PlanReply, and RingKept again and again; by Failed
    when the ring is over. Requests without nodes of their own are then redirected to the sender.
    """

    choice: ModelChoice


class RingKept(schema.Reply, frozen=True, kw_only=True):
    """Answers KeepRing: what the ring has in hand. While it `is_recovering` others should do it."""

    load: RingLoad
    is_recovering: bool = False


class CancelSequence(schema.Numbered, frozen=True, kw_only=True):
    """Ask the head to cancel a request of its ring, whoever sent it. Answered by Done or Redirect.

    The request fails with code 41.
    """

    ring: schema.Name
    sequence: U64


class ReadClock(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the clock by which a node times its stage. Answered by ClockRead at once."""


class ClockRead(schema.Reply, frozen=True, kw_only=True):
    """Answers ReadClock: the clock when the request came, and when this left. Its 0 is anywhere."""

    received_us: Microseconds
    sent_us: Microseconds


class TracedStep(Row, frozen=True, array_like=True):
    """One step of a request. All moments are those of the head's clock.

    `n_rows` of the `n_batch_rows` that travelled are the request's, from `position` on; of these
    `n_sampled` were sampled. `timings` are in ring order.
    """

    step: schema.Count
    position: Positions
    n_rows: U32
    n_sampled: U32
    n_batch_rows: U32
    sent_us: Microseconds
    answered_us: Microseconds
    timings: Annotated[list[StageTiming], Meta(max_length=schema.MAX_STAGES)]


class TracePiece(schema.Reply, frozen=True, kw_only=True):
    """The next steps of a Generate with `trace`; precedes Finished.

    `nodes` are the names of the ring's nodes in order. Their clocks are known to within
    `clocks_within_us`. The request came to the ring at `submitted_us`. `n_left_out` steps more
    were not traced.
    """

    nodes: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)]
    clocks_within_us: Annotated[list[Microseconds], Meta(max_length=schema.MAX_STAGES)]
    submitted_us: Microseconds
    steps: Annotated[list[TracedStep], Meta(max_length=MAX_PIECE_STEPS)]
    n_left_out: U32 = 0


ActivityRequest: TypeAlias = ReadClock | GetActivity | CancelSequence | KeepRing
"""Requests about what a ring does."""
ActivityMessage: TypeAlias = ActivityRequest | ClockRead | RingActivity | RingKept | TracePiece
"""These, their answers, and what is sent unasked."""
