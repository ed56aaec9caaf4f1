"""Threads with one duty each (design decision 13).

Knows how to run jobs in order on a thread of its own and hand results back to the event loop. Must
not know what the jobs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from shardnet.threads import DaemonThreads, contained

T = TypeVar("T")


class JobThread(Protocol):
    """Runs jobs in the order they were submitted, off the loop."""

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `job`; the future holds its result or what it raised."""

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` and return its result, or raise what it raised."""


class Executor:
    """One thread that runs jobs in the order they were submitted.

    `set_up` runs first, on the thread. `niceness` lowers the thread's priority where the system
    has one per thread (Linux). What a job raises that is no Exception arrives as a RuntimeError.
    """

    def __init__(
        self, name: str, *, set_up: Callable[[], None] | None = None, niceness: int = 0
    ) -> None:
        def start() -> None:
            if niceness:
                _lower_priority(niceness)
            if set_up is not None:
                set_up()

        self._thread = DaemonThreads(1, name, start)
        self._n_queued = self._n_ended = 0  # the loop's count, and the thread's

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `job` for the thread at once; the future holds its result or what it raised.

        Cancelling the future does not stop a job that has begun.
        """
        self._n_queued += 1
        return asyncio.wrap_future(self._thread.submit(self._counted, job))

    @property
    def is_idle(self) -> bool:
        """Whether every job has ended. To ask where jobs are submitted: then none can come."""
        return self._n_queued == self._n_ended

    def post(
        self,
        job: Callable[[], T | None],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Queue `job`; on the loop, `done` gets its result, but None, or `failed` what it raised.

        Like `submit` without a future on the loop, which costs a turn of it. Neither is called
        when the loop has closed meanwhile.
        """
        self._n_queued += 1
        self._thread.post(partial(self._finish, job, done, failed, asyncio.get_running_loop()))

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return its result, or raise what it raised."""
        return await self.submit(job)

    def _counted(self, job: Callable[[], T]) -> T:
        try:
            return job()
        finally:
            self._n_ended += 1

    def _finish(
        self,
        job: Callable[[], T | None],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Run `job` on this thread and hand its result or error to the loop.

        Where the loop has closed meanwhile nobody is told.
        """
        try:
            result = job()
        except BaseException as error:  # as in a future: whoever waits for the result gets it
            tell = partial(failed, contained(error))
        else:
            if result is None:
                return
            tell = partial(done, result)
        finally:
            self._n_ended += 1
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    def close(self) -> None:
        """Let the running job end, drop the waiting ones and end the thread. Does not wait."""
        self._thread.close()

    def join(self) -> None:
        """Close, and wait for the thread to end. For the end of the process, off the loop."""
        self._thread.close()
        self._thread.join()


def _lower_priority(niceness: int) -> None:
    """Lower the calling thread's priority. Elsewhere than on Linux it would be the process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
