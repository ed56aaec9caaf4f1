"""Jobs on a thread of their own, and how the loop hears of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from functools import partial

import pytest
from support.waiting import until

from shardnet.errors import CancelledRequestError, PeerFailedError
from shardnet.runtime.ring.pipeline import STUCK_UNMEASURED_S
from shardnet.runtime.stage.executor import ComputeThreads, Executor
from shardnet.runtime.stage.stage_order import StageDevice

DEADLINE_S = 30.0


def test_posted_jobs_run_in_order_on_the_thread_and_are_told_on_the_loop() -> None:
    async def main() -> None:
        executor = Executor("jobs")
        told: list[tuple[str, str]] = []
        ended = asyncio.Event()

        def tell(thread: str) -> None:
            told.append((thread, threading.current_thread().name))
            if len(told) == 3:
                ended.set()

        for _ in range(3):
            executor.post(lambda: threading.current_thread().name, tell, pytest.fail)
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        assert told == [("jobs_0", threading.current_thread().name)] * 3
        executor.join()

    asyncio.run(main())


class Panic(BaseException):
    """What a Rust library raises when it panics: no Exception."""


@pytest.mark.parametrize("error", [ValueError("wrong"), Panic("unwrap"), StopIteration()])
def test_what_a_job_raises_is_told_as_an_exception(error: BaseException) -> None:
    async def main() -> None:
        executor = Executor("jobs")
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        def job() -> None:
            raise error

        executor.post(job, lambda result: pytest.fail("it has no result"), failed.set_result)
        async with asyncio.timeout(DEADLINE_S):
            for told in (await failed, await _raised_by(executor.run(job))):
                assert isinstance(told, Exception)
                assert error in (told, told.__cause__)
                assert type(error).__name__ in repr(told)
            assert await executor.run(lambda: "the thread lives") == "the thread lives"
        executor.join()

    asyncio.run(main())


def test_a_thread_is_idle_again_after_a_job_that_was_cancelled() -> None:
    async def main() -> None:
        executor, may_end = Executor("jobs"), threading.Event()
        running = executor.submit(may_end.wait)
        waiting = executor.submit(lambda: None)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not executor.is_idle
        may_end.set()
        async with asyncio.timeout(DEADLINE_S):
            await running
            await executor.run(lambda: None)
        assert executor.is_idle
        executor.join()

    asyncio.run(main())


def test_a_job_for_all_devices_holds_none_up_once_its_caller_has_gone() -> None:
    async def main() -> None:
        devices = [StageDevice(place=place, name=f"cpu:{place}") for place in range(2)]
        threads, may_end = ComputeThreads(devices), threading.Event()
        computing = threads.submit(may_end.wait)
        moving = asyncio.ensure_future(threads.run(lambda: "moved"))
        await asyncio.sleep(0)  # it is queued
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        may_end.set()
        async with asyncio.timeout(DEADLINE_S):
            await computing
            assert await threads.submit(lambda: "computed", 1) == "computed"
            assert await threads.run(lambda: "moved") == "moved"
        threads.close()

    asyncio.run(main())


@pytest.mark.parametrize("busy", [0, 1])
def test_threads_that_end_leave_none_behind_that_waits_for_another(busy: int) -> None:
    """The job of the one that computes is dropped; the other waits for it."""

    async def main() -> None:
        devices = [StageDevice(place=place, name=f"cpu:{place}") for place in range(2)]
        threads, may_end, has_begun = ComputeThreads(devices), threading.Event(), asyncio.Event()
        computing = threads.submit(may_end.wait, busy)
        loop = asyncio.get_running_loop()
        told = threads.submit(lambda: loop.call_soon_threadsafe(has_begun.set), 1 - busy)
        moving = asyncio.ensure_future(threads.run(lambda: "moved"))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(told, has_begun.wait())
            threads.close()
            may_end.set()
            await computing
            assert isinstance(
                await _raised_by(moving), asyncio.CancelledError | CancelledRequestError
            )
            for place in range(2):
                await asyncio.to_thread(threads.of(place).join)

    asyncio.run(main())


async def _raised_by(running: Awaitable[object]) -> BaseException:
    [error] = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(error, BaseException)
    return error


def test_who_waits_for_a_thread_that_hangs_gets_an_error_and_its_job_is_done_later() -> None:
    async def main() -> None:
        executor = Executor("jobs", silence_s=0.05)
        goes_on, went_on, done = threading.Event(), asyncio.Event(), list[int]()
        executor.post(lambda: goes_on.wait(DEADLINE_S), lambda _: went_on.set(), pytest.fail)
        async with asyncio.timeout(DEADLINE_S):
            for number in (1, 2):  # the second fails at once
                with pytest.raises(PeerFailedError, match=r"thread jobs of this node hangs"):
                    await executor.run(partial(done.append, number))
            given_up = executor.submit(partial(done.append, 3))
            assert given_up.done()
            goes_on.set()
            await went_on.wait()
            await executor.run(lambda: None)
        assert done == [1, 2, 3]
        executor.join()

    asyncio.run(main())


def test_a_step_that_its_head_waits_for_does_not_hang() -> None:
    """A picture that waits behind the first prompt chunk of a slow machine does not fail."""
    silence_s = ComputeThreads().of(0).silence_s
    assert silence_s is not None
    assert silence_s >= STUCK_UNMEASURED_S


def test_a_thread_that_says_that_it_works_does_not_hang() -> None:
    """A job that reports, and one that somebody waits for on another thread, may take any time."""

    async def main() -> None:
        executor, goes_on = Executor("jobs", silence_s=0.05), threading.Event()
        n_looks = 0

        def alive() -> int:
            nonlocal n_looks
            n_looks += 1
            if n_looks > 30:
                goes_on.set()
            return n_looks

        def seen() -> int:
            alive()
            return 0

        async with asyncio.timeout(DEADLINE_S):
            assert await executor.submit(lambda: goes_on.wait(DEADLINE_S), alive)
            goes_on.clear()
            n_looks = 0
            loading = asyncio.create_task(
                asyncio.to_thread(executor.call, lambda: goes_on.wait(DEADLINE_S))
            )
            await until(lambda: executor.n_called > 0)
            assert await executor.submit(lambda: "behind it", seen) == "behind it"
            assert await loading
        executor.join()

    asyncio.run(main())


def test_who_gives_up_takes_back_a_job_that_has_not_begun() -> None:
    async def main() -> None:
        executor = Executor("jobs", silence_s=DEADLINE_S)
        goes_on, done = threading.Event(), list[int]()
        first = executor.submit(lambda: goes_on.wait(DEADLINE_S))
        second = executor.submit(lambda: done.append(2))
        second.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        await first
        await executor.run(lambda: done.append(3))
        assert done == [3]
        assert executor.is_idle
        executor.join()

    asyncio.run(main())
