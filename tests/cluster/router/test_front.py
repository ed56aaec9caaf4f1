"""Requests that wait for one of several rings end when those are left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.cluster.router.front import Front
from shardnet.errors import PeerFailedError, ShardnetError, SupersededError
from shardnet.wire.messages.plans import ModelChoice


def unreached(jobs: SupervisedJobs) -> Front:
    """Two rings whose heads never answer."""
    choice = ModelChoice(model="m")
    rings = [
        SimpleNamespace(nodes=[SimpleNamespace(name=name)], choice=choice)
        for name in ("anna", "bert")
    ]

    async def reach(plan: Any) -> Any:
        await asyncio.Event().wait()

    plan: Any = SimpleNamespace(rings=rings)
    return Front(choice, plan, reach, jobs, lambda line: None)


@pytest.mark.parametrize("is_superseded", [True, False])
def test_whoever_waits_for_a_ring_learns_that_none_is_kept(is_superseded: bool) -> None:
    async def main() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            front = unreached(SupervisedJobs(tasks, lambda line: None))
            waiting = [
                asyncio.ensure_future(front.ring_for(b"")),
                asyncio.ensure_future(front.opened(lambda told: None)),
            ]
            await asyncio.sleep(0)
            error: ShardnetError = SupersededError("bert leads")
            if is_superseded:
                front.abandon(error)
            await front.close()
            for one in waiting:
                with pytest.raises(SupersededError if is_superseded else PeerFailedError):
                    await one

    asyncio.run(main())
