"""What the log and requests are told of a recovery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardnet.cluster.recovery.recovery import Loading, RecoveryRecord, waiting_words
from shardnet.types import LayerRange


@pytest.mark.parametrize(
    ("n_requests", "waiting", "went_on"),
    [
        (0, "0 requests wait", "0 requests"),
        (1, "1 request waits", "1 request"),
        (2, "2 requests wait", "2 requests"),
    ],
)
def test_requests_are_counted_in_words(n_requests: int, waiting: str, went_on: str) -> None:
    record = RecoveryRecord(
        at_s=0.0, why="bert was lost", n_requests=n_requests, lost=("bert",), nodes=("anna",)
    )
    assert record.first_words == f"recovering: bert was lost; {waiting}"
    assert f"{went_on} went on over anna without bert" in record.words


def plan_of(**layers: tuple[int, int]) -> Any:
    """The plan of a ring whose nodes have these layers."""
    stages = [
        SimpleNamespace(node=f"{name}-id", layers=LayerRange(*each), shards=())
        for name, each in layers.items()
    ]
    nodes = [SimpleNamespace(node=f"{name}-id", name=name) for name in layers]
    return SimpleNamespace(placement=SimpleNamespace(stages=stages), ring_nodes=nodes)


@pytest.mark.parametrize(
    ("layers", "what", "expected_s"),
    [
        ({"anna": (0, 5), "cleo": (5, 12)}, "loading 1 layer at anna, 3 layers at cleo", 6.0),
        ({"anna": (0, 12)}, "loading 8 layers at anna", 16.0),
        ({"anna": (0, 4), "dora": (4, 8), "cleo": (8, 12)}, "loading 4 layers at dora", 8.0),
        ({"anna": (0, 4)}, "connecting the nodes that are left", 1.0),
    ],
)
def test_what_is_loaded_is_what_nodes_lack_of_the_next_ring(
    layers: dict[str, tuple[int, int]], what: str, expected_s: float
) -> None:
    """The ring before it, of four layers a node, took 8 s."""
    former = plan_of(anna=(0, 4), bert=(4, 8), cleo=(8, 12))
    loading = Loading.of(former, plan_of(**layers), 8.0)
    assert (loading.what, loading.expected_s) == (what, expected_s)


def test_loading_is_told_by_its_progress_every_second() -> None:
    """The slowest node counts, and what is not under way yet says nothing."""
    now_s, told = [0.0], list[float]()
    loading = Loading(what="loading", expected_s=9.0)
    for at_s, rank, done_bytes in (
        (10.0, 0, 0),
        (10.5, 1, 50),
        (12.0, 0, 20),
        (12.5, 1, 90),
        (15.0, 0, 50),
        (16.5, 0, 100),
    ):
        now_s[0] = at_s
        loading.take(told.append, lambda: now_s[0], rank, "loading", done_bytes, 100)
    assert told == pytest.approx([8.0, 5.0, 6.5 / 9])


def test_a_wait_is_told_in_words() -> None:
    assert waiting_words("planning", 0.0) == "planning"
    assert waiting_words("planning", 0.2) == "planning, about 1 s"
