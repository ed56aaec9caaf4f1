"""What a service is for systemd and launchd: its file, and what is run to install and remove it.

Pure.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final, Literal

Scope = Literal["user", "system"]

STOP_S: Final = 60
"""How long a service may take to end: a node drains first, running requests are told, and stages
are freed."""
RESTART_S: Final = 5
WRONG_USAGE: Final = 2
"""The exit code of wrong flags: another start would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A command that runs at boot. `kind` is `node` or `serve`, `command` the whole command line.

    With the scope `user` it runs as who installs it, with `system` as `user`. `home` is that
    user's folder.
    """

    kind: str
    command: Sequence[str]
    environment: Mapping[str, str]
    scope: Scope
    user: str
    user_id: int
    home: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFiles:
    """How a service is installed: its name, its file, and what is run then; `away` removes it."""

    name: str
    path: Path
    content: bytes
    before: Sequence[Sequence[str]] = ()
    """Run first, whether it succeeds or not."""
    start: Sequence[Sequence[str]]
    """Run in order; the first that fails ends the installation."""
    afterwards: Sequence[Sequence[str]] = ()
    """Run then; where one fails, people are told to run it themselves."""
    away: Sequence[Sequence[str]]
    forget: Sequence[Sequence[str]] = ()
    """Run when the file is gone."""
    ask: Sequence[str]
    """Exits with 0 if the service runs."""
    begins: str = "at every boot"
    """When it runs again, as people say it."""


def systemd(service: Service) -> ServiceFiles:
    """Make a systemd unit."""
    name = f"shardnet-{service.kind}.service"
    is_user = service.scope == "user"
    folder = service.home / ".config/systemd/user" if is_user else Path("/etc/systemd/system")
    control = ["systemctl", "--user"] if is_user else ["systemctl"]
    linger = [["loginctl", "enable-linger", service.user]] if is_user else []
    return ServiceFiles(
        name=name,
        path=folder / name,
        content=_unit(service).encode(),
        start=[
            [*control, "daemon-reload"],
            [*control, "enable", name],
            [*control, "restart", name],
        ],
        afterwards=linger,
        away=[[*control, "disable", "--now", name]],
        forget=[[*control, "daemon-reload"]],
        ask=[*control, "is-active", name],
    )


def launchd(service: Service) -> ServiceFiles:
    """Make a launchd agent, or for the whole system a daemon."""
    label = f"org.shardnet.{service.kind}"
    is_user = service.scope == "user"
    folder = service.home / "Library/LaunchAgents" if is_user else Path("/Library/LaunchDaemons")
    path = folder / f"{label}.plist"
    domain = f"gui/{service.user_id}" if is_user else "system"
    stop = ["launchctl", "bootout", f"{domain}/{label}"]
    return ServiceFiles(
        name=label,
        path=path,
        content=_property_list(service, label),
        before=[stop],
        start=[["launchctl", "bootstrap", domain, str(path)]],
        away=[stop],
        ask=["launchctl", "print", f"{domain}/{label}"],
    )


def _unit(service: Service) -> str:
    is_user = service.scope == "user"
    lines = [
        "[Unit]",
        f"Description=shardnet {service.kind}",
        *([] if is_user else ["Wants=network-online.target", "After=network-online.target"]),
        "",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, service.command))}",
        *(f"Environment={_quoted(f'{name}={text}')}" for name, text in service.environment.items()),
        *([] if is_user else [f"User={service.user}"]),
        f"WorkingDirectory={str(service.home).replace('%', '%%')}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={WRONG_USAGE}",
        f"TimeoutStopSec={STOP_S}",
        "KillMode=mixed",  # a keeper tells its node itself, and a node its helpers
        "NoNewPrivileges=yes",
        *([] if is_user else ["ProtectSystem=full", "PrivateTmp=yes"]),
        "",
        "[Install]",
        f"WantedBy={'default.target' if is_user else 'multi-user.target'}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Quote one word of a unit: systemd expands % and $, and takes \\ and quotes as C does."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'


def _property_list(service: Service, label: str) -> bytes:
    is_user = service.scope == "user"
    logs = service.home / "Library/Logs" if is_user else PurePath("/Library/Logs")
    entries: dict[str, object] = {
        "Label": label,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": dict(service.environment),
        "WorkingDirectory": str(service.home),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",
        "StandardErrorPath": str(logs / f"shardnet-{service.kind}.log"),
    }
    if not is_user:
        entries["UserName"] = service.user
    return plistlib.dumps(entries)
