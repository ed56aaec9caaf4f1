"""Threads that never keep the process from ending, whatever their jobs do.

Those of `concurrent.futures` are waited for when Python exits: one that hangs on a disk keeps the
process for ever. Knows threads and futures only. Must not know what the jobs do.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from shardnet.windows import Handle, library

P = ParamSpec("P")
T = TypeVar("T")

BeforeSleep = Callable[[Callable[[], bool]], None]
"""Called with what says whether there is no job."""

_THIS_THREAD: Final = -2
_BELOW_NORMAL: Final = -1
EXIT_S: Final = 1.0
"""The longest that the end of the process waits for running jobs."""


class DaemonThreads:
    """At most `n_threads` daemon threads that take jobs in order; they end with this object.

    `initializer` runs first on each thread; a thread works also where that fails. `before_sleep` is
    called before a thread waits for a job, with what says whether there is none; it must not know
    this object. `niceness` lowers the threads' priority where the system has one per thread
    (Linux, Windows).
    """

    def __init__(
        self,
        n_threads: int,
        name: str,
        initializer: Callable[[], None] = lambda: None,
        before_sleep: BeforeSleep | None = None,
        niceness: int = 0,
    ) -> None:
        self._n_threads = n_threads
        self._before_sleep = before_sleep
        self._name = name
        self._initializer = initializer
        self._niceness = niceness
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._is_closed = False
        weakref.finalize(self, self._jobs.put, None).atexit = False
        _ALL.add(self)

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job; the future holds its result, or what it raised as `contained`.

        Raises RuntimeError after `close`.
        """
        if self._is_closed:
            raise RuntimeError(f"{self._name} takes no jobs any more")
        future: Future[T] = Future()
        self._jobs.put(_Job(future, lambda: job(*args, **kwargs)))
        if len(self._threads) < self._n_threads:
            self._start()
        return future

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call that handles what it raises itself, and is dropped by `close`.

        Costs less than `submit`. Raises RuntimeError after `close`.
        """
        if self._is_closed:
            raise RuntimeError(f"{self._name} takes no jobs any more")
        self._jobs.put(call)
        if len(self._threads) < self._n_threads:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if len(self._threads) < self._n_threads:
                thread = threading.Thread(
                    target=_work,
                    args=(self._jobs, self._initializer, self._before_sleep, self._niceness),
                    name=f"{self._name}_{len(self._threads)}",
                    daemon=True,
                )
                self._threads.append(thread)
                _start(thread)

    def close(self) -> None:
        """Let running jobs end, cancel the waiting ones and end the threads. Does not wait."""
        self._is_closed = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if isinstance(job, _Job):
                job.future.cancel()
        self._jobs.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the threads to end, after `close`; at most `timeout_s` for all."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))


_ALL: Final[weakref.WeakSet[DaemonThreads]] = weakref.WeakSet()
_STARTED: Final[set[threading.Thread]] = set()
"""Threads that may not be past their ends, also of objects that are gone: until they are joined."""
_STARTING: Final = threading.Lock()
_AT_THREAD_END: Final[list[Callable[[], None]]] = []


def at_thread_end(call: Callable[[], None]) -> None:
    """Have each of these threads make a call before it ends, to let go of what only it has.

    What is left in a `threading.local` goes when the thread is past its Python code: a tensor there
    gives Python's lock away, and does not get it back once Python ends.
    """
    _AT_THREAD_END.append(call)


def _start(thread: threading.Thread) -> None:
    with _STARTING:
        for ended in [one for one in _STARTED if not one.is_alive()]:
            ended.join()
            _STARTED.discard(ended)
        _STARTED.add(thread)
        thread.start()


@atexit.register
def end_jobs() -> bool:
    """Let running jobs end, for EXIT_S seconds; say whether all threads have ended.

    Python ends daemon threads where they next want its lock: inside torch that aborts the process.
    """
    end = time.monotonic() + EXIT_S
    for threads in [*_ALL]:
        threads.close()
    every = [*_STARTED]
    for thread in every:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in every)


def end_process(code: int) -> NoReturn:
    """End the process with `code`, also where a thread hangs in what nothing ends.

    Then what Python does at its end is left out, but for writing what was printed.
    """
    if end_jobs():
        atexit.register(gc.freeze)  # else Python looks through all that torch is made of: 0.6 s
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Job:
    """A call and the future of its result."""

    __slots__ = ("call", "future")

    def __init__(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.future, self.call = future, call

    def __call__(self) -> None:
        """Make the call, and set its result or error on the future."""
        future, call = self.future, self.call
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(contained(error))
            del future, call, self  # the error knows this frame: it would keep itself
        else:
            future.set_result(result)


def contained(error: BaseException) -> Exception:
    """Return an exception that ends one job and nothing else: `error`, or one that names it.

    What is no Exception, like a panic of a Rust library, would end whoever waits for the job, and
    StopIteration cannot be put into a future of the loop.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    named = RuntimeError(f"{type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def keep_to(cores: Collection[int]) -> None:
    """Run this thread, and those that it starts, on `cores`; on any where there are none.

    On Linux alone: elsewhere no group of the CPU's cores has cores of its own (read_cores).
    """
    if cores and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container has taken cores away since
            os.sched_setaffinity(0, cores)


def _lower_priority(niceness: int) -> None:
    """Have other threads run before this one, where the system has priorities of threads."""
    if niceness and sys.platform == "linux":  # on macOS it would be the whole process's
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    elif niceness and sys.platform == "win32":
        library("kernel32").SetThreadPriority(Handle(_THIS_THREAD), _BELOW_NORMAL)


def _work(
    jobs: SimpleQueue[Callable[[], None] | None],
    initializer: Callable[[], None],
    before_sleep: BeforeSleep | None,
    niceness: int,
) -> None:
    """Take jobs until there is a None, which is left for the next thread."""
    _lower_priority(niceness)
    with contextlib.suppress(Exception):
        initializer()
    while (job := jobs.get()) is not None:
        job()
        del job  # what it holds is not needed until the next one comes
        if before_sleep is not None:
            before_sleep(jobs.empty)
    jobs.put(None)
    for call in _AT_THREAD_END:
        call()
