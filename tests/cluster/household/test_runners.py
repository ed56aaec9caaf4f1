"""The runners of a node: opened once, limited, refused where there is no memory, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.household.runners import NOTICED_S, Runners
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import CapacityError, ConfigurationError
from shardnet.types import NodeId
from shardnet.wire.messages.household import OpenRunner, RunnerOpened
from shardnet.wire.messages.plans import ModelChoice

MIB = 1 << 20
CHOICE = ModelChoice(model="m")
OTHER = ModelChoice(model="m", context=512)


class Scripted:
    """A runner that holds what a test says."""

    node, address = NodeId("r"), "10.0.0.1:5000"

    def __init__(self) -> None:
        self.held_bytes = 0
        self.is_needed = False
        self.limits: list[tuple[int, str]] = []
        self.met: list[Sequence[str]] = []
        self.left: list[float] = []

    def limit(self, memory_bytes: int, leader: str) -> None:
        self.limits.append((memory_bytes, leader))

    async def meet(self, addresses: Sequence[str]) -> None:
        self.met.append(addresses)

    async def leave(self, deadline_s: float) -> None:
        self.left.append(deadline_s)


class Place:
    """Runners of a node with so much memory, and what they answered."""

    def __init__(
        self, tasks: asyncio.TaskGroup, *, free_bytes: int = 100 * MIB, is_limited: bool = True
    ) -> None:
        self.opened: list[Scripted] = []
        self.n_closed = 0
        self.log: list[str] = []
        self.why_not: Exception | None = None
        self.sent: list[Any] = []
        self.runners = Runners(
            open_node=self._open,
            tasks=tasks,
            free_bytes=lambda: free_bytes - self.runners.promised_bytes,
            is_limited=is_limited,
            log=self.log.append,
        )
        self.handlers = MessageHandlers()
        self.runners.register(self.handlers)
        link = SimpleNamespace(peer=SimpleNamespace(node="leader"))
        self.control = cast(ControlLink, SimpleNamespace(link=link, send=self.sent.append))

    @asynccontextmanager
    async def _open(self, model: str, choice: ModelChoice) -> AsyncIterator[Scripted]:
        assert choice in (CHOICE, OTHER)
        if self.why_not is not None:
            raise self.why_not
        runner = Scripted()
        self.opened.append(runner)
        yield runner
        self.n_closed += 1

    async def order(
        self,
        model: str,
        memory_bytes: int | None,
        peers: Sequence[str] = (),
        choice: ModelChoice = CHOICE,
    ) -> Any:
        message = OpenRunner(
            request=1, model=model, choice=choice, memory_bytes=memory_bytes, peers=list(peers)
        )
        await self.handlers.handle(self.control, message)
        return self.sent[-1]


def opened(memory_bytes: int) -> RunnerOpened:
    return RunnerOpened(request=1, node="r", address="10.0.0.1:5000", memory_bytes=memory_bytes)


def test_a_runner_is_opened_once_and_given_memory_and_peers() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            place = Place(tasks)
            answers = [await place.order("a", 0), await place.order("a", MIB, ["10.0.0.2:5000"])]
            assert answers == [opened(0), opened(MIB)]
            [runner] = place.opened
            assert runner.limits == [(0, "leader"), (MIB, "leader")]
            assert runner.met == [[], ["10.0.0.2:5000"]]
            await place.runners.close(but=["a", "b"])
            assert place.n_closed == 0
            await place.runners.close(but=["b"])
            assert place.n_closed == 1

    asyncio.run(main())


def test_a_new_leader_finds_what_a_runner_has_and_opens_none_by_asking() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            place = Place(tasks)
            nothing = RunnerOpened(request=1, node="", address="", memory_bytes=0)
            assert await place.order("a", None) == nothing
            assert not place.opened
            await place.order("a", MIB)
            assert await place.order("a", None) == opened(MIB)
            assert [limit for limit, _ in place.opened[0].limits] == [MIB, MIB]
            assert await place.order("a", None, choice=OTHER) == nothing
            assert place.n_closed == 1, "it would compute what is not asked for any more"

    asyncio.run(main())


def test_more_memory_than_there_is_is_refused_and_nothing_changes() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            place = Place(tasks)
            await place.order("a", 60 * MIB)
            with pytest.raises(CapacityError, match="b: this node has 41943040 bytes for it"):
                await place.order("b", 41 * MIB)
            await place.order("a", 100 * MIB)  # with what it has
            assert [runner.limits[-1][0] for runner in place.opened] == [100 * MIB]
            await place.runners.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_limited", [True, False])
def test_what_is_loaded_is_not_counted_twice(is_limited: bool) -> None:
    """Where memory is what the system has left, it is gone from that already."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            place = Place(tasks, is_limited=is_limited)
            await place.order("a", 60 * MIB)
            place.opened[0].held_bytes = 50 * MIB
            assert place.runners.promised_bytes == (60 if is_limited else 10) * MIB
            await place.runners.close()
            assert place.runners.promised_bytes == 0

    asyncio.run(main())


def test_one_that_cannot_be_opened_is_told_to_who_ordered_it_and_may_be_ordered_again() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            place = Place(tasks)
            place.why_not = ConfigurationError("no port is free")
            with pytest.raises(ConfigurationError, match="no port is free"):
                await place.order("a", MIB)
            assert place.log == ["the runner of a has ended: no port is free"]
            place.why_not = None
            await place.order("a", MIB)
            assert len(place.opened) == 1
            await place.runners.close()

    asyncio.run(main())


def test_a_node_that_leaves_lets_those_notice_it_that_divide_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            place, slept = Place(tasks), list[float]()

            async def sleep(seconds: float) -> None:
                slept.append(seconds)

            monkeypatch.setattr(asyncio, "sleep", sleep)
            await place.order("a", MIB)
            await place.runners.leave(30.0)
            assert (slept, place.runners.is_needed) == ([], False)
            place.opened[0].is_needed = True
            await place.runners.leave(30.0)
            assert (slept, place.runners.is_needed) == ([NOTICED_S], True)
            assert place.opened[0].left == [30.0, 30.0]
            await place.runners.close()

    asyncio.run(main())
