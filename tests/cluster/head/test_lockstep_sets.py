"""Requests in lockstep begin together, in the order in which they were sent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shardnet.cluster.head import lead
from shardnet.cluster.head.lead import LockstepSets
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

LINK: Any = object()


def asked(number: int, size: int, *, of: int = 1) -> Generate:
    return Generate(
        request=number,
        choice=ModelChoice(model="m"),
        sampling=SamplingParams(),
        lockstep=True,
        lockstep_set=of,
        lockstep_size=size,
    )


class Clients:
    """Requests that are ready when they are told to; `begun` has those that went on."""

    def __init__(self) -> None:
        self.sets = LockstepSets()
        self.begun: list[int] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, asyncio.Event] = {}

    def send(self, message: Generate) -> None:
        ready = self._ready[message.request] = asyncio.Event()
        self._tasks[message.request] = asyncio.create_task(self._run(message, ready))

    async def _run(self, message: Generate, ready: asyncio.Event) -> None:
        with self.sets.member(LINK, message) as member:
            await ready.wait()
            await member.begin()
            self.begun.append(message.request)

    async def ready(self, *numbers: int) -> None:
        for number in numbers:
            self._ready[number].set()
            await self.turn()

    async def leave(self, number: int) -> None:
        self._tasks[number].cancel()
        await self.turn()

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self) -> None:
        await asyncio.wait(self._tasks.values())
        assert not cast(Any, self.sets)._sets


def test_a_set_begins_when_the_last_is_ready_or_gone() -> None:
    async def main() -> None:
        clients = Clients()
        for number in (1, 2, 3, 4):
            clients.send(asked(number, 4))
        clients.send(asked(5, 2, of=5))
        await clients.ready(3, 1, 5)
        assert clients.begun == []
        await clients.leave(2)
        assert clients.begun == []
        await clients.ready(4)
        assert clients.begun == [1, 3, 4]
        clients.send(asked(6, 2, of=5))
        await clients.ready(6)
        assert clients.begun == [1, 3, 4, 5, 6]
        await clients.end()

    asyncio.run(main())


def test_one_that_waits_and_leaves_is_not_waited_for() -> None:
    async def main() -> None:
        clients = Clients()
        for number in (1, 2):
            clients.send(asked(number, 2))
        await clients.ready(1)
        await clients.leave(1)
        await clients.ready(2)
        assert clients.begun == [2]
        await clients.end()

    asyncio.run(main())


def test_a_set_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "PATIENCE_S", 0.01)

    async def main() -> None:
        clients = Clients()
        clients.send(asked(1, 16))
        await clients.ready(1)
        await clients.end()
        assert clients.begun == [1]
        clients.send(asked(2, 0))
        await clients.ready(2)
        assert clients.begun == [1, 2]
        await clients.end()

    asyncio.run(main())
