"""Threads with one duty each (design decision 13).

Knows how to run jobs in order on a thread of its own and hand results back to the event loop. Must
not know what the jobs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """A job's result and where its time went, in microseconds of one monotonic clock."""

    value: T
    queue_us: int
    compute_us: int


class Executor:
    """One thread that runs jobs in the order they were submitted.

    `set_up` runs first, on the thread. `niceness` lowers the thread's priority where the system
    has one per thread (Linux).
    """

    def __init__(
        self, name: str, *, set_up: Callable[[], None] | None = None, niceness: int = 0
    ) -> None:
        def start() -> None:
            if niceness:
                _lower_priority(niceness)
            if set_up is not None:
                set_up()

        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=start)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return its result, or raise what it raised.

        Cancelling the wait does not stop a job that has begun.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, job)

    async def run_timed(self, job: Callable[[], T], *, arrived_ns: int) -> Timed[T]:
        """Run `job`; its queueing is counted from `arrived_ns` (time.perf_counter_ns)."""

        def timed() -> Timed[T]:
            started = time.perf_counter_ns()
            value = job()
            ended = time.perf_counter_ns()
            return Timed(
                value=value,
                queue_us=max(0, started - arrived_ns) // 1000,
                compute_us=(ended - started) // 1000,
            )

        return await self.run(timed)

    def close(self) -> None:
        """Let the running job end, drop the waiting ones and end the thread. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the thread to end. For the end of the process, off the loop."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _lower_priority(niceness: int) -> None:
    """Lower the calling thread's priority. Elsewhere than on Linux it would be the process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
