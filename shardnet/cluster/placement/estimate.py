"""From figures to numbers: what the search works on, filled in where nothing was measured.

Knows what is assumed of nodes and links without figures. Pure. Must not know how a ring is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardnet.cluster.placement.figures import (
    CandidateNode,
    Links,
    LinkSpeed,
    ModelShape,
    Objective,
    StageSpeed,
)
from shardnet.cluster.placement.room import rooms_of
from shardnet.cluster.placement.split import Problem
from shardnet.wire.payloads.data import TOKEN_BYTES

ASSUMED_LINK = LinkSpeed(round_trip_s=1e-3, bytes_per_s=12.5e6)
"""What a link is taken to be when none at all was measured: Ethernet of 100 Mbit/s."""


def measured_problem(
    shape: ModelShape, candidates: Sequence[CandidateNode], links: Links, objective: Objective
) -> Problem:
    """Put measured figures into numbers. At least one candidate must have a speed.

    A node without figures is taken to be as slow as the slowest, a link without figures to be like
    the other way, else as slow as the slowest.
    """
    speeds = [candidate.speed for candidate in candidates]
    known = [speed for speed in speeds if speed]
    slowest = StageSpeed(
        layer_s=max(speed.layer_s for speed in known),
        layer_256_s=max(speed.layer_256_s for speed in known),
        embed_s=max(speed.embed_s for speed in known),
        head_s=max(speed.head_s for speed in known),
    )
    filled = [speed or slowest for speed in speeds]
    return Problem(
        objective=objective,
        n_layers=shape.n_layers,
        room=rooms_of(shape, [candidate.memory_bytes for candidate in candidates]),
        layer_s=[speed.layer_s for speed in filled],
        embed_s=[speed.embed_s for speed in filled],
        head_s=[speed.head_s for speed in filled],
        hop_s=ways_s(candidates, links, objective, shape.hop_bytes),
        home_s=ways_s(candidates, links, objective, TOKEN_BYTES),
    )


def bytes_problem(shape: ModelShape, candidates: Sequence[CandidateNode]) -> Problem:
    """Put bytes in the place of seconds: a stage takes what it reads for one row, a hop nothing.

    Of the embedding that is one row: nothing.
    """
    nodes = range(len(candidates))
    return Problem(
        objective=Objective.THROUGHPUT,
        n_layers=shape.n_layers,
        room=rooms_of(shape, [candidate.memory_bytes for candidate in candidates]),
        layer_s=[shape.layer_read_bytes or shape.layer_bytes for _ in nodes],
        embed_s=[0 for _ in nodes],
        head_s=[shape.head_bytes for _ in nodes],
        hop_s=[[0 for _ in nodes] for _ in nodes],
        home_s=[[0 for _ in nodes] for _ in nodes],
    )


def measured_link(links: Links, sender: CandidateNode, receiver: CandidateNode) -> LinkSpeed | None:
    """Return what was measured of the way between two nodes, or of the other way."""
    there = links.get((sender.node, receiver.node))
    return there or links.get((receiver.node, sender.node))


def unmeasured_nodes(ring: Sequence[CandidateNode]) -> list[CandidateNode]:
    """List the nodes of a ring that have no figures."""
    return [candidate for candidate in ring if candidate.speed is None]


def unmeasured_hops(
    ring: Sequence[CandidateNode], links: Links
) -> list[tuple[CandidateNode, CandidateNode]]:
    """List the hops of a ring that have no figures, as (sender, receiver)."""
    return [way for way in hops_of(ring) if measured_link(links, *way) is None]


def hops_of(ring: Sequence[CandidateNode]) -> list[tuple[CandidateNode, CandidateNode]]:
    """List the hops of a ring, the tail's to the head last; a ring of one has none."""
    return list(zip(ring, [*ring[1:], ring[0]], strict=True)) if len(ring) > 1 else []


def ways_s(
    candidates: Sequence[CandidateNode], links: Links, objective: Objective, size_bytes: int
) -> list[list[float]]:
    """Seconds that the objective counts for so many bytes, from each candidate to each other."""
    slowest = LinkSpeed(
        round_trip_s=max((link.round_trip_s for link in links.values()), default=0)
        or ASSUMED_LINK.round_trip_s,
        bytes_per_s=min((link.bytes_per_s for link in links.values()), default=0)
        or ASSUMED_LINK.bytes_per_s,
    )

    def way_s(sender: CandidateNode, receiver: CandidateNode) -> float:
        if sender is receiver:
            return 0.0
        link = measured_link(links, sender, receiver) or slowest
        is_latency = objective is Objective.LATENCY
        return link.hop_s(size_bytes) if is_latency else link.send_s(size_bytes)

    return [[way_s(sender, receiver) for receiver in candidates] for sender in candidates]
