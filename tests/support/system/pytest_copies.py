"""Runs of pytest that begin as copies of one process which has imported what tests import.

To import transformers takes 3 s of CPU, which each run would take for itself. Knows nothing of the
tests; none is imported before the copy has its environment.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

PRELOADED = ("pytest", "hypothesis", "shardnet.stage.load", "support.models.checkpoints")
"""What reads nothing of the environment that a run may say otherwise."""

READY = "ready"

Request = tuple[Sequence[str], Mapping[str, str], Path]


class PytestCopies:
    """The process that is copied, which is itself a copy of the fork server."""

    def __init__(self, ours: Connection) -> None:
        self._ours = ours

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, deadline_s: float
    ) -> tuple[int, str]:
        """Run pytest to its end; return its exit code and what it said. Fails at the deadline."""
        self._ours.send((arguments, environment, cwd))
        assert self._ours.poll(deadline_s), f"no end within {deadline_s} s: {arguments}"
        code, said = self._ours.recv()
        return code, said


@contextmanager
def open_pytest_copies() -> Iterator[PytestCopies]:
    """Have the process that is copied."""
    context = multiprocessing.get_context("forkserver")
    ours, its = context.Pipe()
    with ours:
        process = context.Process(target=_serve, args=(its,))
        process.start()
        its.close()
        assert ours.recv() == READY
        try:
            yield PytestCopies(ours)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with a run that did not end
            process.join()
            process.close()


def _serve(its: Connection) -> None:
    """Run what is asked for, one after the other, each in a copy."""
    os.setpgrp()
    its.send(READY)
    for name in PRELOADED:
        importlib.import_module(name)
    while True:
        request = its.recv()
        with tempfile.TemporaryFile() as said:
            pid = os.fork()
            if pid == 0:
                _become(request, said.fileno())
            _, status = os.waitpid(pid, 0)
            said.seek(0)
            text = said.read().decode(errors="replace")
        its.send((os.waitstatus_to_exitcode(status), text))


def _become(request: Request, said: int) -> None:
    """Be the run of pytest, in the copy."""
    arguments, environment, cwd = request
    code = 1
    try:
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        code = int(sys.modules["pytest"].main([*arguments]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
