"""What scripts/setup installs, and where it has torch come from, by machine and configuration.

Nothing is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "scripts" / "setup"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OWN_INDEX = "global.extra-index-url='https://pypi.example/simple'" + 9999 * "\nglobal.x='y'"
"""Long, as what comes after a match may not matter."""
PYTHON = """#!/usr/bin/env bash
case "$*" in
*"config list"*) echo "$PIP_CONFIG" ;;
"-P -c"*) echo "$TORCH" ;;
"-P - "*) exit "$REACHED" ;;
*) echo "$*" >>"$CALLS" && exit "$INSTALLED" ;;
esac
"""
"""Stands for the environment's interpreter: answers as a case says, and notes what pip is to do."""
PROGRAM = 'set -euo pipefail; source "$SETUP"; PYTHON="$FAKE"; uname() { echo "$SYSTEM"; }; '
PROGRAM += 'has_nvidia() { return "$NVIDIA"; }; install_torch'

CASES = {
    "no driver": ({}, CPU_INDEX, "no NVIDIA driver"),
    "a driver": ({"NVIDIA": "0"}, "", "comes with CUDA (about 2.7 GB"),
    "macOS": ({"SYSTEM": "Darwin"}, "", ""),
    "an index of one's own": ({"PIP_CONFIG": OWN_INDEX}, "", "where pip is configured to look"),
    "another setting of pip": ({"PIP_CONFIG": "global.timeout='9'"}, CPU_INDEX, "no NVIDIA"),
    "no way out": ({"REACHED": "1"}, "", "does not answer: torch comes from pip's own index"),
    "not in that index": ({"INSTALLED": "1"}, CPU_INDEX, "that failed: torch comes from pip's own"),
    "a named index": ({"SHARDNET_TORCH_INDEX": "file:///x"}, "file:///x", "comes from file:///x"),
    "none named": ({"SHARDNET_TORCH_INDEX": ""}, "", "from pip's own index"),
    "torch is there": ({"TORCH": "pinned"}, "", ""),
    "another torch is there": ({"TORCH": "2.0.0"}, CPU_INDEX, "no NVIDIA driver"),
}


@pytest.mark.parametrize("case", CASES)
def test_torch_comes_from_where_its_cpu_build_is(case: str, tmp_path: Path) -> None:
    changes, index, said = CASES[case]
    [pinned] = (SETUP.parents[1] / "constraints.txt").read_text().splitlines()[1:2]
    fake, calls = tmp_path / "python", tmp_path / "calls"
    fake.write_text(PYTHON)
    fake.chmod(0o700)
    calls.touch()
    values = {"PIP_CONFIG": "", "TORCH": "", "REACHED": "0", "INSTALLED": "0", "NVIDIA": "1"}
    values |= {"SYSTEM": "Linux x86_64", "SETUP": str(SETUP), "FAKE": str(fake)}
    values |= {"CALLS": str(calls), **changes}
    if values["TORCH"] == "pinned":
        values["TORCH"] = pinned.removeprefix("torch==")
    environment = {name: value for name, value in os.environ.items() if "TORCH_INDEX" not in name}
    done = subprocess.run(
        ["bash", "-c", PROGRAM],
        env=environment | values,
        capture_output=True,
        text=True,
        check=True,
    )
    asked = calls.read_text().splitlines()
    assert [call.split("--index-url ")[1].split()[0] for call in asked] == (
        [index] if index else []
    )
    assert all("--no-deps" in call and call.endswith(" torch") for call in asked)
    assert said in done.stderr
    assert done.stderr.count("==>") == (0 if not said else 2 if "failed" in said else 1)


def test_what_is_installed_is_what_the_project_declares() -> None:
    project = tomllib.loads((SETUP.parents[1] / "pyproject.toml").read_text())["project"]
    for extra, more in (("", []), ("dev", project["optional-dependencies"]["dev"])):
        done = subprocess.run(
            ["bash", "-c", f'source "{SETUP}"; PYTHON="{sys.executable}"; requirements "{extra}"'],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == [*project["dependencies"], *more]


@pytest.mark.parametrize(
    ("packages", "library"), [(0, 0), (1, 0), (0, 1)], ids=["all well", "packages", "library"]
)
def test_the_library_is_built_beside_the_packages_and_either_may_fail(
    packages: int, library: int, tmp_path: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"""#!/usr/bin/env bash
echo "$*" >>"{tmp_path}/calls"
case "$*" in *"--no-deps -e "*) exit {library} ;; *) exit {packages} ;; esac
""")
    fake.chmod(0o700)
    program = f'source "{SETUP}"; PYTHON="{fake}"; install_torch() {{ :; }}; '
    program += "requirements() { echo torch; }; install_packages dev"
    done = subprocess.run(["bash", "-c", program], check=False)
    assert bool(done.returncode) == bool(packages or library)
    calls = (tmp_path / "calls").read_text()
    assert f"--no-deps -e {SETUP.parents[1]}" in calls or packages  # or was ended before it began
    assert " -r /" in calls


def test_a_library_that_is_gone_is_built_again(tmp_path: Path) -> None:
    """Without it all is computed by torch, many times slower; who has no compiler has none."""
    root = SETUP.parents[1]
    kernels = tmp_path / "shardnet" / "model" / "kernels"
    for folder in (tmp_path / "scripts", tmp_path / ".venv", kernels / "csrc"):
        folder.mkdir(parents=True)
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt", "setup.py"):
        (tmp_path / name).write_bytes((root / name).read_bytes())
    library = kernels / "_quantized.so"

    def n_installed(program: str) -> int:
        program = f'make_environment() {{ :; }}; PYTHON="{sys.executable}"; {program}; set_up dev'
        done = subprocess.run(
            ["bash", "-c", f'set -euo pipefail; source "{tmp_path}/scripts/setup"; {program}'],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr.count("(once)")

    builds = f'install_packages() {{ touch "{library}"; }}'
    assert [n_installed(builds), n_installed(builds)] == [1, 0]
    library.unlink()
    assert [n_installed(builds), n_installed(builds)] == [1, 0]
    library.unlink()
    no_compiler = "install_packages() { :; }"
    assert [n_installed(no_compiler), n_installed(no_compiler)] == [1, 0]
