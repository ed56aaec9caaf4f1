"""Whether a head is lost, as its deputy finds out from others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.recovery import stand_in
from shardnet.errors import LinkClosedError
from shardnet.types import NodeId

HEAD = NodeId("anna")
OTHERS = [NodeId("bert"), NodeId("cleo")]


class Node:
    """A node that is asked: `sees` whether it has a link to the head, None if it never answers."""

    def __init__(self, sees: bool | None) -> None:
        self.sees = sees

    def next_request(self) -> int:
        """Number a question."""
        return 1

    async def ask(self, *_: object) -> Any:
        """Answer, or end the link."""
        if self.sees is None:
            raise LinkClosedError("gone")
        return SimpleNamespace(is_linked=self.sees)


@pytest.mark.parametrize(
    ("bert", "cleo", "back_after", "lost"),
    [
        (False, False, None, True),
        (False, None, None, True),
        (True, False, None, False),  # the link between two nodes is cut, and the head lives
        (None, None, 3, False),  # this node was frozen, and its links come back
        (None, None, None, True),  # it is alone: somebody has to go on
    ],
)
def test_nobody_is_lost_because_nobody_answers(
    bert: bool | None,
    cleo: bool | None,
    back_after: int | None,
    lost: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_in, "SEEN_S", 0.05)
    monkeypatch.setattr(stand_in, "AGAIN_S", 0.005)
    nodes = dict(zip(OTHERS, (Node(bert), Node(cleo)), strict=True))
    n_looks = 0

    def link_of(node: NodeId) -> Any:
        nonlocal n_looks
        if node != HEAD:
            return nodes[node]
        n_looks += 1
        return Node(True) if back_after is not None and n_looks > back_after else None

    assert asyncio.run(stand_in.is_lost(HEAD, OTHERS, cast(Any, link_of))) is lost


def test_with_nobody_to_ask_the_head_is_waited_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_in, "ALONE_S", 0.02)
    assert asyncio.run(stand_in.is_lost(HEAD, [], lambda _: None))
