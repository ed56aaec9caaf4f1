"""Where a drafter is best loaded, by measured figures. Pure.

Knows nodes, their figures and the round trips to them. Must not know drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.placement.figures import StageSpeed
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo

_AT_ONCE: Final = 4
"""About how many drafts come with one round trip."""
_ROOM: Final = 1.25
"""A drafter's keys and values, and what it needs while it computes, beside its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlace:
    """A node that may draft, and what a draft costs there.

    `cost_s` counts its part of the way, and what its drafts take from a stage there. None where
    nothing was measured.
    """

    node: NodeId
    name: str
    cost_s: float | None
    why: str


def draft_places(
    n_bytes: int,
    nodes: Sequence[NodeInfo],
    *,
    layer_bytes: int,
    speeds: Mapping[NodeId, StageSpeed],
    stages: Collection[NodeId],
    round_trip_s: Callable[[NodeId], float | None],
) -> list[DraftPlace]:
    """List where a drafter of `n_bytes` weights may be loaded, the best first.

    The first of `nodes` is the head, which is taken before nodes that were not measured. A node
    reads a drafter's weights as fast as those of a layer of the ring, of `layer_bytes`. Those in
    `stages` compute a stage, which waits meanwhile unless they have cores to spare.
    """
    found = [
        _place(node, place == 0, n_bytes / max(1, layer_bytes), speeds, stages, round_trip_s)
        for place, node in enumerate(nodes)
        if place == 0
        or not (node.is_draining or node.rests or node.memory_free_bytes < n_bytes * _ROOM)
    ]
    known = [place for place in found if place.cost_s is not None]
    if found[0].cost_s is None:
        known.insert(0, found[0])
    rest = [place for place in found if place not in known]
    return sorted(known, key=lambda place: place.cost_s or 0.0) + rest


def _place(
    node: NodeInfo,
    is_head: bool,
    n_layers: float,
    speeds: Mapping[NodeId, StageSpeed],
    stages: Collection[NodeId],
    round_trip_s: Callable[[NodeId], float | None],
) -> DraftPlace:
    """Predict what a draft takes on a node, which is as large as `n_layers` of the ring."""
    key = NodeId(node.node)
    way_s = 0.0 if is_head else (round_trip_s(key) or 0.0) / _AT_ONCE
    speed = speeds.get(key)
    shares = key in stages and node.cores <= node.threads
    beside = ", which its stage waits for" if shares else ""
    if speed is None:
        return DraftPlace(node=key, name=node.name, cost_s=None, why=f"not measured{beside}")
    draft_s = n_layers * speed.layer_s
    way = "" if is_head else f" and {way_s * 1e3:.2g} ms on its way"
    return DraftPlace(
        node=key,
        name=node.name,
        cost_s=draft_s * (2 if shares else 1) + way_s,
        why=f"a draft takes about {draft_s * 1e3:.2g} ms{beside}{way}",
    )
