"""Groups of flags: a frozen dataclass whose fields are flags, taken by a command as one argument.

Knows how typer reads a command: parameters, their types and defaults. Must not know any flag.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Annotated, Any, get_origin, get_type_hints


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of `command` by the flags among its fields, for typer.

    A field is a flag if its type is Annotated; the others keep their defaults, so a subclass
    removes a flag by giving the field its plain type. The command receives the dataclass.
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
        if get_origin(hints[field.name]) is Annotated:
            assert field.default is not dataclasses.MISSING, f"--{field.name} needs a default"
            yield Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                annotation=hints[field.name],
                default=field.default,
            )
