"""A ring that works is replaced; when it is lost meanwhile, that ends at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from shardnet.cluster.head.lead import LedRing
from shardnet.cluster.recovery import ring_replacement
from shardnet.cluster.recovery.ring_replacement import PlannedChanges
from shardnet.errors import PeerFailedError
from shardnet.types import NodeId


class Led:
    """A head whose ring can be lost."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.lost = asyncio.Event()
        self.former: Any = SimpleNamespace(
            broken=None,
            engine=Mock(),
            spec=SimpleNamespace(has_movable_slots=True),
            wait_until_broken=self.lost.wait,
        )
        self.ring_instead = AsyncMock()

    @asynccontextmanager
    async def changing(self, lead: object) -> AsyncIterator[None]:
        async with self.lock:
            yield


def test_a_ring_that_is_lost_while_the_next_one_loads_is_recovered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever builds the ring in its place waits neither for stages nor for nodes that hang."""

    async def main() -> None:
        led, loads = Led(), asyncio.Event()

        async def load() -> None:
            loads.set()
            await asyncio.Event().wait()

        moves = Mock(prepare=load, drop=AsyncMock(side_effect=asyncio.Event().wait))
        monkeypatch.setattr(ring_replacement, "RingMoves", lambda former, ring: moves)
        monkeypatch.setattr(ring_replacement, "DROP_S", 0.01)
        lead: Any = SimpleNamespace(ring=led.former, is_recovering=False, is_replacing=False)
        changes = PlannedChanges(
            head=SimpleNamespace(led=led),  # type: ignore[arg-type]
            planner=Mock(),
            left_out=lambda lead: {},
            await_node=lambda lead, returns_s: None,
            log=lambda line: None,
        )
        replacing = asyncio.create_task(changes.put(lead, Mock(), "a better plan"))
        await loads.wait()
        assert led.lock.locked()
        led.lost.set()
        async with asyncio.timeout(30), led.lock:
            assert not lead.is_replacing
        with pytest.raises(PeerFailedError, match="the ring was lost"):
            await replacing
        led.former.engine.release.assert_called_once_with()
        moves.drop.assert_awaited_once_with()
        assert not changes.records

    asyncio.run(main())


@pytest.mark.parametrize("silent", ["a plan", "its ports"])
def test_a_ring_that_is_lost_while_a_node_says_nothing_is_recovered_at_once(silent: str) -> None:
    """Neither a plan for the next ring nor what is known of its nodes' models is waited for."""

    async def main() -> None:
        lost, asked = asyncio.Event(), asyncio.Event()

        async def say_nothing(*_: object, **__: object) -> Any:
            asked.set()
            await asyncio.Event().wait()

        at_once = AsyncMock(return_value=Mock(ring_nodes=[]))
        former = Mock(broken=None, wait_until_broken=lost.wait)
        lead: Any = Mock(ring=former, is_recovering=False, is_replacing=False)
        lead.plan.ring_nodes = [Mock(node="b")]
        led = LedRing(
            node=NodeId("a"),
            host=Mock(),
            builder=Mock(prepare=say_nothing),
            on_broken=Mock(),
        )
        led.lead = lead
        changes = PlannedChanges(
            head=Mock(led=led),
            planner=Mock(replan=say_nothing if silent == "a plan" else at_once),
            left_out=lambda lead: {},
            await_node=lambda lead, returns_s: None,
            log=lambda line: None,
        )
        replacing = asyncio.create_task(changes.replace(lead, {NodeId("b"): "it leaves"}, "why"))
        await asked.wait()
        assert led.lock.locked()
        former.broken = PeerFailedError("bert was lost")
        lost.set()
        async with asyncio.timeout(30), led.changing(lead):
            assert not lead.is_replacing
        with pytest.raises(PeerFailedError, match="the ring was lost"):
            await replacing

    asyncio.run(main())
