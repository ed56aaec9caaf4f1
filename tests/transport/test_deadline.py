"""A deadline counts what the peer takes, not the time in which this process stood still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.transport_harness import IDENTITY, OPTIONS, Harness

from shardnet.transport.deadline import IdleTimeout, SendTimeout, deadline
from shardnet.transport.link import Link

ALLOWED_S = 10.0


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


def looks(silence: IdleTimeout, *times: float, reading: bool = True, unsent: int = 0) -> list[bool]:
    return [silence.is_over(now, reading=reading, unsent_bytes=unsent) for now in times]


def test_it_is_over_when_nothing_comes_for_the_allowed_time() -> None:
    assert looks(IdleTimeout(ALLOWED_S, 100.0), 105, 109.9, 110) == [False, False, True]


def test_every_byte_starts_it_again() -> None:
    silence = IdleTimeout(ALLOWED_S, 0.0)
    looks(silence, 4, 8, 9)
    silence.since = 9.0
    assert looks(silence, 12, 16, 18.9, 19) == [False, False, False, True]


def test_a_process_that_stood_still_itself_does_not_blame_the_peer() -> None:
    """After a suspend the timer may run before the bytes that have come are read."""
    silence = IdleTimeout(ALLOWED_S, 0.0)
    assert looks(silence, 2, 60, 65, 69.9, 70) == [False, False, False, False, True]
    silence.since = 70
    assert looks(silence, 72.5, 79, 84, 88.9, 89) == [False, False, False, False, True]


def test_while_we_do_not_read_nothing_can_come() -> None:
    silence = IdleTimeout(ALLOWED_S, 0.0)
    assert not any(looks(silence, *range(2, 60, 2), reading=False))
    silence.since = 60.0  # we read again
    assert looks(silence, 62, 66, 70) == [False, False, True]


def test_while_we_do_not_read_bytes_that_leave_are_a_sign_of_life() -> None:
    silence = IdleTimeout(ALLOWED_S, 0.0)
    for now in range(2, 60, 2):
        assert looks(silence, now, reading=False, unsent=1000 - now) == [False]
    assert looks(silence, 62, 66, 68, reading=False, unsent=942) == [False, False, True]


@pytest.mark.parametrize("added", [0, 10])
def test_a_peer_that_lives_and_reads_nothing_is_noticed_whatever_is_added(added: int) -> None:
    sending = SendTimeout(ALLOWED_S, 0.0)
    assert not any(sending.is_over(now, unsent_bytes=0) for now in range(2, 40, 2))
    waits = [sending.is_over(38.0 + 2 * n, unsent_bytes=10 + added * n) for n in range(6)]
    assert waits == [False, False, False, False, False, True]


def test_a_peer_that_reads_slowly_is_waited_for() -> None:
    sending = SendTimeout(ALLOWED_S, 0.0)
    for n in range(60):
        assert not sending.is_over(2.0 * n, unsent_bytes=1000 + n - 10 * (n % 2))
