"""Limits on steps, and what a ring gives its scheduler. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardnet.types import PREFILL_CHUNK_ROWS, Epoch

MIXED_ROWS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Choices for the number of prompt rows batched with decode rows."""

MAX_ROWS_IN_FLIGHT = 128
"""Drafts of one sequence in flight: half the rows by which any slot may be rewound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits on the rows of one step.

    `chunk_rows` prompt rows while no sequence decodes, at most `mixed_rows` beside decode rows. A
    step of up to `cheap_rows` rows costs about as much as one row, so drafts fill it up to there.
    `exact_rows` limits the batches of deterministic sequences (design decision 4); with ANY_ROWS
    nothing needs to be limited. Where layers keep a state, stages with `notes_states` note it on
    the way through a prompt (`is_noted`).
    """

    chunk_rows: int = PREFILL_CHUNK_ROWS
    mixed_rows: int = MIXED_ROWS[-1]
    cheap_rows: int = 32
    exact_rows: int = 1
    notes_states: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLimits:
    """What a ring gives its scheduler; for the fields see Scheduler."""

    epoch: Epoch
    n_stages: int
    room_blocks: int
    limits: StepLimits = field(default_factory=StepLimits)
    prefix_seed: bytes | None = None
    shares_blocks: bool = False
