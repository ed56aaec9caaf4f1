"""Words for rings that are lost: the lost node first, whoever tells of it."""

from __future__ import annotations

import pytest

from shardnet.cluster.head.head import lost_first

BERT = "bert (10.0.0.2:7000): the connection is closed"
OTHERS = ["bert", "cleo", "dora"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (BERT, BERT),
        (f"cleo (10.0.0.3:7000): {BERT}", f"{BERT} (as cleo says)"),
        (f"dora ([::1]:7000): cleo (10.0.0.3:7000): {BERT}", f"{BERT} (as dora says)"),
        ("cleo (10.0.0.3:7000): out of memory", "cleo (10.0.0.3:7000): out of memory"),
        (
            "cleo (10.0.0.3:7000): anna (10.0.0.1:7000): the connection is closed",
            "cleo (10.0.0.3:7000): anna (10.0.0.1:7000): the connection is closed",
        ),
        ("its place was given away", "its place was given away"),
    ],
)
def test_who_was_lost_is_named_first(told: str, said: str) -> None:
    assert lost_first(told, OTHERS) == said
