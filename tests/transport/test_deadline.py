"""A deadline counts what the peer takes, not the time in which this process stood still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.transport_harness import IDENTITY, OPTIONS, Harness

from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link


class StallingLoop(asyncio.SelectorEventLoop):
    """A loop of which the test says when it has stood still, and for how long."""

    stood_still_s = 0.0

    def time(self) -> float:
        return super().time() + self.stood_still_s


def run(main: Callable[[StallingLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=StallingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, StallingLoop)
        runner.run(main(loop))


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_what_takes_too_long_is_ended() -> None:
    async def main(loop: StallingLoop) -> None:
        with pytest.raises(TimeoutError):
            async with deadline(0.05):
                await asyncio.Event().wait()

    run(main)


def test_a_process_that_stood_still_has_its_time_left() -> None:
    """Several times, and then it ends all the same."""

    async def main(loop: StallingLoop) -> None:
        n_pauses = 0

        async def wait() -> None:
            nonlocal n_pauses
            async with deadline(0.2):
                for _ in range(3):
                    loop.stood_still_s += 60
                    await turns(5)
                    n_pauses += 1
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await wait()
        assert n_pauses == 3

    run(main)


@pytest.mark.parametrize("identity", [None, IDENTITY], ids=["tcp", "tls"])
def test_a_link_comes_up_although_the_process_stood_still(identity: Any) -> None:
    """Whatever the handshake was at, on either side."""
    harness = Harness(tcp=True, loop_factory=StallingLoop, identity=identity)

    async def scenario(harness: Harness) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StallingLoop)
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener = await harness.listen(accepted.put)
        for n_turns in range(12):
            connecting = asyncio.create_task(harness.connect(listener))
            await turns(n_turns)
            loop.stood_still_s += 100 * OPTIONS.handshake_s
            near, far = await connecting, await accepted.get()
            await asyncio.gather(near.close(), far.close())

    harness.run(scenario)
