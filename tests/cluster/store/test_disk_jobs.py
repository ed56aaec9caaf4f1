"""Disks that do not answer: jobs on them end by name, others go on, and so does the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shardnet.cluster.store import disk_jobs
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, DiskSilentError, PeerFailedError

SILENCE_S = 0.05
DEADLINE_S = 20.0


@pytest.fixture
def mount() -> Iterator[threading.Event]:
    """A mount that hangs until the event is set."""
    answers = threading.Event()
    yield answers
    answers.set()


def with_jobs(main: Callable[[DiskJobs], Awaitable[None]], silence_s: float = SILENCE_S) -> None:
    async def run() -> None:
        jobs = DiskJobs("test-disk", silence_s=silence_s)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await main(jobs)
        finally:
            jobs.close()

    asyncio.run(run())


def hang(mount: threading.Event) -> str:
    assert mount.wait(DEADLINE_S)
    return "at last"


def test_jobs_of_one_place_run_in_order_and_raise_what_they_raise() -> None:
    async def main(jobs: DiskJobs) -> None:
        done: list[int] = []
        place = jobs.at("/a")
        first = [place.submit(lambda n=n: done.append(n)) for n in range(5)]  # type: ignore[misc]
        assert await place.run(lambda: 7) == 7
        assert done == [0, 1, 2, 3, 4]
        assert all(job.done() for job in first)
        with pytest.raises(ZeroDivisionError):
            await place.run(lambda: 1 // 0)

    with_jobs(main)


def test_idle_places_keep_their_threads_up_to_a_number() -> None:
    async def main(jobs: DiskJobs) -> None:
        places = [f"/{n}" for n in range(disk_jobs.MAX_IDLE)]
        threads = [await jobs.run(place, threading.current_thread) for place in places]
        again = [await jobs.run(place, threading.current_thread) for place in places]
        assert again == threads
        await jobs.run("/one more", threading.current_thread)
        assert await jobs.run(places[0], threading.current_thread) is not threads[0]

    with_jobs(main, silence_s=DEADLINE_S)


def test_a_disk_that_hangs_is_named_and_others_go_on(mount: threading.Event) -> None:
    async def main(jobs: DiskJobs) -> None:
        assert await jobs.run("/good", lambda: 1) == 1
        hanging = [jobs.submit("/mnt/nas/model", lambda: hang(mount)) for _ in range(2)]
        assert await jobs.run("/good", lambda: 2) == 2
        for job in hanging:
            with pytest.raises(DiskSilentError, match=r"/mnt/nas/model: the disk does not answer"):
                await job
        n_threads = threading.active_count()
        for _ in range(3):
            with pytest.raises(DiskSilentError, match="ask again"):
                await jobs.run("/mnt/nas/model", lambda: hang(mount))
        assert threading.active_count() == n_threads
        assert await jobs.run("/good", lambda: 3) == 3

    with_jobs(main)


def test_a_disk_that_answers_again_is_asked_again(mount: threading.Event) -> None:
    async def main(jobs: DiskJobs) -> None:
        with pytest.raises(DiskSilentError):
            await jobs.run("/mnt", lambda: hang(mount))
        mount.set()
        while True:
            try:
                assert await jobs.run("/mnt", lambda: "here") == "here"
                return
            except DiskSilentError:
                await asyncio.sleep(0)

    with_jobs(main)


def test_who_gives_up_waiting_leaves_the_job_to_be_found_silent(mount: threading.Event) -> None:
    async def main(jobs: DiskJobs) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await jobs.run("/mnt", lambda: hang(mount))
        while True:
            try:
                async with asyncio.timeout(0.001):
                    await jobs.run("/mnt", lambda: hang(mount))
            except TimeoutError:
                continue
            except DiskSilentError:
                return

    with_jobs(main)


def test_a_job_that_reports_is_not_silent(mount: threading.Event) -> None:
    async def main(jobs: DiskJobs) -> None:
        n_looks = 0

        def alive() -> int:
            nonlocal n_looks
            n_looks += 1
            if n_looks > 25:  # more than twice as often as a silence takes
                mount.set()
            return n_looks

        assert await jobs.run("/slow", lambda: hang(mount), alive=alive) == "at last"

    with_jobs(main)


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of threads is Linux's")
def test_a_job_that_computes_is_not_silent() -> None:
    async def main(jobs: DiskJobs) -> None:
        done = threading.Event()
        asyncio.get_running_loop().call_later(4 * SILENCE_S, done.set)

        def compute() -> int:
            while not done.is_set():
                sum(range(1000))
            return 1

        assert await jobs.run("/large", compute) == 1

    with_jobs(main)


def test_threads_left_behind_are_bounded(
    mount: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_jobs, "MAX_STUCK", 2)
    monkeypatch.setattr(disk_jobs, "MAX_BUSY", 2)

    async def main(jobs: DiskJobs) -> None:
        assert await jobs.run("/good", lambda: 1) == 1
        hanging = [jobs.submit(f"/mnt/{n}", lambda: hang(mount)) for n in range(2)]
        with pytest.raises(BusyError, match=r"/mnt/3: .* other folders"):
            await jobs.run("/mnt/3", lambda: 1)
        for job in hanging:
            with pytest.raises(DiskSilentError):
                await job
        with pytest.raises(DiskSilentError, match="/mnt/3"):
            await jobs.run("/mnt/3", lambda: 1)
        assert await jobs.run("/good", lambda: 1) == 1

    with_jobs(main)


def test_closing_tells_who_waits(mount: threading.Event) -> None:
    async def main(jobs: DiskJobs) -> None:
        hanging = jobs.submit("/mnt", lambda: hang(mount))
        await jobs.drain(patience_s=0.01)
        assert not hanging.done()
        jobs.close()
        with pytest.raises(PeerFailedError, match="leaving"):
            await hanging
        with pytest.raises(PeerFailedError, match="leaving"):
            await jobs.run("/mnt", lambda: 1)

    with_jobs(main, DEADLINE_S)


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_a_thread_that_computes_is_told_from_one_that_sleeps(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", system)
    clock = disk_jobs._thread_clock()
    used, ends_at = clock(), time.monotonic() + DEADLINE_S
    while clock() == used and time.monotonic() < ends_at:
        sum(range(10_000))
    assert clock() > used


HANGS = """
import asyncio, os, sys
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.threads import DaemonThreads

async def main():
    jobs = DiskJobs("test-disk", silence_s=0.05)
    DaemonThreads(1, "test").submit(open, sys.argv[1])
    try:
        await jobs.run(sys.argv[1], lambda: open(sys.argv[1]))
    except Exception as error:
        print(type(error).__name__)
    jobs.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no pipes in folders")
def test_a_process_ends_while_its_threads_hang(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path / "pipe")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("DiskSilentError\n", "", 0)
