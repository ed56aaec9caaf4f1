"""A helper process: does jobs on untrusted input, so that none ends, blocks or bloats this one.

Knows how to start, ask, time and end it. Must not know what the jobs do: a module with a `main`
that calls job_loop.serve does. Blocks, so it is for threads that may wait.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardnet.errors import ShortageError, error_for_code, shortage
from shardnet.guard.children import OUT_OF_TIME, OWN_SESSION, end_with_this_process
from shardnet.guard.job_loop import read_frame, write_frame

START_S = 60.0
"""Added to the deadline of a job that has to start the process: wall time, on a busy machine."""
ENDED_S = 5.0
"""How long a process that was killed is waited for; one that hangs in the disk's driver stays."""

_ROOT = Path(__file__).parents[2]
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", -OUT_OF_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What one job may use: processor time, wall time, memory beyond what its process has."""

    cpu_s: int
    wall_s: float
    memory_bytes: int
    reply_bytes: int


class JobFailedError(Exception):
    """A job did not end as it should. `str()` says why; `out_of_time` if it took too long."""

    def __init__(self, why: str, *, out_of_time: bool = False) -> None:
        super().__init__(why)
        self.out_of_time = out_of_time


class HelperProcess:
    """Runs `MODULE.main` in a process of its own, started at the first job and after one that ended
    it. Does one job at a time. Thread-safe.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.n_started = 0
        """How many processes were started: whoever keeps state in one knows that it is lost."""

    @property
    def pid(self) -> int | None:
        """The id of the process, None if none runs."""
        child = self._child
        return child.pid if child is not None and child.is_alive else None

    def call(
        self, job: str, arguments: Mapping[str, Any], limits: JobLimits, block: bytes = b""
    ) -> tuple[Any, bytes]:
        """Do a job; return its value and its block of bytes. A `block` is one argument more.

        Raises the ShardnetError that the job raised, ShortageError if no process can be started,
        JobFailedError if it failed otherwise.
        """
        if not self._turn.acquire(timeout=limits.wall_s):
            raise JobFailedError(
                f"its process was busy with another request for {limits.wall_s:g} s",
                out_of_time=True,
            )
        try:
            return self._call(job, arguments, limits, block)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process. A job that runs fails; later ones too."""
        with self._starting:
            self._closed = True
        child = self._end()
        if child is not None:
            child.join()

    def _call(
        self, job: str, arguments: Mapping[str, Any], limits: JobLimits, block: bytes
    ) -> tuple[Any, bytes]:
        n_started = self.n_started
        child = self._started()
        wall_s = limits.wall_s + (START_S if self.n_started > n_started else 0.0)
        request = {
            "job": job,
            "arguments": dict(arguments),
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
        }
        try:
            value, block = child.ask(request, block, limits.reply_bytes, wall_s)
        except TimeoutError:
            self._end()
            why = f"it took more than {limits.wall_s:g} s"
            raise JobFailedError(why, out_of_time=True) from None
        except _EndedError as error:
            self._end()
            raise _closed() if self._closed else _failure(error.code, limits) from None
        except ValueError as error:
            self._end()
            raise JobFailedError(str(error)) from None
        if "error" in value:
            named = value["error"]
            raise error_for_code(named["code"], named["message"], remedy=named["remedy"])
        if "failed" in value:
            if value["is_last"]:
                self._end()
            raise JobFailedError(value["failed"])
        return value["value"], block

    def _started(self) -> _Child:
        with self._starting:
            if self._closed:
                raise _closed()
            if self._child is not None and not self._child.is_alive:
                self._end()  # while it had nothing to do: the system may need its memory
            if self._child is None:
                try:
                    self._child = _Child(self._module)
                except (OSError, RuntimeError) as error:  # it gets no process, or no thread
                    what = "a helper process does not start"
                    raise shortage(error, what) or ShortageError(f"{what}: {error}") from error
                self.n_started += 1
            return self._child

    def _end(self) -> _Child | None:
        """Have the process end, if there is one. Does not wait."""
        child, self._child = self._child, None
        if child is not None:
            child.end()
        return child


def _closed() -> JobFailedError:
    return JobFailedError("its process is closed")


def _failure(code: int | None, limits: JobLimits) -> JobFailedError:
    """Say why a process ended. `code` is None if it still has not."""
    if code is not None and code == _OUT_OF_TIME:
        return JobFailedError(
            f"it took more than {limits.cpu_s} s of processor time", out_of_time=True
        )
    how = f"code {code}"
    if code is not None and code >= 1 << 31:  # a status of Windows: an exception ended it
        how = f"{code:#x}"
    elif code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name
    return JobFailedError(
        f"it ended its process with {how}, as too deep nesting or more than "
        f"{limits.memory_bytes >> 20} MiB of memory do"
    )


class _Child:
    """One process, and the thread that talks to it: whoever asks can stop waiting."""

    def __init__(self, module: str) -> None:
        places = [str(_ROOT), *(place for place in sys.path if os.path.isabs(place))]
        program = f"import sys; sys.path += sys.argv[1:]; from {module} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", program, *places],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            **OWN_SESSION,
        )
        self.pid = self._process.pid
        end_with_this_process(self.pid)
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], bytes, int] | None] = (
            queue.SimpleQueue()
        )
        self._replies: queue.SimpleQueue[tuple[Any, bytes] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._talk, name="helper process", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads may be started
            with self._process:
                self._process.kill()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended by itself."""
        return self._process.poll() is None

    def ask(
        self, request: dict[str, Any], block: bytes, most_bytes: int, wall_s: float
    ) -> tuple[Any, bytes]:
        """Send a request with a block of bytes and wait for the reply.

        Raises TimeoutError, _EndedError if the process ended, ValueError for a reply of more than
        `most_bytes`.
        """
        self._requests.put((request, block, most_bytes))
        try:
            reply = self._replies.get(timeout=wall_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def end(self) -> None:
        """Have the process, its thread and its pipes end. Does not wait."""
        self._requests.put(None)
        self._process.kill()

    def join(self) -> None:
        """Wait until they have ended, unless the process hangs."""
        self._thread.join(2 * ENDED_S)

    def _talk(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with stdin, stdout:
            while (asked := self._requests.get()) is not None:
                request, block, most_bytes = asked
                try:
                    write_frame(stdin.fileno(), request, block)
                    self._replies.put(read_frame(stdout.fileno(), most_bytes))
                except ValueError as error:
                    self._replies.put(error)
                except (EOFError, OSError):
                    break
        self._replies.put(_EndedError(self._wait()))

    def _wait(self) -> int | None:
        """Wait until the process has ended; return its exit code, None if it hangs."""
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(ENDED_S)
            self._process.kill()
        return None


class _EndedError(Exception):
    """The process ended without a reply."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code
