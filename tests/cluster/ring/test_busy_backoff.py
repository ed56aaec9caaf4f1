"""How long a head waits for its turn at nodes that others use: errors and a clock decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shardnet.cluster.head.lead import ASK_EVERY_S, OTHERS_S, BusyBackoff
from shardnet.errors import BusyError, TakenError

TAKEN = TakenError("anna: this node is loading /m for bert")
GENERATING = BusyError("anna: this node is generating with /m")


class Clock:
    """Goes on only while somebody sleeps."""

    now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def backoff(clock: Clock, is_vain: Callable[[], bool] = lambda: False) -> BusyBackoff:
    return BusyBackoff(is_vain, now_s=lambda: clock.now_s, sleep=clock.sleep)


async def for_ever(one: BusyBackoff, error: BusyError) -> None:
    while True:
        await one.wait(error)


def test_a_node_that_generates_is_refused_at_once() -> None:
    clock = Clock()
    with pytest.raises(BusyError) as caught:
        asyncio.run(backoff(clock).wait(GENERATING))
    assert caught.value is GENERATING
    assert clock.now_s == 0


def test_a_node_that_loads_is_waited_for_and_for_its_generation_until_the_deadline() -> None:
    async def main() -> None:
        clock = Clock()
        one = backoff(clock)
        await one.wait(TAKEN)
        assert clock.now_s == ASK_EVERY_S
        with pytest.raises(BusyError, match=f"generating with /m .*has waited {OTHERS_S:.0f} s"):
            await for_ever(one, GENERATING)
        assert OTHERS_S <= clock.now_s <= OTHERS_S + ASK_EVERY_S

    asyncio.run(main())


def test_where_waiting_is_vain_it_ends() -> None:
    async def main() -> None:
        clock = Clock()
        one = backoff(clock, lambda: clock.now_s >= 2 * ASK_EVERY_S)
        with pytest.raises(TakenError) as caught:
            await for_ever(one, TAKEN)
        assert caught.value is TAKEN
        assert clock.now_s == 2 * ASK_EVERY_S

    asyncio.run(main())
