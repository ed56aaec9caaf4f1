"""Jobs on disks that may never answer: a hanging mount, a pipe, a dying drive.

Knows how long a disk may be silent, and how many threads it may take with it. A job that hangs
fails by name; its thread is left behind and ends when the disk answers at last. Must not know what
the jobs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import psutil

from shardnet.errors import BusyError, DiskSilentError, PeerFailedError
from shardnet.runtime.processors.processor_use import NO_FIGURE
from shardnet.threads import DaemonThreads
from shardnet.transport.loop import unheard
from shardnet.types import remember

T = TypeVar("T")

SILENCE_S: Final = 60.0 if sys.platform == "darwin" else 10.0
"""How long a job may neither end, nor report, nor use the processor, which macOS does not tell."""
MAX_STUCK: Final = 16
"""Threads that hang on disks; from then on only places that have answered before are asked."""
MAX_BUSY: Final = 16
"""Places at work at one time."""
MAX_IDLE: Final = 4
"""Threads that are kept for the places they worked for."""
MAX_ANSWERED: Final = 64
"""Places remembered because they have answered."""
_LOOKS: Final = 10
"""How often a silence is looked at before it counts: a process that was stopped is not silent."""


class DiskJobs:
    """Runs jobs of one place in order, of several places side by side.

    A place is whatever hangs as one: the path of a checkpoint, a cache folder. `niceness` is that
    of DaemonThreads. All calls are made on the event loop.
    """

    def __init__(self, name: str, *, niceness: int = 0, silence_s: float = SILENCE_S) -> None:
        self.name = name
        self.niceness = niceness
        self.silence_s = silence_s
        self._lanes: dict[str, _Lane] = {}
        self._stuck: dict[str, _Lane] = {}
        self._answered: dict[str, None] = {}
        self._is_closed = False

    async def run(
        self, place: object, job: Callable[[], T], alive: Callable[[], object] = lambda: None
    ) -> T:
        """Run `job` on a thread for `place`; return its result, or raise what it raised.

        What `alive` returns changes while the job lives, as far as the job can say.

        Raises DiskSilentError if the disk does not answer, at once for a place where an earlier job
        still hangs, BusyError while too many places are at work, PeerFailedError after `close`.
        Cancelling does not stop a job that has begun.
        """
        return await self.submit(place, job, alive)

    def submit(
        self, place: object, job: Callable[[], T], alive: Callable[[], object] = lambda: None
    ) -> asyncio.Future[T]:
        """Queue `job` as `run` does; the future holds its result, or what it raised."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            self._lane(str(place)).put(job, answer, alive)
        except (DiskSilentError, BusyError, PeerFailedError) as error:
            answer.set_exception(error)
            answer.exception()  # retrieved: who submits need not look
        return answer

    def at(self, place: object) -> DiskPlace:
        """Return the jobs of one place, for what works there only."""
        return DiskPlace(self, place)

    async def drain(self, patience_s: float = 1.0) -> None:
        """Wait until no job is waiting or running, or none has done anything for `patience_s`."""
        seen: object = None
        while waiting := [job for lane in self._lanes.values() for job in lane.jobs]:
            ends = [asyncio.wrap_future(job) for job in waiting]
            for end in ends:  # its error goes to the submitter of each job
                end.add_done_callback(unheard)
            done, _ = await asyncio.wait(ends, timeout=patience_s)
            beats = [lane.beat() for lane in self._lanes.values()]
            if not done and beats == seen:
                return
            seen = beats
            await asyncio.sleep(0)  # the lanes hear of it as well

    def close(self) -> None:
        """Fail what waits and what runs, and end the threads; those that hang are left behind."""
        self._is_closed = True
        for lane in [*self._lanes.values()]:
            lane.fail(node_leaves())
        self._lanes.clear()

    def _lane(self, place: str) -> _Lane:
        if self._is_closed:
            raise node_leaves()
        lane = self._lanes.get(place)
        if lane is not None:
            return lane
        if place in self._stuck or (len(self._stuck) >= MAX_STUCK and place not in self._answered):
            raise _silent(place, self.silence_s)
        idle = [name for name, other in self._lanes.items() if not other.jobs]
        if len(self._lanes) - len(idle) >= MAX_BUSY:
            raise BusyError(
                f"{place}: this node reads {MAX_BUSY} other folders just now",
                remedy="ask again later",
            )
        for name in idle[: max(0, len(idle) - MAX_IDLE + 1)]:
            self._lanes.pop(name).threads.close()
        lane = self._lanes[place] = _Lane(place, self)
        return lane

    def answers(self, lane: _Lane) -> None:
        """Note that a job has ended."""
        remember(self._answered, lane.place, None, MAX_ANSWERED)
        if self._stuck.get(lane.place) is lane:
            del self._stuck[lane.place]

    def hangs(self, lane: _Lane) -> None:
        """Fail the jobs of a place that has been silent for too long."""
        self._lanes.pop(lane.place, None)
        self._stuck[lane.place] = lane
        lane.fail(_silent(lane.place, self.silence_s))


