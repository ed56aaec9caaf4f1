"""`shardnet service`: run a node or a server at boot, by systemd, launchd or the Task Scheduler."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from shardnet.errors import ConfigurationError, ShardnetError, UsageError
from shardnet.files import decode_text, write_whole
from shardnet.windows import library

from ..flags.options import Json, option
from ..output.exit_codes import fail, say, write_out
from .service_files import Service, ServiceFiles, launchd, systemd
from .task import scheduled

KINDS: Final = ("node", "serve")
_REMOVE: Final = "del" if sys.platform == "win32" else "rm"
ANSWER_S: Final = 60.0
"""How long the system may take for one of these commands."""

_TAKEN: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "OLLAMA_MODELS")
_SECRET: Final = ("SHARDNET_API_KEY",)
"""Variables that the service gets from here beside SHARDNET_* and XDG_*, and one that it does
not: others may read the file."""

service_app = typer.Typer(
    name="service",
    help="Run a node or a server at boot, as a service of the system.",
    no_args_is_help=True,
)

System = Annotated[
    bool,
    option(
        "--system",
        "For the whole machine, not only for this user; needs root, or an administrator.",
    ),
]
DryRun = Annotated[
    bool, option("--dry-run", "Print what would be written and run, and do nothing.")
]
Kind = Annotated[str, typer.Argument(metavar="node|serve", help="What runs.", show_default=False)]


@service_app.command(
    short_help="Run a node, or a server, from now on and at every boot.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def install(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="node|serve FLAGS", help="What runs, with its flags.", show_default=False
        ),
    ] = None,
    system: System = False,
    dry_run: DryRun = False,
) -> None:
    """Run a node, or a server, from now on and at every boot, with the flags that are given.

    Flags of this command stand before `node` or `serve`. Installed again, it has the new flags.
    """
    kind, *flags = command or ["node"]
    _check(kind, flags)
    files = _files(kind, flags, system=system)
    if dry_run:
        _show(files)
        return
    _check_root(system)
    _write(files)
    for line in files.before:
        _succeeds(line)
    for line in files.start:
        _run(line)
    for line in files.afterwards:
        try:
            _run(line)
        except ShardnetError:
            say(f"warning: run `{_shown(line)}`: without it the service starts at login only")
    say(f"installed {files.name} ({files.path}): it runs now and {files.begins}")


@service_app.command(short_help="Stop the service and remove its file.")
def uninstall(kind: Kind = "node", system: System = False, dry_run: DryRun = False) -> None:
    """Stop the service and remove its file; models, keys and settings stay."""
    _check(kind, ())
    try:
        files = _files(kind, (), system=system)
        if dry_run:
            for line in (*files.away, [_REMOVE, str(files.path)], *files.forget):
                write_out(_shown(line))
            return
        _check_root(system)
        if not files.path.exists():
            raise UsageError(f"{files.name} is not installed: there is no {files.path}")
        for line in files.away:
            try:
                _run(line)
            except ShardnetError as error:  # it does not run: its file is to go all the same
                say(f"warning: {error}")
        files.path.unlink()
        for line in files.forget:
            _run(line)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    say(f"removed {files.name}")


@service_app.command(short_help="Say whether it is installed, and whether it runs.")
def status(kind: Kind = "node", system: System = False, as_json: Json = False) -> None:
    """Say whether the service is installed, and whether it runs."""
    _check(kind, ())
    files = _files(kind, (), system=system)
    runs = files.path.exists() and _succeeds(files.ask)
    is_there = files.path.exists()
    if as_json:
        told = {"service": files.name, "file": str(files.path), "installed": is_there}
        write_out(json.dumps({**told, "running": runs}))
    else:
        state = "runs" if runs else "is installed and does not run" if is_there else "not installed"
        write_out(f"{files.name}: {state} ({files.path})")


def _check(kind: str, flags: Sequence[str]) -> None:
    """Raise typer.BadParameter for another command, and what its own parser raises for flags."""
    if kind not in KINDS:
        raise typer.BadParameter(f"'{kind}': choose node or serve")
    if any(flag.partition("=")[0] == "--api-key" for flag in flags):
        raise typer.BadParameter(
            "others may read the file of a service: give --api-key-file", param_hint="--api-key"
        )
    if flags:
        _parser(kind).make_context(f"shardnet {kind}", [*flags])


def _parser(kind: str) -> typer.core.TyperCommand:
    """Make the command whose flags a service gets."""
    made = typer.Typer(add_completion=False, rich_markup_mode=None)
    made.command(kind)(_command(kind))
    parser = typer.main.get_command(made)
    assert isinstance(parser, typer.core.TyperCommand)
    return parser


def _command(kind: str) -> Callable[..., None]:
    if kind == "serve":
        from ..commands.serve import serve

        return serve
    from ..commands.node import node

    return node


def _files(kind: str, flags: Sequence[str], *, system: bool) -> ServiceFiles:
    """Describe the service on this system. Raises ConfigurationError where there is none."""
    user = (os.environ.get("SUDO_USER") if system else None) or getpass.getuser()
    service = Service(
        kind=kind,
        command=[sys.executable, "-m", "shardnet_cli", kind, *flags],
        environment=_environment(),
        scope="system" if system else "user",
        user=user,
        user_id=os.getuid() if hasattr(os, "getuid") else 0,
        home=Path(f"~{user}").expanduser() if system else Path.home(),
    )
    match sys.platform:
        case "linux":
            return systemd(service)
        case "darwin":
            return launchd(service)
        case "win32":
            return scheduled(service, domain=os.environ.get("USERDOMAIN", ""))
        case other:
            raise ConfigurationError(
                f"there is neither systemd, launchd nor a Task Scheduler on {other}",
                remedy=f"have `shardnet {kind}` started by what starts programs there",
            )


def _environment() -> dict[str, str]:
    """Return the variables that the service gets from here."""
    taken = {
        name: text
        for name, text in sorted(os.environ.items())
        if name in _TAKEN or name.startswith(("SHARDNET_", "XDG_DATA", "XDG_C"))
    }
    for name in _SECRET:
        if taken.pop(name, None) is not None:
            say(f"warning: {name} is not written into the service: give it --api-key-file")
    return taken


def _show(files: ServiceFiles) -> None:
    write_out(f"# {files.path}")
    write_out(decode_text(files.content), end="")
    for line in (*files.start, *files.afterwards):
        write_out(f"# then: {_shown(line)}")


def _shown(command: Sequence[str]) -> str:
    """Write a command as the system's shell takes it."""
    return subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command)


