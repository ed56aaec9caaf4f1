"""A group of commands that are imported when they are used, not when they are listed.

Knows how typer makes commands of functions. Must not know any command: subclasses do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from shardnet.cluster.machine.folders import config_path

from .completion import with_words
from .help_sections import SectionedCommand


class CommandGroup(TyperGroup):
    """Commands whose refused values are reported in our words, not those of a library."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.BadParameter in our words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            refused = _first_refused(error.__cause__)
            if refused is None:
                raise
            raise typer.BadParameter(
                f"{refused['input']!r}: give {_accepted(refused)}",
                ctx=error.ctx,
                param_hint=_source(error),
            ) from error


def _first_refused(cause: object) -> dict[str, Any] | None:
    """Return pydantic's first error, None where the cause is another."""
    errors = getattr(cause, "errors", None)
    refused: list[dict[str, Any]] = errors() if callable(errors) else []
    return refused[0] if refused else None


def _accepted(refused: dict[str, Any]) -> str:
    limits = refused.get("ctx", {})
    match refused["type"].split("_"):
        case ["greater", "than", "equal"]:
            return f"{limits['ge']} or more"
        case ["less", "than", "equal"]:
            return f"{limits['le']} or less"
        case ["int", *_]:
            return "a whole number"
        case ["float", *_]:
            return "a number"
        case ["bool", *_]:
            return "true or false"
        case ["string", *_]:
            return "text"
        case ["list", *_]:
            return "a list"
        case _:
            return f"another value ({refused['msg']})"


def _source(error: typer.BadParameter) -> str:
    """Name where the value comes from: the flag, the variable, or the key and its file."""
    if error.param is None or error.ctx is None:
        return ""
    source = error.ctx.get_parameter_source(error.param.name or "")
    flag = next((name for name in error.param.opts if name.startswith("--")), error.param.opts[0])
    match source.name if source is not None else "":
        case "ENVIRONMENT":
            return str(error.param.envvar)
        case "DEFAULT_MAP":
            key = flag.removeprefix("--").replace("-", "_")
            return f"{key} in {config_path(os.environ)}"
        case _:
            return flag


Load = Callable[[str], Callable[..., None] | typer.Typer]


class LazyGroup(CommandGroup):
    """Commands by name with their lines in the list of commands, in the order of `summaries`."""

    summaries: ClassVar[Mapping[str, str]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.summaries, self.load)

    def load(self, name: str) -> Callable[..., None] | typer.Typer:
        """Import the command of a name: a function, or a typer.Typer of several."""
        raise NotImplementedError

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete flags, and commands without importing them."""
        listed = copy(self)
        listed.commands = {
            name: TyperCommand(name, short_help=summary) for name, summary in self.summaries.items()
        }
        ctx.command = listed
        return with_words(super(LazyGroup, listed).shell_complete(ctx, incomplete))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*self.summaries.items()])


def _make(name: str, summary: str, found: Callable[..., None] | typer.Typer) -> Any:
    """Make the command called `name` of a function, or of a typer.Typer."""
    parent = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    if isinstance(found, typer.Typer):
        parent.add_typer(found)
    else:
        parent.command(name, cls=SectionedCommand, short_help=summary)(found)
    command = typer.main.get_command(parent)
    if isinstance(command, SectionedCommand):
        command.examples = getattr(found, "examples", ())
    if isinstance(command, TyperGroup):
        command = command.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class _Commands(MutableMapping[str, Any]):
    """Commands by name, each made when it is first asked for."""

    def __init__(self, table: Mapping[str, str], load: Load) -> None:
        self._table = table
        self._load = load
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _make(name, self._table[name], self._load(name))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self._table

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._table, *self._made]))

    def __len__(self) -> int:
        return len(self._table.keys() | self._made.keys())
