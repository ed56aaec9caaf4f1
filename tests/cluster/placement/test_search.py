"""The search: equal to the naive planner where it is exact, close to exact above, and quick."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings.clusters import MIB, Links, candidate, naive_best_s, random_cluster, shape
from support.soak import cases, examples, is_soak

from shardnet.cluster.placement import split
from shardnet.cluster.placement.estimate import measured_problem
from shardnet.cluster.placement.figures import (
    CandidateNode,
    LinkSpeed,
    ModelShape,
    Objective,
    StageSpeed,
)
from shardnet.cluster.placement.placement import place
from shardnet.cluster.placement.split import (
    EXACT_WIDTH,
    Problem,
    best_pair,
    best_single,
    find_ring,
    width_for,
)

MOST_LOOKS = 350_000
"""At longer paths, before the best ring of 16 nodes is found."""

both = pytest.mark.parametrize("objective", list(Objective))

times_s = st.sampled_from([0.0002, 0.001, 0.002, 0.01]) | st.floats(1e-4, 0.02)
speeds = st.builds(
    StageSpeed,
    layer_s=times_s,
    layer_256_s=times_s,
    embed_s=st.just(0.0) | times_s,
    head_s=st.just(0.0) | times_s,
)
link_speeds = st.builds(
    LinkSpeed,
    round_trip_s=st.sampled_from([0.0, 0.0001, 0.002, 0.04]) | st.floats(0, 0.05),
    bytes_per_s=st.sampled_from([1e5, 1e6, 1.25e9]) | st.floats(1e5, 1e9),
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ModelShape, list[CandidateNode], Links]:
    model = draw(
        st.builds(
            shape,
            n_layers=st.integers(1, 6),
            head_mib=st.integers(0, 30),
            embedding_mib=st.integers(0, 30),
            kv_mib=st.integers(0, 5),
        )
    )
    n_nodes = draw(st.integers(1, 6))
    whole_mib = model.memory_bytes(model.whole) // MIB + 1
    memory = st.integers(5, 60) | st.integers(5, whole_mib + 5)
    nodes = [candidate(f"n{i}", draw(memory), draw(speeds)) for i in range(n_nodes)]
    links = {(a.node, b.node): draw(link_speeds) for a in nodes for b in nodes if a is not b}
    return model, nodes, links


def find_s(
    model: ModelShape,
    nodes: Sequence[CandidateNode],
    links: Links,
    objective: Objective,
    width: int | None = None,
) -> float:
    """What the ring found costs, infinity if none was."""
    ring = find_ring(measured_problem(model, nodes, links, objective), width)
    return ring.cost_s if ring else math.inf


@both
@settings(max_examples=examples(30))
@given(cluster=clusters())
def test_up_to_six_nodes_no_ring_is_better(
    cluster: tuple[ModelShape, list[CandidateNode], Links], objective: Objective
) -> None:
    best_s = naive_best_s(*cluster, objective)
    assert find_s(*cluster, objective) == pytest.approx(best_s, rel=1e-6)


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
@pytest.mark.parametrize("objective", cases([Objective.LATENCY], [Objective.THROUGHPUT]))
def test_in_a_home_lab_of_six_no_ring_is_better(objective: Objective) -> None:
    n_stages = set()
    for seed in range(10 if is_soak() else 7):
        cluster = random_cluster(seed, n_nodes=6, n_layers=7)
        best_s = naive_best_s(*cluster, objective)
        ring = find_ring(measured_problem(*cluster, objective))
        assert (ring.cost_s if ring else math.inf) == pytest.approx(best_s, rel=1e-6)
        n_stages.add(len(ring.nodes) if ring else 0)
    assert len(n_stages) >= 4, "these clusters make it too easy"


@both
def test_where_layers_are_fewer_than_nodes_no_ring_is_better(objective: Objective) -> None:
    for seed in range(60):
        cluster = random_cluster(seed, n_nodes=5, n_layers=3)
        best_s = naive_best_s(*cluster, objective)
        assert find_s(*cluster, objective) == pytest.approx(best_s, rel=1e-6)


@both
def test_up_to_eight_nodes_nothing_is_dropped(objective: Objective) -> None:
    assert width_for(8) == EXACT_WIDTH
    for seed in range(30):
        cluster = random_cluster(seed, n_nodes=8, n_layers=24)
        assert find_s(*cluster, objective) == find_s(*cluster, objective, width=10**6)


@both
def test_a_beam_is_within_five_percent_of_exact_on_many_clusters(objective: Objective) -> None:
    """At 8 nodes up to 1120 paths are weighed; the beam keeps a quarter of them."""
    n_fitting = 0
    n_clusters = 200 if is_soak() else 32
    for seed in range(n_clusters):
        cluster = random_cluster(seed, n_nodes=7 + seed % 2, n_layers=(16, 22, 32, 80)[seed % 4])
        exact_s = find_s(*cluster, objective)
        found_s = find_s(*cluster, objective, width=EXACT_WIDTH // 4)
        assert found_s == exact_s == math.inf or exact_s <= found_s <= exact_s * 1.05
        n_fitting += exact_s < math.inf
    assert n_fitting > 0.75 * n_clusters


@both
def test_above_that_no_single_node_and_no_pair_is_better(objective: Objective) -> None:
    for seed in range(60):
        model, nodes, links = random_cluster(seed, n_nodes=12, n_layers=32)
        problem: Problem = measured_problem(model, nodes, links, objective)
        found = find_ring(problem, width=1)
        for other in (best_single(problem), best_pair(problem)):
            assert other is None or (found and found.cost_s <= other.cost_s)


@both
@pytest.mark.parametrize("seed", cases([37], [2, 6, 8]))
def test_sixteen_nodes_and_128_layers_are_placed_with_little_work(
    objective: Objective, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second on an idle machine: so long take as many looks at longer paths as are allowed here.

    Room for the model is scarce in these clusters: rings of 10 to 16 stages, the slowest to find.
    """
    looks = count()
    for rules in (split._SumRules, split._SlowestRules):

        def counted(*place: Any, floor: Callable[..., float] = rules.floor) -> float:
            next(looks)
            return floor(*place)

        monkeypatch.setattr(rules, "floor", counted)
    model, nodes, links = random_cluster(seed, n_nodes=16, n_layers=128)
    placement = place(model, nodes, links, objective)
    assert next(looks) < MOST_LOOKS
    assert placement.stages[-1].layers.end == 128
