"""Jobs on a thread of their own, and how the loop hears of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shardnet.runtime.stage.executor import Executor

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


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_what_a_posted_job_raises_is_told(error: BaseException) -> None:
    async def main() -> None:
        executor = Executor("jobs")
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        def job() -> None:
            raise error

        executor.post(job, lambda result: pytest.fail("it has no result"), failed.set_result)
        async with asyncio.timeout(DEADLINE_S):
            assert await failed is error
            assert await executor.run(lambda: "the thread lives") == "the thread lives"
        executor.join()

    asyncio.run(main())