class DiskPlace:
    """The jobs of one place; see DiskJobs."""

    def __init__(self, jobs: DiskJobs, place: object) -> None:
        self._jobs = jobs
        self._place = place

    async def run(self, job: Callable[[], T], alive: Callable[[], object] = lambda: None) -> T:
        """Run a job; see DiskJobs.run."""
        return await self._jobs.run(self._place, job, alive)

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job; see DiskJobs.submit."""
        return self._jobs.submit(self._place, job)


class _Lane:
    """The thread of one place, and the loop's view of it."""

    def __init__(self, place: str, owner: DiskJobs) -> None:
        self.place = place
        self._owner = owner
        self.jobs: dict[Future[Any], asyncio.Future[Any]] = {}
        """Waiting and running jobs, and where their ends are awaited."""
        self._alive: dict[Future[Any], Callable[[], object]] = {}
        self._clocks = clocks = list[Callable[[], float]]()
        self.threads = DaemonThreads(
            1, owner.name, lambda: clocks.append(_thread_clock()), niceness=owner.niceness
        )
        self._n_ended = 0
        self._n_silent = 0
        self._seen: object = None
        self._look: asyncio.TimerHandle | None = None

    def put(
        self, job: Callable[[], T], answer: asyncio.Future[T], alive: Callable[[], object]
    ) -> None:
        loop = asyncio.get_running_loop()

        def tell(done: Future[T]) -> None:
            """Pass the end of the job to the loop; on the thread, or where it is cancelled."""
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self._ended, done, answer)

        running = self.threads.submit(job)
        self.jobs[running] = answer
        self._alive[running] = alive
        running.add_done_callback(tell)
        answer.add_done_callback(lambda _: running.cancel())  # unless it has begun
        if self._look is None:
            self._n_silent, self._seen = 0, self.beat()
            self._look = loop.call_later(self._owner.silence_s / _LOOKS, self._look_at_it)

    def fail(self, error: Exception) -> None:
        """End the thread after what it does now, and fail all jobs with `error`."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        for answer in self.jobs.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # retrieved: nobody may wait for it
        self.threads.close()

    def _ended(self, running: Future[T], answer: asyncio.Future[T]) -> None:
        del self.jobs[running], self._alive[running]
        if not self.jobs and self._look is not None:
            self._look.cancel()
            self._look = None
        if running.cancelled():
            answer.cancel()
            return
        self._n_ended += 1
        self._owner.answers(self)
        error = running.exception()
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(running.result())

    def beat(self) -> object:
        """Return what changes while the thread lives: jobs ended, processor time used."""
        used = 0.0
        with contextlib.suppress(IndexError, *NO_FIGURE):  # it has ended, or not begun
            used = self._clocks[0]()
        return self._n_ended, used, [alive() for alive in self._alive.values()]

    def _look_at_it(self) -> None:
        beat = self.beat()
        self._n_silent = self._n_silent + 1 if beat == self._seen else 0
        self._seen = beat
        if self._n_silent >= _LOOKS:
            self._look = None
            self._owner.hangs(self)
        else:
            wait_s = self._owner.silence_s / _LOOKS
            self._look = asyncio.get_running_loop().call_later(wait_s, self._look_at_it)


def _thread_clock() -> Callable[[], float]:
    """Return what reads the calling thread's processor time (always 0 on macOS)."""
    if sys.platform == "linux":
        clock = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime_ns(clock)
    thread_id, process = threading.get_native_id(), psutil.Process()
    return lambda: sum(
        each.user_time + each.system_time for each in process.threads() if each.id == thread_id
    )


def _silent(place: str, silence_s: float) -> DiskSilentError:
    return DiskSilentError(
        f"{place}: the disk does not answer for {silence_s:g} s",
        remedy="bring it back (a network mount, a sleeping or failing drive), then ask again",
    )


def node_leaves() -> PeerFailedError:
    """Make the error for what a node that leaves does not do any more."""
    return PeerFailedError("this node is leaving", remedy="ask another one")
