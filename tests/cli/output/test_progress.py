"""What is said while a ring is made, where standard error is no terminal."""

from __future__ import annotations

import pytest

from shardnet.wire.messages.plans import NodeProgress
from shardnet_cli.output.progress import LoadBars


def test_a_node_that_is_waited_for_is_told_once_and_counts_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LoadBars() as bars:
        for n_done in (1, 2):
            bars.update(
                NodeProgress(request=1, rank=0, done_bytes=n_done, total_bytes=2, phase="measuring")
            )
        for _ in range(2):
            bars.update(
                NodeProgress(request=1, rank=1, done_bytes=0, total_bytes=0, phase="waiting")
            )
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "a node: waiting for another head that uses the node\n"
