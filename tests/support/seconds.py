"""What tests take, by folder and of the dearest files: processor seconds, and seconds of the clock.

A machine that does other things too changes the clock's, and hardly the processor's. Those of a
process that a test started count once the test has waited for it; those of copies of the fork
server, which many tests may share, at once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path, PurePosixPath

import pytest

KEY = "processor seconds"
MOST_FILES = 12
FEW_FILES = 20
"""So many files need no table."""
_before = pytest.StashKey[float]()

Taken = dict[str, tuple[float, float]]
"""File or folder → seconds of processors and of the clock."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what was taken before the test and its fixtures."""
    item.stash[_before] = _processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have the last report of a test, which travels to the process that prints, say it."""
    report = yield
    if call.when == "teardown":
        report.user_properties = [(KEY, _processor_s() - item.stash[_before])]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables, unless few files ran."""
    reports = [one for many in terminalreporter.stats.values() for one in many]
    files = taken(report for report in reports if isinstance(report, pytest.TestReport))
    if len(files) <= FEW_FILES:
        return
    terminalreporter.section("seconds of processors and of the clock")
    for line in table(files):
        terminalreporter.write_line(line)


def taken(reports: Iterable[pytest.TestReport]) -> Taken:
    """Add up what each file took."""
    processor_s, clock_s = Counter[str](), Counter[str]()
    for report in reports:
        path = report.nodeid.partition("::")[0]
        clock_s[path] += report.duration
        if report.when == "teardown":
            processor_s[path] += dict(report.user_properties)[KEY]
    return {path: (processor_s[path], clock_s[path]) for path in clock_s}


def table(files: Taken) -> Iterator[str]:
    """Write a line for each folder of tests, then for the files that took most."""
    folders: Taken = {}
    for path, (processor_s, clock_s) in files.items():
        folder = "/".join(PurePosixPath(path).parts[:-1][:3])
        before = folders.get(folder, (0.0, 0.0))
        folders[folder] = before[0] + processor_s, before[1] + clock_s
    yield from map(_line, _dearest(folders))
    yield ""
    yield from map(_line, _dearest(files)[:MOST_FILES])


def _dearest(all_of: Taken) -> list[tuple[str, tuple[float, float]]]:
    return sorted(all_of.items(), key=lambda one: -one[1][0])


def _line(one: tuple[str, tuple[float, float]]) -> str:
    path, (processor_s, clock_s) = one
    return f"{processor_s:7.1f} {clock_s:7.1f}  {path}"


def _processor_s() -> float:
    """What this process, its fork server, its copies and those they waited for have computed."""
    own_s = sum(os.times()[:4])
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None or not Path("/proc").is_dir():
        return own_s
    copies = Path(f"/proc/{server}/task/{server}/children")
    with suppress(FileNotFoundError):
        ticks = sum(map(_ticks, [server, *copies.read_text(encoding="utf-8").split()]))
        return own_s + ticks / os.sysconf("SC_CLK_TCK")
    return own_s


def _ticks(pid: int | str) -> int:
    """What a process and those it has waited for have computed; 0 once it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return sum(map(int, stat.rpartition(") ")[2].split()[11:15]))
    return 0
