"""Flags in one line each, and groups of them: a dataclass taken by a command as one argument.

Knows how typer reads a command: parameters, their types and defaults. Must not know any flag.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from .completion import Complete, one_of

T = TypeVar("T")


def option(
    spelled: str,
    help: str,
    *,
    env: bool | str = False,
    min: float | None = None,
    max: float | None = None,
    hides_default: bool = False,
    words: Complete | None = None,
) -> Any:
    """Describe a flag for typer: `spelled` as --help has it, such as `--name NAME`.

    It is also set by the variable `env`, or if True by SHARDNET_NAME. TAB completes `words`, else
    those of `--name this|that|N` that are in small letters.
    """
    flag, _, value = spelled.partition(" ")
    if words is None and "|" in value:
        words = one_of(*(word for word in value.split("|") if word.islower()))
    return typer.Option(
        flag,
        metavar=value or None,
        help=help,
        envvar=f"SHARDNET_{flag[2:].replace('-', '_').upper()}" if env is True else env or None,
        min=min,
        max=max,
        show_default=not hides_default,
        autocompletion=words,
    )


def flag(default: T, spelled: str, help: str, **more: Any) -> T:
    """Make a field of a group that is a flag; the other arguments are those of `option`."""
    metadata = {"option": option(spelled, help, **more)}
    return dataclasses.field(default=default, metadata=metadata)


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of `command` by the flags among its fields, for typer.

    A field is a flag if `flag` made it or its type is Annotated; others keep their defaults, so a
    subclass removes a flag with a plain default. The command receives the dataclass.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            flags = list(_flags(hint))
            groups[name] = hint, [flag.name for flag in flags]
            parameters += flags
        else:
            parameters.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        for name, (group, flags) in groups.items():
            values[name] = group(**{flag: values.pop(flag) for flag in flags})
        command(**values)

    shown = Signature(parameters, return_annotation=None)
    with_flags.__signature__ = shown  # type: ignore[attr-defined]  # inspect looks for it
    with_flags.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    return with_flags


def _flags(group: type[Any]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        if "option" in field.metadata:
            hint = Annotated[hint, field.metadata["option"]]
        if get_origin(hint) is Annotated:
            assert field.default is not dataclasses.MISSING, f"--{field.name} needs a default"
            yield Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                annotation=hint,
                default=field.default,
            )
