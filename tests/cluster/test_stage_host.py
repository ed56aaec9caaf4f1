"""Measuring on the compute thread: not while it works for somebody, and no longer than asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from shardnet.cluster.seat import RingSeat
from shardnet.cluster.stage_host import StageHost
from shardnet.errors import BusyError
from shardnet.transport.link import Link


@dataclass
class Seat:
    """What the host asks of its seat."""

    is_busy: bool = False
    model: str = "/m"

    async def leave(self) -> None:
        """Nothing is left."""


def hosted(main: Callable[[StageHost], Any]) -> None:
    async def dial(address: str, seat: RingSeat) -> Link:
        raise AssertionError(f"{address} was dialled")

    async def run() -> None:
        host = StageHost(dial=dial)
        try:
            await main(host)
        finally:
            await host.close()

    asyncio.run(run())


def take_seat(host: StageHost, *, is_busy: bool) -> Seat:
    seat = Seat(is_busy=is_busy)
    host.seat = cast(RingSeat, seat)
    return seat


def test_a_measurement_runs_on_the_compute_thread_and_reports_that_it_lives() -> None:
    async def main(host: StageHost) -> None:
        reports = []

        def job(tick: Callable[[], None]) -> str:
            tick()
            return threading.current_thread().name

        take_seat(host, is_busy=False)
        name = await host.measure(job, lambda done, total: reports.append((done, total)))
        assert name.startswith("shardnet-compute")
        assert reports == [(0, 1)]
        await host.turn()

    hosted(main)


def test_open_sequences_are_not_disturbed() -> None:
    async def main(host: StageHost) -> None:
        take_seat(host, is_busy=True)
        with pytest.raises(BusyError, match="generating with /m"):
            await host.measure(lambda tick: 1, lambda done, total: None)
        with pytest.raises(BusyError, match="generating with /m"):
            await host.turn()

    hosted(main)


def test_a_sequence_that_opens_meanwhile_ends_the_measurement() -> None:
    async def main(host: StageHost) -> None:
        seat = take_seat(host, is_busy=False)

        def job(tick: Callable[[], None]) -> None:
            tick()
            seat.is_busy = True
            tick()
            raise AssertionError("it went on")

        with pytest.raises(BusyError, match="generating with /m"):
            await host.measure(job, lambda done, total: None)

    hosted(main)


def test_who_gives_up_waiting_ends_the_measurement() -> None:
    """And waits for its end, also when who has given up hangs up then, which cancels once more."""

    async def main(host: StageHost) -> None:
        began, may_end, gave_up = asyncio.Event(), threading.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def job(tick: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(began.set)
            try:
                while True:
                    tick()
            finally:
                may_end.wait(5)
                gave_up.set()

        measuring = asyncio.create_task(host.measure(job, lambda done, total: None))
        await began.wait()
        for _ in range(4):
            measuring.cancel()
            await asyncio.sleep(0)
        assert not measuring.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        assert gave_up.is_set()

    hosted(main)
