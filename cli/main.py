"""The `shardnet` command: its subcommands, and the configuration they start from."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from shardnet import __version__
from shardnet.cluster.machine.folders import config_path
from shardnet.errors import ConfigurationError

from .commands.bench import bench
from .commands.cache import cache_app
from .commands.chat import chat
from .commands.doctor import doctor
from .commands.generate import generate
from .commands.key import key_app
from .commands.node import node
from .commands.nodes import nodes
from .commands.plan import plan
from .commands.pull import pull
from .commands.status import status
from .commands.unload import unload
from .flags.config import read_config
from .flags.wrong_values import CommandGroup
from .output.exit_codes import exit_codes, fail, open_missing_streams, write_out
from .output.terminal import restore_at_sigterm

app = typer.Typer(
    name="shardnet",
    cls=CommandGroup,
    help="One language model over the machines of a home lab.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, in_short in (
    (node, None),
    (nodes, "Show who is here: the nodes of this machine and their peers."),
    (status, "Show what a node holds, for which ring, and what runs."),
    (plan, "Show the plan that would be used, and why."),
    (generate, None),
    (chat, None),
    (bench, "Measure the ring's speed, or the perplexity of a text."),
    (pull, None),
    (unload, "Free the model on every node of the ring."),
    (doctor, "Say what is wrong, where, and what to do."),
):
    app.command(short_help=in_short)(command)
app.add_typer(key_app)
app.add_typer(cache_app)


def _version(wanted: bool) -> None:
    if wanted:
        write_out(f"shardnet {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """One language model over the machines of a home lab."""
    assert isinstance(context.command, TyperGroup)
    try:
        context.default_map = read_config(config_path(os.environ), context.command)
    except ConfigurationError as error:
        fail(str(error))


def main() -> None:
    """Run the command line."""
    open_missing_streams()
    restore_at_sigterm()
    try:
        with exit_codes():
            app()
    except typer.Exit as end:
        sys.exit(end.exit_code)