def _check_root(system: bool) -> None:
    if not system:
        return
    if sys.platform == "win32":
        is_root, who = library("shell32").IsUserAnAdmin(), "an administrator"
        remedy = "run it in a terminal that was opened as administrator"
    else:
        is_root, who, remedy = os.getuid() == 0, "root", "run it with sudo"
    if not is_root:
        raise ConfigurationError(
            f"a service of the whole machine is installed by {who}", remedy=remedy
        )


def _write(files: ServiceFiles) -> None:
    """Write the file of the service. Raises ConfigurationError."""
    try:
        files.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(files.path, files.content, mode=0o644)
    except OSError as error:
        raise ConfigurationError(
            f"{files.path} cannot be written: {error.strerror}",
            remedy="make its folder writable for you",
        ) from error


def _run(command: Sequence[str]) -> None:
    """Run a command of the system. Raises ConfigurationError with what it said."""
    encoding = "oem" if sys.platform == "win32" else None  # that of consoles
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding=encoding,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"`{_shown(command)}` failed: {error}",
            remedy="look at --dry-run, and do the same by hand",
        ) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigurationError(
            f"`{_shown(command)}` failed with {done.returncode}: {said or 'no reason given'}",
            remedy="look at --dry-run, and do the same by hand",
        )


def _succeeds(command: Sequence[str]) -> bool:
    try:
        _run(command)
    except ShardnetError:
        return False
    return True
