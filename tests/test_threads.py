"""Threads, and the end of a process that still has some."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
