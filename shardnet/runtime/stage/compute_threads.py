"""The compute threads of a node: one for each of its devices, which keeps to the device's cores.

Knows jobs that concern one device, and jobs that concern all of them: while one of those runs, no
other device computes. Must not know what the jobs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.stage_order import StageDevice

T = TypeVar("T")

ONE_DEVICE: Final = (StageDevice(place=0, name="cpu"),)


class ComputeThreads:
    """A thread for each of `devices`; jobs of one device run in the order they were submitted."""

    def __init__(self, devices: Sequence[StageDevice] = ONE_DEVICE) -> None:
        self.devices = tuple(devices)
        self._executors: list[Executor] = []
        for device in self.devices:
            name = "shardnet-compute" + (f"-{device.place}" if len(self.devices) > 1 else "")
            self._executors.append(Executor(name, set_up=_keeping_to(device.cores)))

    def of(self, place: int) -> Executor:
        """Return the thread of the device at `place`."""
        return self._executors[place]

    def submit(self, job: Callable[[], T], place: int = 0) -> asyncio.Future[T]:
        """Queue `job` to the thread of a device; see Executor."""
        return self._executors[place].submit(job)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on the first device's thread while no other one computes."""
        first, *others = self._executors
        if not others:
            return await first.run(job)
        is_over = threading.Event()
        arrived = threading.Semaphore(0)

        def wait() -> None:
            arrived.release()
            is_over.wait()

        def alone() -> T:
            try:
                for _ in others:
                    arrived.acquire()
                return job()
            finally:
                is_over.set()

        # Queued at once, in one order: two such jobs never wait for each other.
        for other in others:
            other.post(wait, _nothing, _nothing)
        return await first.run(alone)

    def share_cores(self, n_threads: int, set_threads: Callable[[int], None]) -> None:
        """Have each thread call `set_threads` with its share of `n_threads`, before its next job.

        Groups of cores share them equally, none has more than cores; a GPU's thread has all.
        """
        n_groups = sum(device.torch == "cpu" for device in self.devices)
        for device, executor in zip(self.devices, self._executors, strict=True):
            own = max(1, n_threads // n_groups) if device.torch == "cpu" else n_threads
            own = min(own, len(device.cores) or own)

            def set_own(own: int = own) -> None:
                set_threads(own)

            executor.post(set_own, _nothing, _nothing)

    def close(self) -> None:
        """End the threads once they have nothing to do, or leave behind those that hang."""
        for executor in self._executors:
            executor.close()


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and those that it starts inside, on `cores`; on any where there are none.

    Only Linux can: elsewhere nothing changes. What it touches first then lies in their memory.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a container has taken cores away since
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _keeping_to(cores: Sequence[int]) -> Callable[[], None] | None:
    if not cores or not hasattr(os, "sched_setaffinity"):
        return None

    def keep() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)

    return keep


def _nothing(_: object) -> None:
    """Take no notice."""
