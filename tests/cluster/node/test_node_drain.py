"""When a node asks the head of its ring to do without it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.strategies.wire_strategies import hello

from shardnet.cluster.node.pressure import NodeDrain
from shardnet.errors import PlanError, ShardnetError
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.stages import LeaveRing


def drain_of(control: Any, succeeded: list[str]) -> NodeDrain:
    """A drain of a node in the ring of a head; `control` links to that."""
    membership = SimpleNamespace(
        is_over=False,
        is_forming=False,
        owner="head",
        ring="r",
        model="/m",
        addresses=["head:1"],
    )
    return NodeDrain(
        head=cast(Any, SimpleNamespace(node="me", was_succeeded=succeeded.append)),
        host=cast(Any, SimpleNamespace(membership=membership)),
        n_routed=lambda: 0,
        link_of=lambda _: control,
        hand_over=cast(Any, None),
        has_deputy=lambda: False,
        log=lambda line: None,
    )


def test_a_head_is_asked_again_but_where_it_refused_for_the_same_reason() -> None:
    """One whose ring nobody used just then may get a request before the node has left it.

    Requests that come to a node which is drained are sent to that head.
    """
    asked: list[tuple[str, str]] = []
    answers: list[ShardnetError | None] = [None, None, PlanError("too little memory"), None]

    async def ask(message: LeaveRing, *_: Any, **__: Any) -> None:
        asked.append((message.ring, message.why))
        if (error := answers.pop(0)) is not None:
            raise error

    control = SimpleNamespace(ask=ask, link=SimpleNamespace(peer=hello("head")))
    links: list[Any] = [None, *[control] * 4]
    succeeded: list[str] = []
    drain = drain_of(None, succeeded)
    drain.link_of = lambda _: links.pop(0)

    async def main() -> None:
        for why in ("typing", "typing", "typing", "typing", "typing", ""):
            await drain.leave(why)

    asyncio.run(main())
    assert asked == [*[("r", "typing")] * 3, ("r", "")]
    assert succeeded == ["head:1"]


@pytest.mark.parametrize(("knows", "returns_s"), [([], 0.0), ([Capability.UPDATE], 60.0)])
def test_a_head_waits_for_a_node_that_comes_back_where_it_knows_that_nodes_do(
    knows: list[Capability], returns_s: float
) -> None:
    asked: list[LeaveRing] = []

    async def ask(message: LeaveRing, *_: Any, **__: Any) -> None:
        asked.append(message)

    peer = hello("head", capabilities=knows)
    drain = drain_of(SimpleNamespace(ask=ask, link=SimpleNamespace(peer=peer)), [])
    assert asyncio.run(drain.leave(pauses_s=60.0))
    assert [message.returns_s for message in asked] == [returns_s]
