"""Which node of a ring, or beside it, holds the layers of another one too, to go on in its place.

Pure. Knows stages and memory. Must not know nodes' state, links or how layers are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardnet.cluster.placement.figures import Exclusion, PartPlan, Placement, StagePlan
from shardnet.types import LayerRange, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """`node` follows the stage `rank` beside its own, if it has any.

    The weights that it holds of that take `weight_bytes`, its keys, values and states at most
    `kv_bytes`.
    """

    rank: int
    node: NodeId
    weight_bytes: int
    kv_bytes: int


def choose_standbys(
    stages: Sequence[StagePlan], memory_bytes: Mapping[NodeId, int], *, holds_weights: bool
) -> tuple[Standby, ...]:
    """Choose who stands by for each stage but the head's, in ring order; each node for one at most.

    `memory_bytes` is what each node may use, its own stage included. A neighbour goes before a node
    beside the ring: its answers need no other way, and without weights it alone follows. Stages
    that no node has memory for, weights included, have none, nor have those with layers that are
    streamed.
    """
    at = {stage.node: rank for rank, stage in enumerate(stages)}
    chosen: list[Standby] = []
    for rank in range(len(stages) - 1, 0, -1):
        stage = stages[rank]
        used = {standby.node for standby in chosen}
        beside = [node for node in memory_bytes if node not in at and holds_weights]
        neighbours = [stages[near].node for near in (rank - 1, rank + 1) if near < len(stages)]
        for node in (*neighbours, *beside):
            own = stages[at[node]] if node in at else None
            needed = stage.weight_bytes + stage.kv_bytes + stage.working_bytes
            if own is not None:  # one computes at a time
                more_bytes = max(0, own.working_bytes - stage.working_bytes)
                needed += own.weight_bytes + own.kv_bytes + more_bytes
            is_streamed = stage.n_streamed or (own is not None and own.n_streamed)
            if node not in used and not is_streamed and needed <= memory_bytes.get(node, 0):
                chosen.append(
                    Standby(
                        rank=rank,
                        node=node,
                        weight_bytes=stage.weight_bytes if holds_weights else 0,
                        kv_bytes=stage.kv_bytes,
                    )
                )
                break
    return tuple(reversed(chosen))


def without_stage(placement: Placement, standby: Standby) -> Placement:
    """Return the placement of the ring that goes on when the stage of a standby is lost."""
    stages = [*placement.stages]
    lost = stages[standby.rank]
    near = next((n for n, stage in enumerate(stages) if stage.node == standby.node), None)
    if near is None:
        stages[standby.rank] = replace(lost, node=standby.node, parts=(), parts_why="")
    else:
        own, last = stages[near], stages[max(near, standby.rank)]
        first = stages[min(near, standby.rank)]
        stages[near] = replace(
            own,
            layers=LayerRange(first.layers.start, last.layers.end),
            weight_bytes=own.weight_bytes + lost.weight_bytes,
            kv_bytes=own.kv_bytes + lost.kv_bytes,
            working_bytes=max(own.working_bytes, lost.working_bytes),
            compute_s=_sum(own.compute_s, lost.compute_s),
            hop_s=last.hop_s,
            parts=_grown(own.parts, first.layers.start, last.layers.end),
        )
        del stages[standby.rank]
    return replace(
        placement,
        stages=tuple(stages),
        left_out=(*placement.left_out, Exclusion(node=lost.node, why="it was lost")),
        why="a standby goes on in the place of a lost node",
    )


def _grown(parts: Sequence[PartPlan], start: int, end: int) -> tuple[PartPlan, ...]:
    """Give the layers of another stage to the device that has their neighbours."""
    if not parts:
        return ()
    first, *others = parts
    grown = [replace(first, layers=LayerRange(start, first.layers.end)), *others]
    grown[-1] = replace(grown[-1], layers=LayerRange(grown[-1].layers.start, end))
    return tuple(grown)


def _sum(one_s: float | None, other_s: float | None) -> float | None:
    return None if one_s is None or other_s is None else one_s + other_s
