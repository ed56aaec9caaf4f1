"""What TAB completes, and that the answer comes without torch and in no time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardnet.cluster.machine.folders import RUNTIME_DIR_VARIABLE
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.errors import ConfigurationError
from shardnet_cli.flags.config import (
    ASKS_VARIABLE,
    SHELLS,
    completes_here,
    install,
    node_addresses,
    script,
)
from shardnet_cli.main import app

ASKS = {ASKS_VARIABLE: "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
SLOW = {"torch", "numpy", "rich", "transformers", "tokenizers", "zeroconf", "cryptography"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which LM Studio has two models, one of a name that a shell would run."""
    for name in ("tiny-GGUF", "$(reboot)"):
        folder = tmp_path / ".lmstudio" / "models" / "people" / name
        folder.mkdir(parents=True)
        (folder / "tiny.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path / "run"))
    return tmp_path


def answers(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What TAB at the end of `line` offers."""
    for name, value in {**ASKS, "_TYPER_COMPLETE_ARGS": line}.items():
        monkeypatch.setenv(name, value)
    completes_here()
    outcome = CliRunner().invoke(app, [], prog_name="shardnet")
    return [answer.partition("\t")[0] for answer in outcome.stdout.splitlines() if answer]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardnet no", ["node", "nodes"]),
        ("shardnet generate --logp", ["--logprobs"]),
        ("shardnet plan --kv-dtype ", ["auto", "int8"]),
        ("shardnet plan --quant=i", ["int8", "int4"]),
        ("shardnet plan --nodes-per-stage ", ["auto", "1", "2"]),
        ("shardnet inspect --hidden ", ["none", "last", "all"]),
        ("shardnet chat --model lm", ["lmstudio:people/tiny-GGUF/tiny.gguf"]),
        ("shardnet --show-completion ", ["bash", "zsh", "fish", "powershell"]),
        ("shardnet cache r", ["rm"]),
        ("shardnet generate On", []),
    ],
)
@pytest.mark.usefixtures("home")
def test_commands_flags_and_values_are_offered(
    line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(line, monkeypatch) == offered


def test_nodes_of_this_machine_are_offered_one_after_the_other(home: Path) -> None:
    nodes = LocalNodes(home / "run")
    for number in (1, 2):
        nodes.add(node=f"{number}" * 32, name=f"n{number}", address=f"h:{number}", pid=os.getpid())
    assert node_addresses("h") == ["h:1\tn1", "h:2\tn2"]
    assert node_addresses("h:2,") == ["h:2,h:1\tn1"]


@pytest.mark.usefixtures("home")
def test_an_answer_imports_nothing_slow() -> None:
    code = (
        "import json, sys; sys.argv[0] = 'shardnet'\n"
        "from shardnet_cli.main import main\n"
        "try: main()\n"
        "finally: print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ASKS, "_TYPER_COMPLETE_ARGS": "shardnet generate --model "},
        check=False,
        capture_output=True,
        text=True,
    )
    *offered, modules = done.stdout.splitlines()
    assert "lmstudio:people/tiny-GGUF/tiny.gguf\tLM Studio" in offered
    assert "reboot" not in "".join(offered)
    assert not SLOW & set(json.loads(modules))


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("shardnet plan --model ollama:q", ["qwen3:8b", "qwen3:4b"]),
        ("shardnet plan --model=ollama:q", ["qwen3:8b", "qwen3:4b"]),
        ("shardnet plan --model ollama:qwen3:", ["8b", "4b"]),
        ("shardnet plan --model o", ["ollama:qwen3:8b", "ollama:qwen3:4b"]),
    ],
)
def test_bash_completes_behind_the_last_colon(
    tmp_path: Path, line: str, completed: Sequence[str]
) -> None:
    """Bash itself divides words there."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash here")
    fake = tmp_path / "shardnet"
    fake.write_text("#!/bin/sh\nprintf 'ollama:qwen3:8b\\tOllama\\nollama:qwen3:4b\\tOllama\\n'\n")
    fake.chmod(0o755)
    asked = (
        f"{script('bash')}\nCOMP_LINE=$1 COMP_POINT=${{#1}}\n_shardnet_completion shardnet\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", asked, "bash", line],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == completed


@pytest.mark.parametrize("shell", SHELLS)
def test_installing_twice_adds_one_line(
    tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bashrc").write_text("mine")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "powershell").write_text(f"#!/bin/sh\nprintf '{tmp_path}/Döcs/profile.ps1\r\n'\n")
    (programs / "powershell").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    files = [install(shell, tmp_path) for _ in range(2)]
    assert files[0][0].read_text() == script(shell)
    assert [bool(reads) for _, reads in files] == [shell != "fish", False]
    read = files[0][1]
    if read is not None:
        lines = read.read_text().splitlines()
        assert str(files[0][0]) in lines[-1]
        assert lines[:-1] == (["mine"] if shell == "bash" else [])


def test_an_unknown_shell_is_named() -> None:
    outcome = CliRunner().invoke(app, ["--install-completion", "tcsh"])
    assert outcome.exit_code == 2
    assert "'tcsh': choose bash, zsh, fish or powershell" in outcome.stderr


def test_a_machine_without_powershell_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"no PowerShell.*--show-completion powershell"):
        install("powershell", tmp_path)
