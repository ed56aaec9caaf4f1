"""How the memory of nodes is divided between the models of a household. Pure.

Knows what a plan needs of each node, which model makes room for another one, and what the others
take over of a node that is lost. Must not know links, nor how plans are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shardnet.types import NodeId
from shardnet.wire.messages.household import HouseholdModel
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import PlanReply

SLACK: Final = 1.01
SLACK_BYTES: Final = 1 << 20
"""What a runner may take beyond what its plan says, as a factor and beside it: plans round."""
SHARED_SPEED: Final = 0.5
"""A ring beside another one on the same nodes gets about half of the speed that it has alone, while
both compute (docs/benchmarks.md)."""


def is_here(info: NodeInfo) -> bool:
    """Say whether a node takes layers now."""
    return not (info.is_draining or info.rests or info.asleep)


def takes_part(info: NodeInfo, model: HouseholdModel) -> bool:
    """Say whether a node may have layers of a model now."""
    return is_here(info) and (not model.only or info.name in model.only)


def needed(plan: PlanReply, parallel: int) -> dict[NodeId, int]:
    """Return the bytes that each node of a plan needs, with room for so many whole contexts."""
    found: dict[NodeId, int] = {}
    for stage in plan.stages:
        n_nodes = 1 + len(stage.shards)
        n_bytes = (stage.weight_bytes + parallel * stage.kv_bytes) // n_nodes + stage.working_bytes
        if stage.rank == 0:
            n_bytes += plan.tower_bytes
        if stage.rank == len(plan.stages) - 1:
            n_bytes += plan.mtp_bytes
        for node in (stage.node, *(shard.node for shard in stage.shards)):
            found[NodeId(node)] = found.get(NodeId(node), 0) + int(n_bytes * SLACK) + SLACK_BYTES
    return found


def is_better_alone(alone: PlanReply | None, shared: PlanReply | None) -> bool:
    """Say whether a ring on nodes that no other one uses is better than one on any nodes."""
    if alone is None or shared is None:
        return alone is not None
    if alone.predicted_tok_s is None or shared.predicted_tok_s is None:
        return True
    return alone.predicted_tok_s >= SHARED_SPEED * shared.predicted_tok_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that has a ring: what counts of it when memory is short."""

    name: str
    priority: int
    kept: bool
    is_in_use: bool
    asked_s: float
    """When it was asked for last, by any clock."""


def victim(loaded: Iterable[Loaded], *, below: int | None = None) -> str:
    """Return which model makes room: the least important one, of those the least recently used.

    One that is in use stays. With `below` one that is kept goes too, if its priority is less.
    Returns "" if none may go.
    """
    going = [
        one
        for one in loaded
        if not one.is_in_use and (not one.kept if below is None else one.priority < below)
    ]
    return min(going, key=lambda one: (one.priority, one.asked_s)).name if going else ""


def made_up(lost_bytes: int, free: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """Divide what a lost node had over those that are left, by what they have free.

    What does not fit is left out.
    """
    most = sum(free.values())
    share = min(1.0, lost_bytes / most) if most > 0 else 0.0
    return {node: int(n_bytes * share) for node, n_bytes in free.items()}
