"""Control messages about where the time of a request went: its steps, and the clocks of nodes.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of what
is made of them.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from shardnet.types import U32, Positions, Row, Tagged
from shardnet.wire.framing.schema import MAX_STAGES, Count, Name, RequestId
from shardnet.wire.messages.extras import Microseconds, StageTiming

MAX_TRACED_STEPS: Final = 1 << 14
"""Most steps of one request that are traced; the later ones are only counted."""
MAX_PIECE_STEPS: Final = 256


class ReadClock(Tagged, frozen=True, kw_only=True):
    """Ask for the clock by which a node times its stage. Answered by ClockRead at once."""

    request: RequestId


class ClockRead(Tagged, frozen=True, kw_only=True):
    """Answers ReadClock: the clock when the request came, and when this left. Its 0 is anywhere."""

    request: RequestId
    received_us: Microseconds
    sent_us: Microseconds


class TracedStep(Row, frozen=True, array_like=True):
    """One step of a request. All moments are those of the head's clock.

    `n_rows` of the `n_batch_rows` that travelled are the request's, from `position` on; of these
    `n_sampled` were sampled. `timings` are in ring order.
    """

    step: Count
    position: Positions
    n_rows: U32
    n_sampled: U32
    n_batch_rows: U32
    sent_us: Microseconds
    answered_us: Microseconds
    timings: Annotated[list[StageTiming], Meta(max_length=MAX_STAGES)]


class TracePiece(Tagged, frozen=True, kw_only=True):
    """The next steps of a Generate with `trace`; precedes Finished.

    `nodes` are the names of the ring's nodes in order. Their clocks are known to within
    `clocks_within_us`. The request came to the ring at `submitted_us`. `n_left_out` steps more
    were not traced.
    """

    request: RequestId
    nodes: Annotated[list[Name], Meta(max_length=MAX_STAGES)]
    clocks_within_us: Annotated[list[Microseconds], Meta(max_length=MAX_STAGES)]
    submitted_us: Microseconds
    steps: Annotated[list[TracedStep], Meta(max_length=MAX_PIECE_STEPS)]
    n_left_out: U32 = 0
