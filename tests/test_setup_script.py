"""What scripts/set_up.py installs, and where it has torch come from, by machine and configuration.

Nothing is installed.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OWN_INDEX = "global.extra-index-url='https://pypi.example/simple'" + 9999 * "\nglobal.x='y'"
PYTHON = """#!/bin/sh
case "$*" in
*"config list"*) echo "$PIP_CONFIG" ;;
"-P -c"*) echo "$TORCH" ;;
*) echo "$*" >>"$CALLS" && exit "$INSTALLED" ;;
esac
"""
"""Stands for the environment's interpreter: answers as a case says, and notes what pip is to do."""

CASES = {
    "no driver": ({}, CPU_INDEX, "no NVIDIA driver"),
    "a driver": ({"NVIDIA": "yes"}, "", "comes with CUDA (about 2.7 GB"),
    "macOS": ({"SYSTEM": "Darwin"}, "", ""),
    "Windows": ({"SYSTEM": "Windows"}, "", ""),
    "an index of one's own": ({"PIP_CONFIG": OWN_INDEX}, "", "where pip is configured to look"),
    "another setting of pip": ({"PIP_CONFIG": "global.timeout='9'"}, CPU_INDEX, "no NVIDIA"),
    "no way out": ({"REACHED": ""}, "", "does not answer: torch comes from pip's own index"),
    "not in that index": ({"INSTALLED": "1"}, CPU_INDEX, "that failed: torch comes from pip's own"),
    "a named index": ({"SHARDNET_TORCH_INDEX": "file:///x"}, "file:///x", "comes from file:///x"),
    "none named": ({"SHARDNET_TORCH_INDEX": ""}, "", "from pip's own index"),
    "torch is there": ({"TORCH": "pinned"}, "", ""),
    "another torch is there": ({"TORCH": "2.0.0"}, CPU_INDEX, "no NVIDIA driver"),
}


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delenv("SHARDNET_TORCH_INDEX", raising=False)
    yield import_module("set_up")
    del sys.modules["set_up"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(sys.platform == "win32", reason="a shell's script stands for Python")
def test_torch_comes_from_where_its_cpu_build_is(
    case: str,
    set_up: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changes, index, said = CASES[case]
    [pinned] = (ROOT / "constraints.txt").read_text().splitlines()[1:2]
    fake, calls = tmp_path / "python", tmp_path / "calls"
    fake.write_text(PYTHON)
    fake.chmod(0o700)
    calls.touch()
    values = {"PIP_CONFIG": "", "TORCH": "", "REACHED": "yes", "INSTALLED": "0", "NVIDIA": ""}
    values |= {"SYSTEM": "Linux", "CALLS": str(calls), **changes}
    if values["TORCH"] == "pinned":
        values["TORCH"] = pinned.removeprefix("torch==")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(set_up, "PYTHON", fake)
    monkeypatch.setattr(set_up, "has_nvidia", lambda: bool(values["NVIDIA"]))
    monkeypatch.setattr(set_up, "is_reachable", lambda _: bool(values["REACHED"]))
    monkeypatch.setattr(platform, "system", lambda: values["SYSTEM"])
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    set_up.install_torch()
    asked = calls.read_text().splitlines()
    assert [call.split("--index-url ")[1].split()[0] for call in asked] == (
        [index] if index else []
    )
    assert all("--no-deps" in call and call.endswith(" torch") for call in asked)
    told = capfd.readouterr().err
    assert said in told
    assert told.count("==>") == (0 if not said else 2 if "failed" in said else 1)


def test_what_is_installed_is_what_the_project_declares(set_up: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, more in (("", []), ("dev", project["optional-dependencies"]["dev"])):
        assert set_up.requirements(extra) == [*project["dependencies"], *more]


@pytest.mark.parametrize(
    ("packages", "library"), [(0, 0), (1, 0), (0, 1)], ids=["all well", "packages", "library"]
)
@pytest.mark.skipif(sys.platform == "win32", reason="a shell's script stands for Python")
def test_the_library_is_built_beside_the_packages_and_either_may_fail(
    packages: int,
    library: int,
    set_up: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"""#!/bin/sh
echo "$*" >>"{tmp_path}/calls"
case "$*" in *"--no-deps -e "*) exit {library} ;; *) exit {packages} ;; esac
""")
    fake.chmod(0o700)
    monkeypatch.setattr(set_up, "PYTHON", fake)
    monkeypatch.setattr(set_up, "install_torch", lambda: None)
    assert set_up.install_packages("dev") is not bool(packages or library)
    calls = (tmp_path / "calls").read_text()
    assert f"--no-deps -e {ROOT}" in calls
    assert " torch>=2" in calls


def test_a_library_that_is_gone_is_built_again(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it all is computed by torch, many times slower; who has no compiler has none."""
    kernels = tmp_path / "shardnet" / "model" / "kernels"
    for folder in (tmp_path / ".venv", kernels / "csrc"):
        folder.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    library, builds, n_installed = kernels / set_up.LIBRARY, True, 0
    hash_of = set_up.installation_hash
    monkeypatch.setattr(set_up, "installation_hash", lambda version: hash_of(version, tmp_path))
    monkeypatch.setattr(set_up, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(set_up, "python_version", lambda: "3.11")

    def install(extra: str) -> bool:
        nonlocal n_installed
        n_installed += 1
        if builds:
            library.touch()
        return True

    monkeypatch.setattr(set_up, "install_packages", install)

    def n_times() -> list[int]:
        nonlocal n_installed
        found = []
        for _ in range(2):
            n_installed = 0
            set_up.set_up("dev")
            found.append(n_installed)
        set_up.set_up()  # what it takes to test is more than what it takes to run
        assert n_installed == found[-1]
        return found

    assert n_times() == [1, 0]
    library.unlink()
    assert n_times() == [1, 0]
    library.unlink()
    builds = False
    assert n_times() == [1, 0]
    (tmp_path / "constraints.txt").write_text("torch==1")
    assert n_times() == [1, 0]


@pytest.mark.parametrize("what", ["python_version", "install_packages"])
def test_what_cannot_be_set_up_is_said_in_a_line(
    what: str, set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "VENV", tmp_path)
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / "python")
    if what == "install_packages":
        monkeypatch.setattr(set_up, "python_version", lambda: "3.11")
        monkeypatch.setattr(set_up, "install_packages", lambda extra: False)
    else:
        monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit) as ended:
        set_up.set_up_or_exit()
    words = {"python_version": "install its venv module", "install_packages": "pip could not"}
    assert str(ended.value.code).startswith("error: ")
    assert words[what] in str(ended.value.code)
    assert set_up.python_version is not None


@pytest.mark.skipif(sys.platform == "win32", reason="a bash script")
def test_other_scripts_get_the_environments_python() -> None:
    script = f'set -eu; source "{SCRIPTS}/setup"; find_python() {{ echo echo; }}; '
    shown = subprocess.run(
        ["bash", "-c", script + 'set_up; set_up dev; echo "$PYTHON"'],
        capture_output=True,
        text=True,
        check=True,
    )
    program = f"-P {SCRIPTS}/set_up.py"
    assert shown.stdout.splitlines() == [
        f"{program}",
        f"{program} --dev",
        f"{ROOT}/.venv/bin/python",
    ]
