"""Threads with one duty each, those of devices among them, and progress from them to the loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol, TypeVar

from shardnet.errors import CancelledRequestError, PeerFailedError, ShardnetError
from shardnet.runtime.stage.stage_order import ONE_DEVICE, StageDevice
from shardnet.threads import DaemonThreads, contained, keep_to
from shardnet.transport.loop import finish, shielded

T = TypeVar("T")

_HAND_OVER_NS: Final = 100_000
"""The longest that a thread which hands over a job waits for it to begin."""

COMPUTE_SILENCE_S: Final = 600.0
"""How long a device's thread may end no job while others wait: as long as a step may take at least
where no time was measured (ring/pipeline.py), like the first prompt chunk of a slow machine."""
_LOOKS: Final = 10
"""How often a silence is looked at before it counts: a process that was stopped is not silent."""


class JobThread(Protocol):
    """Runs jobs in the order they were submitted, off the loop."""

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `job`; the future holds its result or what it raised."""

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` and return its result, or raise what it raised."""


class Executor:
    """One thread that runs jobs in the order they were submitted.

    `set_up` runs first, on the thread. `niceness` is that of DaemonThreads. What a job raises that
    is no Exception arrives as a RuntimeError. Who waits for a job waits no longer than the thread
    may end none, `silence_s`.
    """

    def __init__(
        self,
        name: str,
        *,
        set_up: Callable[[], None] = lambda: None,
        niceness: int = 0,
        silence_s: float | None = None,
    ) -> None:
        self.name = name
        self.silence_s = silence_s
        self.hangs_since: int | None = None
        """How many jobs had ended when the thread was found silent."""
        self.n_called = 0
        """Jobs that `call` waits for."""
        self._pause = _Pause()
        self._thread = DaemonThreads(1, name, set_up, self._pause, niceness)
        # Counts of jobs with one writer each: the loop of the first two, the thread of the last.
        self._n_queued = self._n_cancelled = self.n_ended = 0

    def submit(
        self, job: Callable[[], T], alive: Callable[[], object] = lambda: None
    ) -> asyncio.Future[T]:
        """Queue `job` for the thread at once; the future holds its result or what it raised.

        Cancelling the future does not stop a job that has begun. It fails with PeerFailedError
        where the thread has ended no job for too long, and `alive` has returned the same; at once
        where it still hangs. The job is done all the same should the thread go on.
        """
        self._n_queued += 1
        submitted = self._thread.submit(self._counted, job)
        submitted.add_done_callback(self._note_cancelled)
        self._pause.n_queued.value += 1
        if self.silence_s is None:
            return asyncio.wrap_future(submitted)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        submitted.add_done_callback(partial(_pass_on, answer))
        answer.add_done_callback(lambda given: given.cancelled() and submitted.cancel())
        _Watch(self, answer, alive, self.silence_s)
        return answer

    @property
    def is_idle(self) -> bool:
        """Whether every job has ended. To ask where jobs are submitted: then none can come."""
        return self._n_queued == self.n_ended + self._n_cancelled

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
        pause = self._pause
        pause.seen_begun = pause.n_begun.value
        self._thread.post(partial(self._finish, job, done, failed, asyncio.get_running_loop()))
        pause.n_queued.value += 1

    @property
    def n_begun(self) -> int:
        """How many posted jobs have begun."""
        return self._pause.n_begun.value

    def stir(self, spin_ns: int) -> None:
        """Wake the thread if it sleeps, and have it spin for at most so long until a job comes.

        Does nothing where the compiled library is missing.
        """
        if self.is_idle and self._pause.can_spin:
            self._thread.post(partial(self._pause.spin_once, spin_ns))

    def let_begin(self) -> None:
        """Wait a moment for the job that was just posted to an idle thread to begin.

        That thread needs the interpreter, which the calling one would else keep for as long as it
        has something to do. Does nothing where the compiled library is missing.
        """
        self._pause.wait_begun()

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return its result, or raise what it raised."""
        return await self.submit(job)

    def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread, and wait for it on the calling one, which is no loop's.

        It may take any time: the thread does not count as silent meanwhile.
        """
        self.n_called += 1
        try:
            return self._thread.submit(job).result()
        finally:
            self.n_called -= 1

    def _note_cancelled(self, submitted: Future[T]) -> None:
        if submitted.cancelled():  # before it began, by who submitted it
            self._n_cancelled += 1

    def _counted(self, job: Callable[[], T]) -> T:
        try:
            return job()
        finally:
            self.n_ended += 1

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
        self._pause.n_begun.value += 1
        try:
            result = job()
        except BaseException as error:  # as in a future: whoever waits for the result gets it
            tell = partial(failed, contained(error))
        else:
            if result is None:
                return
            tell = partial(done, result)
        finally:
            self.n_ended += 1
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    def close(self) -> None:
        """Let the running job end, drop the waiting ones and end the thread. Does not wait."""
        self._thread.close()

    def join(self) -> None:
        """Close, and wait for the thread to end. For the end of the process, off the loop."""
        self._thread.close()
        self._thread.join()


def _pass_on(answer: asyncio.Future[T], ended: Future[T]) -> None:
    """Have `answer` end as a job has, on the loop that it is of, unless that is closed."""
    with contextlib.suppress(RuntimeError):
        answer.get_loop().call_soon_threadsafe(_answer, answer, ended)


def _answer(answer: asyncio.Future[T], ended: Future[T]) -> None:
    """Have `answer` end as a job has, unless nobody waits for it any more."""
    if ended.cancelled():
        answer.cancel()
        return
    error = ended.exception()
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(ended.result())


class _Watch:
    """Fails an answer that is waited for when the thread hangs, at once where it does already."""

    def __init__(
        self,
        executor: Executor,
        answer: asyncio.Future[T],
        alive: Callable[[], object],
        silence_s: float,
    ) -> None:
        self._executor, self._answer, self._alive = executor, answer, alive
        self._silence_s = silence_s
        self._seen, self._n_silent = (executor.n_ended, alive()), 0
        self._timer: asyncio.TimerHandle | None = None
        answer.add_done_callback(self._end)
        if executor.hangs_since == executor.n_ended:
            self._fail()
        else:
            self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._silence_s / _LOOKS, self._look)

    def _look(self) -> None:
        executor, seen = self._executor, (self._executor.n_ended, self._alive())
        is_silent = seen == self._seen and not executor.n_called
        self._seen, self._n_silent = seen, self._n_silent + 1 if is_silent else 0
        if self._n_silent < _LOOKS:
            self._wait()
        else:
            executor.hangs_since = executor.n_ended
            self._fail()

    def _fail(self) -> None:
        self._answer.set_exception(
            PeerFailedError(
                f"the thread {self._executor.name} of this node hangs: it has ended no job for "
                f"{self._silence_s:g} s",
                remedy="restart this node",
            )
        )
        self._answer.exception()  # retrieved: nobody may wait for it

    def _end(self, _: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Pause:
    """How a thread waits for its next job: asleep, or once in a while spinning without the GIL.

    Two words in memory count the jobs that were queued, and those that have begun: who queues a job
    adds to one, the thread to the other.
    """

    def __init__(self) -> None:
        self.n_queued, self.n_begun = ctypes.c_int64(0), ctypes.c_int64(0)
        self.seen_begun = 0
        """`n_begun` before the job that was queued last."""
        self._spin_ns = 0
        self._wait: Callable[[int, int, int], object] | None = None
        self._has_looked = False

    @property
    def can_spin(self) -> bool:
        """Whether the compiled library is there, in a process that computes."""
        if not self._has_looked and "torch" in sys.modules:
            self._has_looked = True
            self._wait = _library_wait()
        return self._wait is not None

    def spin_once(self, spin_ns: int) -> None:
        """Spin when there is no job now. On the thread."""
        self._spin_ns = spin_ns

    def __call__(self, has_none: Callable[[], bool]) -> None:
        """Spin, if that was asked for, until a job is queued or the time is over."""
        spin_ns, self._spin_ns = self._spin_ns, 0
        seen = self.n_queued.value
        if spin_ns and self._wait is not None and has_none():
            self._wait(ctypes.addressof(self.n_queued), seen, spin_ns)

    def wait_begun(self) -> None:
        """Wait until the job that was queued last has begun, _HAND_OVER_NS at most."""
        if self.can_spin and self._wait is not None:
            self._wait(ctypes.addressof(self.n_begun), self.seen_begun, _HAND_OVER_NS)


def _library_wait() -> Callable[[int, int, int], object] | None:
    """Return shardnet_wait of the compiled library, which lets go of the interpreter."""
    from shardnet.model.kernels.library import native_kernels  # it imports torch

    kernels = native_kernels()
    if kernels is None:
        return None
    try:
        return kernels.function("shardnet_wait", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    except AttributeError:  # a library of before
        return None


class ComputeThreads:
    """A thread for each of `devices`; jobs of one device run in the order they were submitted."""

    def __init__(self, devices: Sequence[StageDevice] = ONE_DEVICE) -> None:
        self.devices = tuple(devices)
        self._executors: list[Executor] = []
        self._meetings: weakref.WeakSet[threading.Barrier] = weakref.WeakSet()
        for device in self.devices:
            name = "shardnet-compute" + (f"-{device.place}" if len(self.devices) > 1 else "")
            self._executors.append(
                Executor(name, set_up=partial(keep_to, device.cores), silence_s=COMPUTE_SILENCE_S)
            )

    def of(self, place: int) -> Executor:
        """Return the thread of the device at `place`."""
        return self._executors[place]

    def submit(
        self,
        job: Callable[[], T],
        place: int = 0,
        alive: Callable[[], object] = lambda: None,
    ) -> asyncio.Future[T]:
        """Queue `job` to the thread of a device; see Executor."""
        return self._executors[place].submit(job, alive)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on the first device's thread while no other one computes.

        It runs also where the caller is cancelled meanwhile: the others wait for its end.
        """
        first, *others = self._executors
        if not others:
            return await first.run(job)
        meeting = threading.Barrier(len(self._executors))
        self._meetings.add(meeting)

        def meet() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait()

        def wait() -> None:
            meet()
            meet()

        def alone() -> T:
            try:
                meeting.wait()
            except threading.BrokenBarrierError:
                raise CancelledRequestError("the threads of the devices have ended") from None
            try:
                return job()
            finally:
                meet()

        # Queued at once, in one order: two such jobs never wait for each other.
        for other in others:
            other.post(wait, _nothing, _nothing)
        return await shielded(first.submit(alone))

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
        """End the threads once they have nothing to do, or leave behind those that hang.

        None waits for another whose job was dropped.
        """
        for executor in self._executors:
            executor.close()
        for meeting in [*self._meetings]:
            meeting.abort()


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and those that it starts inside, on `cores`; on any where there are none.

    What it touches first then lies in their memory.
    """
    before: set[int] = set()
    if sys.platform == "linux" and cores:
        before = os.sched_getaffinity(0)
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(before)


def _nothing(_: object) -> None:
    """Take no notice."""


PROGRESS_EVERY_S = 0.1


class ProgressReporter:
    """Carries progress from a thread to the loop, a few times a second and at the end, and the wish
    to stop from the loop to the thread.
    """

    def __init__(
        self, on_progress: Callable[[int, int], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._on_progress = on_progress
        self._loop = loop
        self._last_s = 0.0
        self.n_reports = 0
        """Reports so far: a thread that makes none may hang."""
        self._why: ShardnetError | None = None

    def cancel(self, why: ShardnetError | None = None) -> None:
        """Cancel the work: make its next report raise `why`."""
        self._why = why or CancelledRequestError("the work was cancelled")

    async def to_its_end(self, running: asyncio.Future[T]) -> T:
        """Wait for the job that reports here. When cancelled, cancel it and wait for its end."""
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.cancel()
            try:
                await finish(_ended(running))
            finally:
                del running  # with what it has made: the memory may be wanted while this travels
            raise

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Report from the working thread. Raises the error given to `cancel`, if called."""
        self.n_reports += 1
        if self._why is not None:
            raise self._why
        now = time.monotonic()
        if done_bytes >= total_bytes or now - self._last_s >= PROGRESS_EVERY_S:
            self._last_s = now
            self._loop.call_soon_threadsafe(self._on_progress, done_bytes, total_bytes)


async def _ended(running: asyncio.Future[T]) -> None:
    """Wait for the end of a cancelled job, and discard its result."""
    await asyncio.wait([running])
    if not running.cancelled():
        running.exception()
