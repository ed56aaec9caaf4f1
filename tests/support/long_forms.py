"""Runs the long forms of tests, and keeps a ledger of when those of each file were green last.

    python -m support.long_forms [PATH...]    of these folders and files; of all without

A file that was green with the same sources on the same class of CPU is not run again, so a run
that was interrupted goes on, and one with failures runs what failed. The ledger is meant to be
committed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest

from shardnet.files import write_whole
from shardnet.model.kernels.library import native_kernels

ROOT = Path(__file__).parents[2]
NAME = "tests/long_forms.json"
TESTED = ("shardnet", "cli", "tests", f":!{NAME}")


class Green(msgspec.Struct, frozen=True, kw_only=True):
    """The last time all tests of a file passed or were skipped.

    `sources` is a digest of what was tested, `cpu` the class of CPU.
    """

    day: date
    cpu: str
    sources: str
    passed: int
    skipped: int


class Ledger:
    """Notes the tests of files as they end, and writes a file's line when its last one has."""

    def __init__(self, path: Path, sources: str, cpu: str) -> None:
        self._path = path
        self._sources = sources
        self._cpu = cpu
        self._expected: Counter[str] = Counter()
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.files: dict[str, Green] = {}
        if path.exists():
            self.files = msgspec.json.decode(path.read_bytes(), type=dict[str, Green])

    def is_green(self, file: str) -> bool:
        """Whether a file was green with these sources on this class of CPU."""
        last = self.files.get(file)
        return last is not None and (last.sources, last.cpu) == (self._sources, self._cpu)

    def expect(self, tests: Iterable[str]) -> None:
        """Take the ids of all tests that will run."""
        self._expected = Counter(map(_file, tests))

    def note(self, report: pytest.TestReport) -> None:
        """Take one of the reports of a test: its set-up, itself or its end."""
        file = _file(report.nodeid)
        outcomes = self._outcomes[file]
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.outcome] += 1
        if report.when != "teardown":
            return
        outcomes["ended"] += 1
        if outcomes["ended"] == self._expected[file] and not outcomes["failed"]:
            self.files[file] = Green(
                day=datetime.now(UTC).date(),
                cpu=self._cpu,
                sources=self._sources,
                passed=outcomes["passed"],
                skipped=outcomes["skipped"],
            )
            self._write()

    def table(self, files: Sequence[str]) -> Iterator[str]:
        """Write a line for each folder: since when all of it is green, and how much is now."""
        folders: defaultdict[str, list[str]] = defaultdict(list)
        for file in files:
            folders[str(PurePosixPath(file).parent)].append(file)
        for folder, inside in sorted(folders.items()):
            known = [self.files[file] for file in inside if file in self.files]
            since = str(min(one.day for one in known)) if len(known) == len(inside) else "never"
            now = sum(map(self.is_green, inside))
            yield f"{since:10}  {now:3} of {len(inside):3} files with these sources  {folder}"

    def _write(self) -> None:
        lines = (
            f"{msgspec.json.encode(file).decode()}: {msgspec.json.encode(green).decode()}"
            for file, green in sorted(self.files.items())
            if (ROOT / file).exists()
        )
        write_whole(self._path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), mode=0o644)


class Recorder:
    """The part of pytest that tells the ledger what ends. Workers of xdist have none."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take the tests that this process collected; none where workers run them."""
        if session.items:
            self._ledger.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Take the tests that a worker collected: each collects all."""
        self._ledger.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report of a test."""
        self._ledger.note(report)


def main(paths: Sequence[str]) -> int:
    """Run what is not green, and print the ledger by folder."""
    ledger = Ledger(ROOT / NAME, sources_digest(), cpu_class())
    files = sorted(files_of(paths or ["tests"]))
    left = [file for file in files if not ledger.is_green(file)]
    status = 0
    if left:
        os.environ.pop("PYTHONPATH", None)  # is for this module, not for what tests start
        options = ["-n", "2", "--dist", "loadfile", "--hypothesis-profile=soak"]
        status = pytest.main([*options, *left], plugins=[Recorder(ledger)])
    print(*ledger.table(files), sep="\n")
    return int(status)


def files_of(paths: Iterable[str]) -> set[str]:
    """Return the files of tests in folders, and the files among `paths`, as paths from the root."""
    found = set()
    for path in map(Path, paths):
        inside = path.rglob("test_*.py") if path.is_dir() else [path]
        found |= {file.resolve().relative_to(ROOT).as_posix() for file in inside}
    return found


def sources_digest() -> str:
    """Return a digest of the product and its tests as they stand, committed or not."""
    digest = hashlib.sha256()
    for command in (["ls-files", "-s"], ["diff", "HEAD"]):
        digest.update(
            subprocess.run(
                ["git", *command, "--", *TESTED], cwd=ROOT, check=True, capture_output=True
            ).stdout
        )
    return digest.hexdigest()[:16]


def cpu_class() -> str:
    """Name the instruction set that the compiled library uses, off without it."""
    kernels = native_kernels()
    if kernels is None:
        return "off"
    more = "_amx" if kernels.has_tiles else "_bf16" if kernels.has_pairs else ""
    return f"{kernels.isa.name.lower()}{more}"


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
