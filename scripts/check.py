"""Sets up .venv if need be, then runs the checks: format, lint, types and layering."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

from set_up import PYTHON, ROOT, say, set_up_or_exit

CHECKS = (
    ("format (ruff format)", "ruff format --check ."),
    ("lint (ruff check)", "ruff check ."),
    ("encodings, as on Windows", "ruff check --preview --select PLW1514 ."),
    ("types (mypy --strict)", "mypy --strict"),
)
MORE = (
    (
        "types, as on Windows",  # in a cache of its own: the other would be made anew each time
        "mypy --strict --platform win32 --cache-dir .mypy_cache/win32 shardnet cli",
    ),
    ("layering", "pytest --quiet tests/test_layering.py"),
)
WINDOWS = """mypy --config-file= --python-version 3.11 --platform win32
    --cache-dir .mypy_cache/windows --follow-imports skip --ignore-missing-imports"""
OF_A_SYSTEM = re.compile(
    r"^\s*(?:import|from) (?:asyncio|ctypes|errno|fcntl|mmap|msvcrt|multiprocessing|os|psutil|pwd"
    r"|resource|select|selectors|shutil|signal|socket|subprocess|sys|termios|threading|time|winreg)\b",
    re.MULTILINE,
)
"""Modules that have other names on Windows."""


def main() -> None:
    """Run the checks; exit as the first that finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--no-tests",
        action="store_true",
        help="leave layering to who runs all tests; for Windows read names and branches alone",
    )
    asked = parser.parse_args()
    set_up_or_exit("dev")
    for title, command in CHECKS if asked.no_tests else (*CHECKS, *MORE):
        say(title)
        done = subprocess.run([PYTHON, "-m", *command.split()], cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(done.returncode)
    if asked.no_tests:
        say("names and branches, as on Windows")
        if wrong := "\n".join(wrong_on_windows()):
            sys.exit(wrong)


def wrong_on_windows() -> Iterator[str]:
    """Say where a name is used that Windows' Python has not, and what is wrong in modules with
    branches for Windows: a quarter of what all types take.

    Only modules that ask the system are read. What else mypy says of the others may be wrong, as
    it does not read what they import.
    """
    files = [*(ROOT / "shardnet").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    asking = [file for file, text in texts.items() if OF_A_SYSTEM.search(text)]
    command = [str(PYTHON), "-m", *WINDOWS.split(), *asking]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1) or done.stderr:
        yield done.stdout + done.stderr
    for line in done.stdout.splitlines():
        file, _, error = line.partition(":")
        is_name = "has no attribute" in error and "? has" not in error
        if is_name or "win32" in texts.get(file, ""):
            yield line


if __name__ == "__main__":
    main()
