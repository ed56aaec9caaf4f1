"""Where a drafter is loaded: by what a draft takes, its way, and what it takes from a stage."""

from __future__ import annotations

import pytest

from shardnet.cluster.placement.draft_places import draft_places
from shardnet.cluster.placement.figures import StageSpeed
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo

MB = 1 << 20


def node(name: str, *, cores: int = 4, threads: int = 4, free: int = 1000 * MB) -> NodeInfo:
    return NodeInfo(
        node=name,
        name=name,
        address=f"{name}:1",
        version="0",
        device="cpu",
        memory_bytes=2000 * MB,
        memory_free_bytes=free,
        cores=cores,
        threads=threads,
        dtypes=["float32"],
        host_id=name,
    )


def speed(layer_s: float) -> StageSpeed:
    return StageSpeed(layer_s=layer_s, layer_256_s=0.1, embed_s=0.0, head_s=0.0)


@pytest.mark.parametrize(
    ("speeds", "changed", "expected"),
    [
        ({"head": 1e-3, "tail": 1e-3, "pi": 1e-3}, {}, ["pi", "head", "tail"]),
        ({"head": 1e-3, "tail": 1e-3, "pi": 1e-2}, {}, ["head", "tail", "pi"]),
        ({"head": 1e-3, "tail": 1e-4, "pi": 1e-2}, {}, ["tail", "head", "pi"]),
        ({"head": 1e-3, "tail": 1e-3, "pi": 1e-3}, {"head": {"cores": 8}}, ["head", "pi", "tail"]),
        ({"head": 1e-3, "pi": 1e-3}, {"pi": {"free": 99 * MB}}, ["head", "tail"]),
        ({}, {}, ["head", "tail", "pi"]),
        ({"pi": 1e-3}, {}, ["head", "pi", "tail"]),
    ],
)
def test_where_drafts_cost_the_least(
    speeds: dict[str, float], changed: dict[str, dict[str, int]], expected: list[str]
) -> None:
    found = draft_places(
        100 * MB,
        [node(name, **changed.get(name, {})) for name in ("head", "tail", "pi")],
        layer_bytes=50 * MB,
        speeds={NodeId(name): speed(layer_s) for name, layer_s in speeds.items()},
        stages=[NodeId("head"), NodeId("tail")],
        round_trip_s=lambda node: 4e-4,
    )
    assert [place.name for place in found] == expected
    for place in found:
        takes = f"a draft takes about {2e3 * speeds.get(place.name, 0):.2g} ms"
        assert place.why.startswith(takes if place.name in speeds else "not measured")
