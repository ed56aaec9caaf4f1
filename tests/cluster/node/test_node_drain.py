"""When a node asks the head of its ring to do without it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from shardnet.cluster.node.pressure import NodeDrain
from shardnet.errors import PlanError, ShardnetError
from shardnet.wire.messages.stages import LeaveRing


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

    control = SimpleNamespace(ask=ask)
    links: list[Any] = [None, *[control] * 4]
    membership = SimpleNamespace(
        is_over=False,
        is_forming=False,
        owner="head",
        ring="r",
        model="/m",
        addresses=["head:1"],
    )
    succeeded: list[str] = []
    drain = NodeDrain(
        head=cast(Any, SimpleNamespace(node="me", was_succeeded=succeeded.append)),
        host=cast(Any, SimpleNamespace(membership=membership)),
        n_routed=lambda: 0,
        link_of=lambda _: links.pop(0),
        hand_over=cast(Any, None),
        has_deputy=lambda: False,
        log=lambda line: None,
    )

    async def main() -> None:
        for why in ("typing", "typing", "typing", "typing", "typing", ""):
            await drain.leave(why)

    asyncio.run(main())
    assert asked == [*[("r", "typing")] * 3, ("r", "")]
    assert succeeded == ["head:1"]
