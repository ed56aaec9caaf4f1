"""`shardnet service`: what systemd, launchd and the Task Scheduler get, and in which order."""

from __future__ import annotations

import asyncio
import codecs
import getpass
import json
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from shardnet.api.serve import server
from shardnet.files import decode_text
from shardnet_cli.commands.node import DRAIN_S, stop_signal
from shardnet_cli.main import app
from shardnet_cli.services import service, task
from shardnet_cli.services.service_files import RESTART_S, Service, launchd, systemd
from shardnet_cli.services.task import scheduled

ODD = ["/opt/a b/python", "-m", "shardnet_cli", "node", "--name", 'x "%h" $HOME \\']


def made(scope: str = "user", home: str = "/home/ann") -> Service:
    return Service(
        kind="node",
        command=ODD,
        environment={"HF_HOME": "/models 1"},
        scope="user" if scope == "user" else "system",
        user="ann",
        user_id=501,
        home=Path(home),
    )


@pytest.mark.parametrize("scope", ["user", "system"])
def test_a_unit_is_one_for_systemd(scope: str, tmp_path: Path) -> None:
    files = systemd(made(scope))
    text = files.content.decode()
    [start] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    assert shlex.split(start.removeprefix("ExecStart="))[-1] == 'x "%%h" $$HOME \\'
    assert ("User=ann" in text) is (scope == "system")
    assert "KillMode=mixed" in text.splitlines()
    [stop] = [line for line in text.splitlines() if line.startswith("TimeoutStopSec=")]
    assert float(stop.partition("=")[2]) > DRAIN_S + server.STOP_S
    assert files.start[-1] == [*(["systemctl", "--user"] if scope == "user" else ["systemctl"]),
                               "restart", "shardnet-node.service"]  # fmt: skip
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd is not installed")
    real = Service(
        kind="node",
        command=[sys.executable, *ODD[1:]],
        environment={"HF_HOME": "/models 1"},
        scope="user",
        user="ann",
        user_id=501,
        home=tmp_path,
    )
    unit = tmp_path / files.name
    unit.write_bytes(systemd(real).content)
    checked = subprocess.run(
        [verify, "verify", "--user", "--man=no", str(unit)],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert files.name not in checked.stderr, checked.stderr


def test_a_property_list_is_one_for_launchd() -> None:
    files = launchd(made())
    told = plistlib.loads(files.content)
    assert files.path == Path("/home/ann/Library/LaunchAgents/org.shardnet.node.plist")
    assert told["ProgramArguments"] == ODD
    assert told["EnvironmentVariables"] == {"HF_HOME": "/models 1"}
    assert "UserName" not in told
    assert files.start == [["launchctl", "bootstrap", "gui/501", str(files.path)]]
    whole = launchd(made("system"))
    assert plistlib.loads(whole.content)["UserName"] == "ann"
    assert whole.path.parent == Path("/Library/LaunchDaemons")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Commands of the system, which succeed."""
    lines: list[str] = []
    monkeypatch.setattr(service, "_run", lambda line: lines.append(shlex.join(line)))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("SHARDNET_API_KEY", "s3cret")
    return lines


def test_a_service_comes_and_goes(ran: list[str], tmp_path: Path) -> None:
    cli, unit = CliRunner(), tmp_path / ".config/systemd/user/shardnet-serve.service"
    shown = cli.invoke(app, ["service", "install", "--dry-run", "serve", "--port", "8100"])
    assert shown.exit_code == 0
    assert '"serve" "--port" "8100"' in shown.stdout
    assert 'Environment="HF_HOME=/models"' in shown.stdout
    assert "s3cret" not in shown.output
    assert "--api-key-file" in shown.stderr
    assert (ran, unit.exists()) == ([], False)

    assert cli.invoke(app, ["service", "install", "serve", "--port", "8100"]).exit_code == 0
    assert unit.read_text() in shown.stdout
    assert ran[-2].endswith("restart shardnet-serve.service")
    assert ran[-1].startswith("loginctl enable-linger ")
    told = json.loads(cli.invoke(app, ["service", "status", "serve", "--json"]).stdout)
    assert (told["installed"], told["running"]) == (True, True)

    assert cli.invoke(app, ["service", "uninstall", "serve"]).exit_code == 0
    assert not unit.exists()
    assert ran[-2:] == [
        "systemctl --user disable --now shardnet-serve.service",
        "systemctl --user daemon-reload",
    ]
    gone = cli.invoke(app, ["service", "uninstall", "serve"])
    assert (gone.exit_code, "is not installed" in gone.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat"], "choose node or serve"),
        (["node", "--wrong"], "--wrong"),
        (["serve", "--api-key", "s3cret"], "--api-key-file"),
    ],
)
def test_what_could_not_run_is_not_installed(
    arguments: list[str], words: str, ran: list[str]
) -> None:
    done = CliRunner().invoke(app, ["service", "install", *arguments])
    assert (done.exit_code, ran) == (2, [])
    assert words in done.stderr


def test_other_systems_are_told_so(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "sunos5")
    done = CliRunner().invoke(app, ["service", "install"])
    assert (done.exit_code, "neither systemd, launchd nor" in done.stderr) == (1, True)


TASK = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


@pytest.mark.parametrize("scope", ["user", "system"])
def test_a_task_is_one_for_windows(scope: str) -> None:
    service = replace(made(scope, r"C:\Users\Jörg & Co"), command=[r"C:\a b\python.exe", *ODD[1:]])
    files = scheduled(service, domain="DESK")
    assert files.content.startswith(codecs.BOM_UTF16)
    task = ElementTree.fromstring(decode_text(files.content).partition("?>")[2])

    def text(path: str) -> str:
        found = task.findtext("/".join(TASK + part for part in path.split("/")))
        assert found is not None, path
        return found

    assert text("Actions/Exec/Command") == r"C:\a b\pythonw.exe"
    words = text("Actions/Exec/Arguments")
    assert '"HF_HOME=/models 1" -- -m shardnet_cli node --name' in words
    assert words.endswith(r'"x \"%h\" $HOME \\"'), "as programs of Windows read quotation marks"
    assert text("Actions/Exec/WorkingDirectory") == r"C:\Users\Jörg & Co"
    assert text("Settings/ExecutionTimeLimit") == "PT0S", "else it ends after three days"
    assert text("Settings/Priority") in ("4", "5", "6"), "else others come first"
    assert text("Settings/DisallowStartIfOnBatteries") == "false"
    assert 1 <= int(text("Settings/RestartOnFailure/Count")) <= 255
    assert text("Principals/Principal/UserId") == r"DESK\ann"
    is_user = scope == "user"
    assert text("Principals/Principal/LogonType") == ("InteractiveToken" if is_user else "S4U")
    [trigger] = task.findall(f"{TASK}Triggers/*")
    assert trigger.tag == TASK + ("LogonTrigger" if is_user else "BootTrigger")
    name = "shardnet-node-ann" if is_user else "shardnet-node"
    assert [line[:5] for line in (*files.start, *files.away)] == [
        ["schtasks", "/Create", "/F", "/TN", name],
        ["schtasks", "/Run", "/TN", name],
        ["schtasks", "/End", "/TN", name],
        ["schtasks", "/Delete", "/F", "/TN", name],
    ]
    assert files.start[0][5:] == ["/XML", str(files.path)]
    assert f"-TaskName '{name}'" in files.ask[-1]


def test_a_task_comes_and_goes(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("USERDOMAIN", "DESK")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    cli, home = CliRunner(), tmp_path / "AppData/Local/shardnet"
    shown = cli.invoke(app, ["service", "install", "--dry-run", "node", "--name", "a b"])
    assert "--name &quot;a b&quot;" in shown.stdout or '--name "a b"' in shown.stdout
    assert "# then: schtasks /Run /TN shardnet-node-ann" in shown.stdout
    done = cli.invoke(app, ["service", "install", "node"])
    assert "it runs now and whenever you log on" in done.stderr
    assert (home / "shardnet-node-ann.xml").exists()
    assert [line.split()[1] for line in ran] == ["/End", "/Create", "/Run"]
    assert cli.invoke(app, ["service", "uninstall"]).exit_code == 0
    assert [line.split()[1] for line in ran[3:]] == ["/End", "/Delete"]
    assert not (home / "shardnet-node-ann.xml").exists()


@pytest.mark.parametrize("is_administrator", [False, True])
def test_a_task_of_the_machine_needs_an_administrator(
    is_administrator: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell32 = Mock()
    shell32.IsUserAnAdmin.return_value = int(is_administrator)
    monkeypatch.setattr(service, "library", lambda name: shell32)
    monkeypatch.setattr(sys, "platform", "win32")
    done = CliRunner().invoke(app, ["service", "install", "--system"])
    assert bool(ran) is is_administrator
    assert ("opened as administrator" in done.stderr) is not is_administrator


PROGRAM = """
import os, sys
print(os.environ["HF_HOME"], sys.argv[1:], "SHARDNET_ENDS_WITH_STDIN" in os.environ, flush=True)
os.rename("codes", "codes.now")
code, *rest = open("codes.now").read().split()
open("codes", "w").write(" ".join(rest))
sys.exit(int(code))
"""


@pytest.mark.parametrize(("codes", "runs"), [("0", 1), ("2", 1), ("1 -9 0", 3)])
def test_a_tasks_program_runs_until_it_ends_well(
    codes: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "codes").write_text(codes)
    slept: list[float] = []
    log = tmp_path / "Logs" / "node.log"
    told = task.main([str(log), "HF_HOME=a=b", "--", "-c", PROGRAM, "x y"], slept.append)
    assert (told, slept) == (int(codes.split()[-1]), [RESTART_S] * (runs - 1))
    assert log.read_text() == "a=b ['x y'] True\n" * runs


def test_the_end_of_a_tasks_program_ends_what_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its standard input closes, whoever ends it and how."""
    monkeypatch.setenv("SHARDNET_ENDS_WITH_STDIN", "1")
    read, write = os.pipe()

    async def run() -> None:
        stopping = stop_signal(until_stdin_closes=False)
        assert not stopping.is_set()
        os.close(write)
        await asyncio.wait_for(stopping.wait(), 20)

    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        asyncio.run(run())
