"""What a node tells of a wire narrower than its ring computes: sizes, the time saved, the error.

Knows the fields of a part of PlanReply. Knows nothing of how they were measured.
"""

from __future__ import annotations

from shardnet.wire.framing.schema import U32, Count, Explanation, Share, Strict


class WireError(Strict, frozen=True, kw_only=True):
    """What a narrower wire does to the logits, measured over `n_rows` rows of one text.

    `max_error` and `rms_error` are shares of the logits' standard deviation, `kl` is the mean
    divergence in nats, `n_changed` counts the rows whose likeliest token is another.
    """

    n_rows: U32
    n_changed: U32
    max_error: Share
    rms_error: Share
    kl: Share


class NarrowWire(Strict, frozen=True, kw_only=True):
    """What the wire dtype that was asked for takes, saves and costs, rows of one hop in bytes.

    `saves_ms` per token, less the time to round. Where there is no `error`, `why` says so.
    """

    row_bytes: Count
    exact_row_bytes: Count
    saves_ms: float | None
    error: WireError | None
    why: Explanation
