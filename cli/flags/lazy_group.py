"""A group of commands of which each is imported when it is used, and none to list them.

Knows how typer makes commands of functions. Must not know any command: it is told where they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from .wrong_values import CommandGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """Where a command is: `attribute` of `module` is a function, or a typer.Typer of several.

    `summary` is its line in the list of commands.
    """

    module: str
    attribute: str
    summary: str

    def load(self, name: str) -> TyperCommand | TyperGroup:
        """Import the module and make the command called `name`."""
        found = getattr(importlib.import_module(self.module), self.attribute)
        parent = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        if isinstance(found, typer.Typer):
            parent.add_typer(found)
        else:
            parent.command(name, short_help=self.summary)(found)
        command = typer.main.get_command(parent)
        if isinstance(command, TyperGroup):
            command = command.commands[name]
        assert isinstance(command, TyperCommand | TyperGroup)
        return command


class LazyGroup(CommandGroup):
    """The commands of `table`, by name, in its order."""

    table: ClassVar[Mapping[str, LazyCommand]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.table)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.table.items()])


class _Commands(MutableMapping[str, Any]):
    """Commands by name, each made when it is first asked for."""

    def __init__(self, table: Mapping[str, LazyCommand]) -> None:
        self._table = table
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._table[name].load(name)
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
