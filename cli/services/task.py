"""A service as a task of Windows' Task Scheduler, and the program that such a task runs.

The Task Scheduler sets no variables, keeps no output, and starts again only what could not be
started: the program does these for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Final
from xml.sax.saxutils import escape

from shardnet.installation import ENDS_WITH_STDIN

from .service_files import RESTART_S, WRONG_USAGE, Service, ServiceFiles

MAX_LOG_BYTES: Final = 16 << 20
"""A larger log is begun anew when the service starts; the one before is kept."""

_TASK: Final = """\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>shardnet {kind}</Description>
  </RegistrationInfo>
  <Triggers>
    {trigger}
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{user}</UserId>
      <LogonType>{logon}</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <IdleSettings>
      <StopOnIdleEnd>false</StopOnIdleEnd>
      <RestartOnIdle>false</RestartOnIdle>
    </IdleSettings>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>5</Priority>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>255</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{command}</Command>
      <Arguments>{arguments}</Arguments>
      <WorkingDirectory>{home}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""
"""Without a time limit, which is three days else, and with the priority of other programs, not the
lower one that tasks have (7)."""


_RUNNING: Final = 4
"""TASK_STATE_RUNNING: its word is in the language of the system."""


def scheduled(service: Service, *, domain: str) -> ServiceFiles:
    """Make a task: of a user one that runs while they are logged on, of the machine at its start.

    Neither needs a password to be stored. `domain` is where the user's account is.
    """
    is_user = service.scope == "user"
    user = f"{domain}\\{service.user}" if domain else service.user
    name = f"shardnet-{service.kind}{f'-{service.user}' if is_user else ''}"
    folder = service.home / "AppData" / "Local" / "shardnet"
    python, *words = service.command
    starter = ["-P", "-m", __name__, str(folder / "Logs" / f"{name}.log")]
    variables = [f"{key}={text}" for key, text in service.environment.items()]
    trigger = f"<LogonTrigger><UserId>{escape(user)}</UserId></LogonTrigger>"
    content = _TASK.format(
        kind=service.kind,
        trigger=trigger if is_user else "<BootTrigger></BootTrigger>",
        user=escape(user),
        logon="InteractiveToken" if is_user else "S4U",
        command=escape(str(PureWindowsPath(python).with_name("pythonw.exe"))),
        arguments=escape(subprocess.list2cmdline([*starter, *variables, "--", *words])),
        home=escape(str(service.home)),
    )
    path = folder / f"{name}.xml"
    quoted = name.replace("'", "''")
    runs = f"exit [int]((Get-ScheduledTask -TaskName '{quoted}').State -ne {_RUNNING})"
    end = ["schtasks", "/End", "/TN", name]
    return ServiceFiles(
        name=name,
        path=path,
        content=content.encode("utf-16"),
        before=[end],
        start=[
            ["schtasks", "/Create", "/F", "/TN", name, "/XML", str(path)],
            ["schtasks", "/Run", "/TN", name],
        ],
        away=[end, ["schtasks", "/Delete", "/F", "/TN", name]],
        ask=["powershell", "-NoProfile", "-Command", runs],
        begins="whenever you log on" if is_user else "at every boot",
    )


def main(arguments: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> int:
    """Run the command behind `--` until it ends well or was wrong; return its exit code.

    Before it stand the file that its output is appended to, and variables as NAME=VALUE. When this
    process is ended, the command sees its standard input close, and ends as it does at Ctrl-C.
    """
    place = arguments.index("--")
    (log, *variables), command = arguments[:place], arguments[place + 1 :]
    environment = {**os.environ, **dict(each.split("=", 1) for each in variables)}
    python = Path(sys.executable)
    if python.stem == "pythonw":
        python = python.with_name("python.exe")
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".old.log"))
        with (
            path.open("ab") as output,
            subprocess.Popen(
                [str(python), *command],
                env={**environment, ENDS_WITH_STDIN: "1"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            ) as running,
        ):
            code = running.wait()
        if code in (0, WRONG_USAGE):
            return code
        sleep(RESTART_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
