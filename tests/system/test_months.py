"""What months bring to a cluster, once or twice each: a few moments of `scripts/soak --months`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.chaos.months import Months, months
from support.soak import is_soak

from shardnet.transport.loop import run

BRIEF = ("clock", "key", "tmp", "key")
"""What no other test of the suite has while requests run: in some seconds, at two nodes."""
SHORT = ("clock", "address", "key", "disk", "clock", "suspend", "key", "tmp")
"""In this order the key is replaced on nodes that have other addresses by now, and the time of the
old one is ended while a node is back from an hour's sleep, whose clock has jumped."""


async def live(folder: Path, n_nodes: int, events: Sequence[str]) -> Months:
    async with months(folder, n_nodes, 61, folder / "samples.jsonl", minute_s=60.0) as lived:
        await lived.answered()
        for what in events or [*SHORT, *lived.events()]:
            await lived.happen(what)
        await lived.answered()
    return lived


@pytest.mark.parametrize(
    ("n_nodes", "events"),
    [
        (2, BRIEF),
        pytest.param(
            *(3, ()), marks=pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
        ),
    ],
    ids=["brief", "whole"],
)
def test_months_change_no_text_and_leave_nothing_behind(
    tmp_path: Path, n_nodes: int, events: Sequence[str]
) -> None:
    lived = run(live(tmp_path, n_nodes, events))
    assert lived.wrong == []
    assert lived.happened["key"] >= 2
    assert lived.happened["key refused"] == 0
