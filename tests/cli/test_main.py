"""The list of commands: what it says, and that showing it imports none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from shardnet_cli.main import app

ALLOWED = {
    "shardnet",
    "shardnet.errors",
    "shardnet.files",
    "shardnet.permissions",
    "shardnet.cluster",
    "shardnet.cluster.machine",
    "shardnet.cluster.machine.folders",
    "cli",
    "cli.main",
    "cli.flags",
    "cli.flags.completion",
    "cli.flags.config",
    "cli.flags.help_sections",
    "cli.flags.lazy_group",
    "cli.flags.wrong_values",
    "cli.output",
    "cli.output.exit_codes",
}
"""What of this project `--help` imports."""
HEAVY = (
    *("torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "msgspec", "asyncio"),
    *("uvloop", "ssl", "cryptography", "zeroconf", "httpx2", "psutil", "rich", "pydantic"),
)


def imported_by(arguments: Sequence[str]) -> set[str]:
    """The modules that a process has imported when the command has ended."""
    code = f"""
import contextlib, io, json, sys
from shardnet_cli.main import main
sys.argv = ["shardnet", *{list(arguments)!r}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    found: list[str] = json.loads(done.stdout)
    return {name.replace("shardnet_cli", "cli", 1) for name in found}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["-h"]], ids=" ".join)
def test_help_imports_nothing_that_only_commands_need(arguments: list[str]) -> None:
    modules = imported_by(arguments)
    ours = {name for name in modules if name.partition(".")[0] in ("shardnet", "cli")}
    assert ours <= ALLOWED
    assert sorted(modules.intersection(HEAVY)) == []


def test_a_commands_help_imports_that_command_alone() -> None:
    modules = imported_by(["key", "--help"])
    assert "cli.commands.key" in modules
    assert not {"cli.commands.generate", "cli.commands.node", "torch"} & modules


def test_the_list_says_of_each_command_what_the_command_says_of_itself() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    shown = CliRunner().invoke(app, ["--help"], env={"TERMINAL_WIDTH": "80"}).output
    listed = dict(
        line.split(None, 1) for line in shown.partition("Commands:\n")[2].splitlines() if line
    )
    assert list(listed) == list(group.commands)
    for name, command in group.commands.items():
        assert command.name == name
        assert command.get_short_help_str(100) == listed[name]
        if name in ("node", "generate", "chat", "pull", "key", "cache"):
            assert (command.help or "").partition("\n")[0] == listed[name]


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["genrate"])
    assert result.exit_code == 2
    assert "Did you mean 'generate'?" in result.output


def test_a_list_that_is_kept_up_to_date_is_no_json() -> None:
    result = CliRunner().invoke(app, ["nodes", "--watch", "--json", "--no-mdns"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "choose one of --watch and --json" in result.stderr
