"""Makes the drafter of a request, or refuses drafts that could change its bits.

Must not know how drafts are verified, nor what runs beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from shardnet.errors import UsageError
from shardnet.runtime.engine.requests import GenerationRequest
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, DraftSource, RingDrafts
from shardnet.runtime.scheduling.step_cost import StepCost


def drafter_of(
    request: GenerationRequest,
    ring_drafts: RingDrafts | None,
    *,
    cost: StepCost,
    exact_rows: int,
    on_ready: Callable[[], None],
) -> AdaptiveDrafter | None:
    """Make the drafter of a request, of `ring_drafts` if they are not None.

    `exact_rows` are those of the ring's limits; `on_ready` is called when drafts are there. Raises
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
        cost=cost,
        most=request.speculation.most,
    )
