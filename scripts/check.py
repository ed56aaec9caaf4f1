"""Sets up .venv if need be, then runs the checks: format, lint, types and layering."""

from __future__ import annotations

import argparse
import subprocess
import sys

from set_up import PYTHON, ROOT, say, set_up_or_exit

CHECKS = (
    ("format (ruff format)", "ruff format --check ."),
    ("lint (ruff check)", "ruff check ."),
    ("encodings, as on Windows", "ruff check --preview --select PLW1514 ."),
    ("types (mypy --strict)", "mypy --strict"),
    (
        "types, as on Windows",  # in a cache of its own: the other would be made anew each time
        "mypy --strict --platform win32 --cache-dir .mypy_cache/win32 shardnet cli",
    ),
)
LAYERING = ("layering", "pytest --quiet tests/test_layering.py")


def main() -> None:
    """Run the checks; exit as the first that finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--no-tests", action="store_true", help="leave layering to who runs all tests"
    )
    asked = parser.parse_args()
    set_up_or_exit("dev")
    for title, command in CHECKS if asked.no_tests else (*CHECKS, LAYERING):
        say(title)
        done = subprocess.run([PYTHON, "-m", *command.split()], cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
