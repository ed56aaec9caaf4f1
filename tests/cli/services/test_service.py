"""`shardnet service`: what systemd and launchd get, and what is done in which order."""

from __future__ import annotations

import json
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardnet.api.serve import server
from shardnet_cli.commands.node import DRAIN_S
from shardnet_cli.main import app
from shardnet_cli.services import service
from shardnet_cli.services.service import Service, launchd, systemd

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
    monkeypatch.setattr(sys, "platform", "win32")
    done = CliRunner().invoke(app, ["service", "install"])
    assert (done.exit_code, "neither systemd nor launchd" in done.stderr) == (1, True)
