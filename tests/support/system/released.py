"""The release before this one as its users have it: a wheel that is built from its commit.

tests/golden/release.txt names it. Its compiled library is this checkout's where the sources are
equal, which saves the minutes of compiling it; where they are not it is compiled in less time.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support.system.nodes import Machine

ROOT = Path(__file__).parents[3]
LIBRARY = Path("shardnet/model/kernels/_quantized.so")
SOURCES = ("shardnet/model/kernels/csrc", "setup.py")


@functools.cache
def release() -> tuple[str, str]:
    """Return the version of the release before, and its commit."""
    version, commit = (ROOT / "tests/golden/release.txt").read_text().split()
    return version, commit


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def install(folder: Path) -> Path:
    """Build the wheel and install it below `folder`. Skips where its commit is not at hand."""
    _, commit = release()
    if _git("cat-file", "-e", commit).returncode:
        pytest.skip(f"a checkout without history has no commit {commit[:8]} to build a wheel from")
    source, site = folder / "source", folder / "site"
    source.mkdir(parents=True)
    tree = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x"], cwd=source, input=tree.stdout, check=True)
    if not _git("diff", "--quiet", commit, "--", *SOURCES).returncode:
        platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        built = source / "build" / platform / LIBRARY
        built.parent.mkdir(parents=True)
        shutil.copy(ROOT / LIBRARY, built)  # newer than the sources: it is not compiled again
    else:  # a third of the time, and the same bits
        setup = source / "setup.py"
        setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheels = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *wheels], check=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def machine(folder: Path, site: Path, **more: Any) -> Machine:
    """Make a machine whose programs are those of the release that is installed in `site`."""
    python = folder.with_name(f"{folder.name}-python")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return Machine(folder, python=str(python), makes_copies=False, **more)
