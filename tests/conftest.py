"""What holds for every test: one torch thread, no deadline by the clock, and nothing left behind.

A test that leaves a thread, an asyncio task, an open file or socket, or a child process fails.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import faulthandler
import gc
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

import hypothesis
import psutil
import pytest

from shardnet.runtime.engine import guide, prefixes
from shardnet.runtime.engine.prefixes import FoundPrefix
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.transport.loop import loop_factory

pytest_plugins = ("support.seconds",)

for _profile, _max_examples in (("shardnet", 30), ("soak", 400)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_max_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("shardnet")  # scripts/soak takes the other one

if (_uvloop := loop_factory()) is not None:
    _uvloop().close()  # its first loop opens a pipe that the process keeps

# While tests are collected, nearly all that is made stays: to look for the rest takes 2 s.
gc.disable()

# As text: to join paths takes longer than to read what is there, four times in each test.
FD_FOLDER, THREADS = "/proc/self/fd", "/proc/self/task"
HAS_FOLDER = sys.platform == "linux" and os.path.isdir(FD_FOLDER)
HAS_LISTS = HAS_FOLDER and os.path.exists(f"{THREADS}/{os.getpid()}/children")
GRACE_S = 30.0
"""How long a thread or child that is already ending may take to end."""
KILLED_S = 60.0
"""How long a child that was killed may take to be gone."""
LAST_RESORT_S = 7200.0 if os.environ.get("SHARDNET_SOAK_S") else 900.0
"""When the process is ended: a task that refuses to be cancelled outlives pytest's timeout."""
PUT_OFF_S = 60.0
"""How often the last resort is put off. pytest would do so for each test, which takes 2 ms."""

_stderr = pytest.StashKey[int]()
_next_put_off = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that no test captures."""
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())
    config.stash[_next_put_off] = 0.0


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the process live on, and end without looking through all that was imported."""
    faulthandler.cancel_dump_traceback_later()
    gc.freeze()
    os.close(config.stash[_stderr])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what waits for long first: small files fill the end more evenly."""
    items.sort(key=lambda item: "system" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Have no collection look again through what was imported, which stays: that takes 0.2 s."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compute with one thread: the cores are shared and the bits depend on it."""
    _put_off_last_resort(item.config)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Have the last resort set again with the next test: pytest takes it back at each failure."""
    node.config.stash[_next_put_off] = 0.0


def _put_off_last_resort(config: pytest.Config) -> None:
    now = time.monotonic()
    if now >= config.stash[_next_put_off]:
        config.stash[_next_put_off] = now + PUT_OFF_S
        faulthandler.dump_traceback_later(
            LAST_RESORT_S + PUT_OFF_S, file=config.stash[_stderr], exit=True
        )


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged, with tracebacks. pytest's own handlers are off: they take 1 ms of each test,
    as they are hung on every logger of torch and transformers three times."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def drafts_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take more rows and masks for free, so that drafts are made however slow the machine is."""
    monkeypatch.setattr(StepCost, "extra", lambda cost, n_rows: 0.0)
    monkeypatch.setattr(AdaptiveDrafter, "took", lambda drafter, n_tokens, time_s: None)
    monkeypatch.setattr(guide, "SLOW_NS", 60 * 10**9)
    monkeypatch.setattr(guide, "DRAFTS_NS", 60 * 10**9)


@pytest.fixture
def reading_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take reading of prefixes for free, however slow the disk and fast the processor are."""
    monkeypatch.setattr(FoundPrefix, "seconds", lambda found, n_blocks: 0.0)
    monkeypatch.setattr(prefixes, "FIND_S", 60.0)


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves something behind, naming it."""
    tasks = _record_abandoned_tasks(monkeypatch)
    threads = set(threading.enumerate())
    files = _open_files()
    children = _children()
    yield
    left = [f"task {name}" for name in tasks]
    left += [f"thread {thread.name}" for thread in _threads_since(threads)]
    left += [f"child process {line}" for line in _end_children_since(children)]
    left += [f"open {target}" for target in _files_since(files)]
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def _record_abandoned_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the tasks that asyncio.run finds unfinished when its main coroutine is done.

    asyncio.run cancels them without a word; each is a task that nobody waited for.
    """
    abandoned: list[str] = []
    cancel_all = asyncio.runners._cancel_all_tasks

    def record_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
        abandoned.extend(repr(task.get_coro()) for task in asyncio.all_tasks(loop))
        cancel_all(loop)

    monkeypatch.setattr(asyncio.runners, "_cancel_all_tasks", record_and_cancel)
    return abandoned


def _threads_since(before: set[threading.Thread]) -> list[threading.Thread]:
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(GRACE_S)
    return [thread for thread in new if thread.is_alive()]


def _children() -> set[int]:
    """Process ids of the children that run; read from /proc where it is, which is 100 times faster
    than to look through all processes."""
    if not HAS_LISTS:
        return {child.pid for child in psutil.Process().children()}
    found: set[int] = set()
    for thread in os.listdir(THREADS):
        try:
            list_of_thread = os.open(f"{THREADS}/{thread}/children", os.O_RDONLY)
        except FileNotFoundError:  # the thread ended just now
            continue
        with open(list_of_thread, "rb", buffering=0) as file:
            found.update(map(int, file.readall().split()))
    return found


def _end_children_since(before: set[int]) -> list[str]:
    """Name the children that a test left running, and end them."""
    left = []
    for pid in _children() - before:
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
            if child.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in command:
                continue
            left.append(f"{pid} ({command})")
            child.kill()
            child.wait(KILLED_S)
        except psutil.NoSuchProcess:
            continue
    return left


def _open_files() -> dict[str, str]:
    """Descriptor → what it is open on, devices left out (libraries keep some)."""
    found: dict[str, str] = {}
    if not HAS_FOLDER:
        return found
    for name in os.listdir(FD_FOLDER):
        try:
            target = os.readlink(f"{FD_FOLDER}/{name}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        if not target.startswith(("/dev/", "/proc/")):
            found[name] = target
    return found


def _files_since(before: dict[str, str]) -> list[str]:
    if not _open_files().items() - before.items():
        return []
    gc.collect()  # what only a cycle keeps open is not a leak of the test
    return sorted(target for _, target in _open_files().items() - before.items())
