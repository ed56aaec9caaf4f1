"""The configuration file: defaults for flags.

Keys are flag names with underscores, and `peers` for a list of --peer, `model_folders` for one of
--model-folder. At the top they hold for every command that has the flag, in a table named like a
command for that command alone. A flag or SHARDNET_* variable comes before.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from shardnet.errors import ConfigurationError
from shardnet.files import check_own


def read_config(path: Path, group: TyperGroup) -> dict[str, Any]:
    """Read the file into a default map for the commands of `group`; {} when there is no file.

    Raises ConfigurationError for a file that cannot be read, that another user may write or that is
    not TOML, and for an unknown key,
    with the nearest known one.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode):  # /dev/null will do as well
                check_own(found, path)
            values = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}", remedy="make it a readable file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: not valid TOML ({error})", remedy="correct it"
        ) from error
    defaults: dict[str, Any] = {name: {} for name in group.commands}
    places = {name: _places(command, defaults[name]) for name, command in group.commands.items()}
    everywhere = [place for several in places.values() for place in several]
    for key, value in values.items():
        if key not in places:
            _put(key, value, everywhere, str(path))
    for name, several in places.items():
        table = values.get(name, {})
        if not isinstance(table, dict):
            raise ConfigurationError(
                f"{path}: '{name}' should be a table",
                remedy=f"write [{name}]; a flag of that name goes into the table of the command "
                "that has it",
            )
        for key, value in table.items():
            _put(key, value, several, f"{path} [{name}]")
    return defaults


_Place = tuple[dict[str, str], dict[str, Any]]
"""A command's flags, from name in the file to parameter, and where their values go."""


def _places(command: object, default_map: dict[str, Any]) -> list[_Place]:
    """List a command, or the commands of a group such as `key`."""
    if isinstance(command, TyperGroup):
        return [
            place
            for name, nested in command.commands.items()
            for place in _places(nested, default_map.setdefault(name, {}))
        ]
    assert isinstance(command, TyperCommand)
    return [(_flags(command.params), default_map)]


def _put(key: str, value: object, places: Sequence[_Place], where: str) -> None:
    """Set a key for every command that has the flag. Raises ConfigurationError if none has."""
    _check(key, {flag for known, _ in places for flag in known}, where)
    for known, default_map in places:
        if key in known:
            default_map[known[key]] = value


def _flags(parameters: Sequence[object]) -> dict[str, str]:
    """Map each flag's name in the file to its parameter."""
    flags = {
        option.lstrip("-").replace("-", "_"): str(parameter.name)
        for parameter in parameters
        if isinstance(parameter, TyperOption)
        for option in parameter.opts
        if option.startswith("--") and option not in ("--help", "--until-stdin-closes")
    }
    lists = {"peers": "peer", "model_folders": "model_folder"}
    return flags | {several: flags[one] for several, one in lists.items() if one in flags}


def _check(key: str, known: set[str], where: str) -> None:
    if key not in known:
        from shardnet.api.validation import nearest

        raise ConfigurationError(f"{where}: unknown key '{key}'{nearest(key, sorted(known))}")
