"""Sets up .venv if need be, then runs the checks and all tests.

With arguments of pytest, such as `tests/wire -x`, the checks and those tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from set_up import PYTHON, ROOT, say, set_up_or_exit

FOUR_AT_A_TIME = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")
"""A file's tests together: many wait for processes, or for silence to end."""


def main() -> None:
    """Run the checks beside the tests, which leave a core idle now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-checks", action="store_true", help="run the tests alone")
    asked, arguments = parser.parse_known_args()
    set_up_or_exit("dev")
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of hundreds of processes compiles
    checks = None
    if not asked.no_checks:
        own = () if arguments else ("--no-tests",)
        checks = subprocess.Popen([PYTHON, "scripts/check.py", *own])
    try:
        code = run_tests(arguments)
        if checks is not None and checks.wait():
            sys.exit(
                "error: the checks failed: see above what format, lint, types or layering found"
            )
    finally:
        if checks is not None:
            checks.terminate()
    sys.exit(code)


def run_tests(arguments: list[str]) -> int:
    """Run pytest; return its exit code."""
    if not arguments and not (ROOT / "tests" / "__pycache__").exists():
        say("compiling what tests import")  # once: else each of the four would compile its own
        collect = [str(PYTHON), "-m", "pytest", "--quiet", "--collect-only"]
        subprocess.run(collect, stdout=subprocess.DEVNULL, check=False)  # the tests say what fails
    say("tests (pytest)")
    tests = arguments or FOUR_AT_A_TIME
    return subprocess.run(
        [str(PYTHON), "-m", "pytest", "--durations=10", *tests], check=False
    ).returncode


if __name__ == "__main__":
    main()
