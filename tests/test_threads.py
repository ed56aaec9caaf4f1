"""Threads, and the end of a process that still has some."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from shardnet import threads

ENDS = """
import gc, os, sys, threading, time
from shardnet.threads import DaemonThreads, at_thread_end, end_process

class Memory:
    def __del__(self):  # as a tensor does: Python's lock is given away, and wanted back
        time.sleep(0.8)
        os.write(1, b"cleared")

class Kept(threading.local):
    memory = None

kept, hangs = Kept(), threading.Event()

def keep():
    kept.memory = Memory()

"""
OF_NOBODY = (
    ENDS
    + """
DaemonThreads(1, "test").submit(keep).result()
gc.collect()  # nobody has the threads any more: theirs is past its jobs
"""
)
IN_TIME = ENDS + "at_thread_end(lambda: os.write(1, b'asked '))" + OF_NOBODY.removeprefix(ENDS)
HANGS = (
    ENDS
    + """
sys.stdout.write("printed")
threads = DaemonThreads(1, "test")
threads.submit(hangs.wait)
end_process(7)
"""
)


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [(OF_NOBODY, 0, "cleared"), (IN_TIME, 0, "asked cleared"), (HANGS, 7, "printed")],
    ids=["a thread that nobody has", "what only a thread has", "a thread that hangs"],
)
def test_a_process_ends_after_its_threads_with_the_code_that_it_should(
    program: str, code: int, printed: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, printed, "")


def test_a_thread_of_low_priority_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """THREAD_PRIORITY_BELOW_NORMAL for the thread that asks, and for no other."""
    asked: list[tuple[int | None, int]] = []

    class Kernel32:
        def SetThreadPriority(self, thread: ctypes.c_void_p, priority: int) -> None:
            asked.append((ctypes.c_int64(thread.value or 0).value, priority))

    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr(threads, "library", lambda name: Kernel32())
    threads._lower_priority(0)
    assert asked == []
    threads._lower_priority(5)
    assert asked == [(-2, -1)]
