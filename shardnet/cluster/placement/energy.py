"""What a ring draws for a token, predicted from what its nodes drew in rings before. Pure.

A node draws its usual watts as long as a ring runs that it is in, computing or waiting. Nodes that
are in no ring count for nothing: they can be switched off. No plan is chosen by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from shardnet.wire.messages.diagnostics import PowerMeter
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import PlannedEnergy, PlannedWithout

WORTH: Final = 0.05
"""The share of the joules that a ring without a node must save to be named."""


def meters_of(nodes: Iterable[NodeInfo]) -> dict[tuple[str, str], PowerMeter]:
    """Return what measures nodes, by machine and source.

    Nodes of one machine with the same source have that together: it counts once.
    """
    return {(info.host_id, meter.source): meter for info in nodes for meter in info.meters}


def joules_a_token(nodes: Sequence[NodeInfo], tok_s: float | None) -> float | None:
    """Return what nodes draw for each of `tok_s` tokens a second, None where one does not know."""
    watts = [meter.busy_w for meter in meters_of(nodes).values()]
    if not tok_s or None in watts or not all(info.meters for info in nodes):
        return None
    return sum(filter(None, watts)) / tok_s


def ring_without(
    node: NodeInfo, nodes: Sequence[NodeInfo], tok_s: float | None
) -> PlannedWithout | None:
    """Describe the ring of `nodes` that does without `node`; None where its joules are unknown."""
    joules = joules_a_token(nodes, tok_s)
    if joules is None or not tok_s:
        return None
    measured = meters_of(nodes)
    idle = [meter.idle_w for key, meter in meters_of([node]).items() if key not in measured]
    idle_j = None if None in idle else joules + sum(filter(None, idle)) / tok_s
    return PlannedWithout(
        node=node.node,
        name=node.name,
        predicted_tok_s=tok_s,
        joules_per_token=joules,
        idle_joules_per_token=idle_j,
    )


def best_saving(energy: PlannedEnergy) -> PlannedWithout | None:
    """Return the ring without one of the nodes that draws least, None where none is worth it."""
    best = min(energy.without, key=lambda ring: ring.joules_per_token, default=None)
    if best is None or best.joules_per_token > (1 - WORTH) * energy.joules_per_token:
        return None
    return best
