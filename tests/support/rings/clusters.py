"""Made-up models, nodes and links for tests of the planner, and the naive planner to hold it to."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from shardnet.cluster.placement.figures import (
    CandidateNode,
    LinkSpeed,
    ModelShape,
    Objective,
    StageSpeed,
)
from shardnet.types import BLOCK_POSITIONS, LayerRange, NodeId

MIB = 2**20

Links = dict[tuple[NodeId, NodeId], LinkSpeed]


def shape(
    n_layers: int = 8,
    head_mib: int = 2,
    kv_mib: int = 1,
    embedding_mib: int = 4,
    n_blocks: int = 1,
    layer_mib: int = 10,
) -> ModelShape:
    """A model in MiB: per layer, embedding, head, and KV cache per layer and block."""
    return ModelShape(
        n_layers=n_layers,
        layer_bytes=layer_mib * MIB,
        embedding_bytes=embedding_mib * MIB,
        head_bytes=head_mib * MIB,
        hop_bytes=4096,
        context=n_blocks * BLOCK_POSITIONS,
        kv_block_bytes=kv_mib * MIB,
        activation_bytes=MIB,
    )


def speed(layer_ms: float, head_ms: float = 0.0, embed_ms: float = 0.0) -> StageSpeed:
    return StageSpeed(
        layer_s=layer_ms / 1e3,
        layer_256_s=layer_ms / 20,
        embed_s=embed_ms / 1e3,
        head_s=head_ms / 1e3,
    )


def candidate(name: str, memory_mib: int, measured: StageSpeed | None = None) -> CandidateNode:
    return CandidateNode(
        node=NodeId(f"id-{name}"), name=name, memory_bytes=memory_mib * MIB, speed=measured
    )


def equal_links(candidates: Sequence[CandidateNode], round_trip_ms: float = 2.0) -> Links:
    """Links of 1 Gbit/s between all nodes."""
    link = LinkSpeed(round_trip_s=round_trip_ms / 1e3, bytes_per_s=125e6)
    return {(a.node, b.node): link for a, b in permutations(candidates, 2)}


def random_cluster(
    seed: int, n_nodes: int, n_layers: int
) -> tuple[ModelShape, list[CandidateNode], Links]:
    """A home lab: nodes within a factor of 30 in speed, links from Wi-Fi to 10 Gbit/s.

    Together the nodes have room for the model 0.9 to 8 times.
    """
    chance = random.Random(seed)
    model = shape(n_layers=n_layers, head_mib=chance.choice([2, 15, 40]), layer_mib=20)
    ampleness = chance.choice([0.9, 1.3, 2.0, 8.0]) * 22 * n_layers / n_nodes
    nodes = []
    for index in range(n_nodes):
        layer_ms = 2 * 10 ** chance.uniform(-0.7, 0.8)
        measured = speed(layer_ms, head_ms=layer_ms * model.head_bytes / model.layer_bytes)
        memory_mib = int(30 + ampleness * chance.uniform(0.3, 1.7))
        nodes.append(candidate(f"n{index}", memory_mib, measured))
    links = {
        (a.node, b.node): LinkSpeed(
            round_trip_s=10 ** chance.uniform(-4, -1.5),
            bytes_per_s=chance.choice([1.25e6, 12.5e6, 125e6, 1.25e9]),
        )
        for a, b in permutations(nodes, 2)
    }
    return model, nodes, links


def naive_best_s(
    model: ModelShape, nodes: Sequence[CandidateNode], links: Links, objective: Objective
) -> float:
    """Weigh every split over every ring; infinity when the model fits none."""
    best = math.inf
    for n_stages in range(1, min(len(nodes), model.n_layers) + 1):
        for ring in permutations(nodes, n_stages):
            for split in splits(model, n_stages):
                if fits(model, ring, split):
                    best = min(best, naive_cost_s(model, ring, split, links, objective))
    return best


def splits(model: ModelShape, n_stages: int) -> Iterator[list[LayerRange]]:
    """Every way to cut the layers into so many ranges."""
    for cuts in combinations(range(1, model.n_layers), n_stages - 1):
        yield [LayerRange(a, b) for a, b in pairwise([0, *cuts, model.n_layers])]


def fits(model: ModelShape, ring: Sequence[CandidateNode], split: Sequence[LayerRange]) -> bool:
    return all(
        model.memory_bytes(layers) <= node.memory_bytes
        for node, layers in zip(ring, split, strict=True)
    )


def naive_cost_s(
    model: ModelShape,
    ring: Sequence[CandidateNode],
    split: Sequence[LayerRange],
    links: Links,
    objective: Objective,
) -> float:
    """What the issue says a trip costs, added up stage by stage."""
    total_s, slowest_s = 0.0, 0.0
    for rank, (node, layers) in enumerate(zip(ring, split, strict=True)):
        assert node.speed is not None
        stage_s = len(layers) * node.speed.layer_s
        if rank == 0:
            stage_s += node.speed.embed_s
        if rank == len(ring) - 1:
            stage_s += node.speed.head_s
        total_s += stage_s
        if len(ring) > 1:
            is_tail = rank == len(ring) - 1
            link = links[node.node, ring[(rank + 1) % len(ring)].node]
            sending_s = (4 if is_tail else model.hop_bytes) / link.bytes_per_s
            total_s += link.round_trip_s / 2 + sending_s
            stage_s += sending_s
        slowest_s = max(slowest_s, stage_s)
    return total_s if objective is Objective.LATENCY else slowest_s
