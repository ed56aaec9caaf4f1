"""A helper process: whatever a job does, it is named, and the next one is done."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from shardnet.errors import ShortageError, UsageError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits

MODULE = "support.guarded_jobs"
LIMITS = JobLimits(cpu_s=20, wall_s=120.0, memory_bytes=256 << 20, reply_bytes=1 << 20)
GONE_S = 60.0


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    helper = HelperProcess(MODULE)
    yield helper
    helper.close()


def check_works(helper: HelperProcess) -> None:
    assert helper.call("echo", {"value": {"a": "é"}}, LIMITS) == ({"a": "é"}, b"\1\2\3")


def test_one_process_does_one_job_after_another(helper: HelperProcess) -> None:
    assert helper.pid is None
    check_works(helper)
    pid = helper.pid
    with pytest.raises(UsageError) as caught:
        helper.call("refuse", {}, LIMITS)
    assert (caught.value.message, caught.value.remedy) == ("this text is refused", "send another")
    with pytest.raises(JobFailedError, match="LookupError: nowhere"):
        helper.call("fail", {}, LIMITS)
    with pytest.raises(JobFailedError, match="nested too deeply"):
        helper.call("nest", {}, LIMITS)
    for _ in range(2):  # each job has all of its time
        helper.call("burn", {"cpu_s": 0.6}, replace(LIMITS, cpu_s=1))
    check_works(helper)
    assert (helper.pid, helper.n_started) == (pid, 1)


@pytest.mark.parametrize(
    ("job", "arguments", "words", "out_of_time"),
    [
        ("panic", {}, "PanicError: index out of bounds", False),
        ("crash", {}, "ended its process with SIGSEGV", False),
        ("leave", {}, "ended its process with code 3", False),
        ("eat", {"n_bytes": 1 << 30}, "needs more than 256 MiB", False),
        ("talk", {"n_bytes": 2 << 20}, "at most 1048576 are read", False),
        ("spin", {}, "more than 1 s of processor time", True),
        ("stand", {}, "took more than 0.5 s", True),
    ],
)
def test_a_job_that_ends_its_process_is_named_and_the_next_has_another(
    helper: HelperProcess, job: str, arguments: dict[str, int], words: str, out_of_time: bool
) -> None:
    check_works(helper)
    first = helper.pid
    limits = {"spin": replace(LIMITS, cpu_s=1), "stand": replace(LIMITS, wall_s=0.5)}
    with pytest.raises(JobFailedError, match=words) as caught:
        helper.call(job, arguments, limits.get(job, LIMITS))
    assert caught.value.out_of_time is out_of_time
    assert helper.pid is None
    check_works(helper)
    assert helper.pid != first


def test_where_no_process_starts_the_job_fails_by_name_and_the_next_one_is_done(
    helper: HelperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has too many files open for a moment is no bug of its own."""

    def no_pipe(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", no_pipe)
        with pytest.raises(ShortageError, match="does not start: this process may open no more"):
            helper.call("echo", {"value": 1}, LIMITS)
    check_works(helper)


def test_where_no_thread_starts_the_process_is_ended(
    helper: HelperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, made = {*psutil.Process().children()}, set[psutil.Process]()

    def no_thread(thread: threading.Thread) -> None:
        made.update({*psutil.Process().children()} - before)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(ShortageError, match="does not start: can't start new thread"):
            helper.call("echo", {"value": 1}, LIMITS)
    [process] = made
    assert not process.is_running()
    check_works(helper)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.EAGAIN])
def test_a_job_that_the_machine_fails_is_told_apart(helper: HelperProcess, number: int) -> None:
    with pytest.raises(ShortageError, match=re.escape(os.strerror(number))):
        helper.call("lack", {"number": number}, LIMITS)
    check_works(helper)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOMEM])
def test_a_job_that_fails_by_itself_is_not(helper: HelperProcess, number: int) -> None:
    """Its memory is limited: that there is none left is its own doing."""
    with pytest.raises(JobFailedError, match=re.escape(os.strerror(number))):
        helper.call("lack", {"number": number}, LIMITS)


def test_closing_ends_the_process_even_if_it_works(helper: HelperProcess) -> None:
    check_works(helper)
    process = psutil.Process(helper.pid)
    threading.Timer(0.2, helper.close).start()
    with pytest.raises(JobFailedError, match="is closed"):
        helper.call("stand", {}, LIMITS)
    process.wait(GONE_S)
    with pytest.raises(JobFailedError, match="is closed"):
        check_works(helper)


def test_who_waits_for_another_job_stops_waiting(helper: HelperProcess) -> None:
    check_works(helper)
    failed: list[str] = []

    def stand() -> None:
        with pytest.raises(JobFailedError) as caught:
            helper.call("stand", {}, replace(LIMITS, wall_s=1.0))
        failed.append(str(caught.value))

    busy = threading.Thread(target=stand)
    busy.start()
    while not helper._turn.locked():
        pass
    with pytest.raises(JobFailedError, match="busy with another request"):
        helper.call("echo", {"value": 0}, replace(LIMITS, wall_s=0.1))
    busy.join()
    assert failed == ["it took more than 1 s"]


def test_interrupts_of_the_terminal_are_not_for_it(helper: HelperProcess) -> None:
    check_works(helper)
    assert helper.pid is not None
    assert os.getsid(helper.pid) != os.getsid(0)


def test_it_ends_with_the_process_that_started_it() -> None:
    program = (
        "import os\n"
        "from shardnet.guard.helper_process import HelperProcess, JobLimits\n"
        f"helper = HelperProcess({MODULE!r})\n"
        f"helper.call('echo', {{'value': 0}}, {LIMITS!r})\n"
        "print(helper.pid, flush=True)\n"
        "input()\n"
        "os._exit(9)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        assert parent.stdout is not None
        helper = psutil.Process(int(parent.stdout.readline()))
        parent.communicate(b"\n")
    assert parent.returncode == 9
    helper.wait(GONE_S)
    assert not helper.is_running()
