"""The `shardnet` command: which subcommands there are, and the configuration they start from.

Imports none of them: `--help` and `--version` take no longer than typer does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import typer
from typer.core import TyperGroup

from shardnet import __version__
from shardnet.cluster.machine.folders import config_path

from .flags.config import SHELLS, completes_here, install, one_of, read_config, script
from .flags.lazy_group import LazyGroup
from .output.exit_codes import (
    exit_codes,
    open_missing_streams,
    prepare_streams,
    restore_at_sigterm,
    say,
    write_out,
)

_SUMMARIES: Final = {
    "node": "Run a node in the foreground; Ctrl-C ends it.",
    "nodes": "List the nodes of this machine and their peers.",
    "status": "Show what a node has loaded, for which ring, and what runs.",
    "top": "Show nodes, ring and requests live.",
    "models": "List the models that this machine and its peers have.",
    "household": "List or name the models that answer side by side.",
    "plan": "Show the plan that would be used, and why.",
    "generate": "Generate on the ring and stream the text.",
    "chat": "Chat with the model: each line is a message, the answer streams.",
    "serve": "Serve over HTTP, as OpenAI's, Anthropic's and Ollama's API.",
    "connect": "Print the settings with which a program asks a server.",
    "inspect": "Write the logits and hidden states of a prompt to a file.",
    "bench": "Measure the ring's speed, or the perplexity of a text.",
    "pull": "Download a model of the Hugging Face Hub to this machine.",
    "unload": "Free the model on every node of the ring, or one of the household.",
    "drain": "Empty a node without losing a request, and end it.",
    "update": "Bring another version to all nodes, one after the other.",
    "wake": "Wake a machine whose node sleeps.",
    "doctor": "Diagnose the cluster: what is wrong, where, and what to do.",
    "key": "Make, enter, show or replace the cluster key.",
    "service": "Run a node or a server at boot, as a service of the system.",
    "cache": "List or delete what is cached on disk: weights and long prompts.",
}
"""The commands, in the order of --help."""
_ELSEWHERE: Final = {
    "household": (".commands.models", "household"),
    "unload": (".commands.nodes", "unload"),
    "drain": (".commands.nodes", "drain"),
    "wake": (".commands.nodes", "wake"),
    "key": (".commands.key", "key_app"),
    "service": (".services.service", "service_app"),
    "update": (".services.update", "update"),
    "cache": (".commands.cache", "cache_app"),
}
"""The commands that are not what a module of the same name calls so."""


class Commands(LazyGroup):
    """The subcommands of `shardnet`."""

    summaries = MappingProxyType(_SUMMARIES)

    def load(self, name: str) -> Callable[..., None] | typer.Typer:
        """Import a command."""
        module, attribute = _ELSEWHERE.get(name, (f".commands.{name}", name))
        command: Callable[..., None] | typer.Typer
        command = getattr(import_module(module, __package__), attribute)
        return command


app = typer.Typer(
    name="shardnet",
    cls=Commands,
    help="One language model over the machines of a home lab.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        write_out(f"shardnet {__version__}")
        raise typer.Exit


def _check_shell(shell: str) -> None:
    if shell not in SHELLS:
        raise typer.BadParameter(f"'{shell}': choose {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")


def _show_completion(shell: str) -> None:
    if shell:
        _check_shell(shell)
        write_out(script(shell), end="")
        raise typer.Exit


def _install_completion(shell: str) -> None:
    if not shell:
        return
    _check_shell(shell)
    file, reads = install(shell, Path.home())
    say(f"wrote {file}{f', which {reads} reads' if reads else ''}: it counts in new shells")
    raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    install_completion: Annotated[
        str,
        typer.Option(
            "--install-completion",
            metavar="|".join(SHELLS),
            callback=_install_completion,
            autocompletion=one_of(*SHELLS),
            is_eager=True,
            show_default=False,
            help="Make TAB complete commands, flags, models and nodes in new shells.",
        ),
    ] = "",
    show_completion: Annotated[
        str,
        typer.Option(
            "--show-completion",
            metavar="|".join(SHELLS),
            callback=_show_completion,
            autocompletion=one_of(*SHELLS),
            is_eager=True,
            show_default=False,
            help="Print the script that does it.",
        ),
    ] = "",
) -> None:
    """One language model over the machines of a home lab."""
    assert isinstance(context.command, TyperGroup)
    context.default_map = read_config(config_path(os.environ), context.command)


def main() -> None:
    """Run the command line."""
    open_missing_streams()
    prepare_streams()
    restore_at_sigterm()
    completes_here()
    try:
        with exit_codes():
            app(windows_expand_args=False)  # a prompt may have * and $
    except typer.Exit as end:
        sys.exit(end.exit_code)
