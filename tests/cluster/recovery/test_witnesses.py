"""Whether a head is lost, and who goes on for it, as nodes find out from others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.recovery import stand_in
from shardnet.errors import LinkClosedError
from shardnet.types import NodeId

HEAD = NodeId("anna")
OTHERS = [NodeId("bert"), NodeId("cleo")]


class Node:
    """A node that is asked: `sees` whether it has a link to the head, None if it never answers."""

    def __init__(self, sees: bool | None, n_stands_by: int = 0) -> None:
        self.sees = sees
        self.n_stands_by = n_stands_by
        """So many times it says that it stands by for the head."""

    try_to_ask = ControlLink.try_to_ask

    async def ask(self, *_: object) -> Any:
        """Answer, or end the link."""
        if self.sees is None:
            raise LinkClosedError("gone")
        self.n_stands_by -= 1
        return SimpleNamespace(is_linked=self.sees, stands_by=self.n_stands_by >= 0)


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
    monkeypatch.setattr(stand_in, "SEEN_S", 0.05 if back_after is None else 60.0)
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


@pytest.mark.parametrize(
    ("bert", "is_linked", "left"),
    [
        (Node(False, 3), False, 0),  # it has taken over, or given up
        (Node(False), False, 0),
        (Node(None, 3), False, 3),
        (Node(True, 10**6), False, 1),  # the head lives: its ring alone has ended
        (Node(False, 10**6), True, 1),
    ],
)
def test_a_node_waits_for_a_deputy_as_long_as_there_is_one(
    bert: Node, is_linked: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "ASK_S", 0.05)
    monkeypatch.setattr(stand_in, "AGAIN_S", 0.005)
    links: Any = SimpleNamespace(
        linked=lambda: [bert, Node(False)], link_of=lambda _: Node(True) if is_linked else None
    )
    asyncio.run(stand_in.until_succeeded(HEAD, links, lambda: True))
    assert min(max(bert.n_stands_by, 0), max(left, 1)) == left


def test_nobody_is_waited_for_once_another_ring_has_this_node() -> None:
    bert = Node(False, 10**6)
    links: Any = SimpleNamespace(linked=lambda: [bert], link_of=lambda _: None)
    asyncio.run(stand_in.until_succeeded(HEAD, links, lambda: bert.n_stands_by > 10**6 - 2))
    assert bert.n_stands_by == 10**6 - 2
