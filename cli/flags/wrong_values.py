"""What is said of a flag's value that typer cannot take: its source, the value, what would do.

Knows what the library beneath typer tells of a refused value. Must not know any flag.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from shardnet.cluster.machine.folders import config_path


class CommandGroup(TyperGroup):
    """The commands, of which none shows a person how a library words its refusals."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.BadParameter in our words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            told = _first_told(error.__cause__)
            if told is None:
                raise
            raise typer.BadParameter(
                f"{told['input']!r}: give {_wanted(told)}", ctx=error.ctx, param_hint=_source(error)
            ) from error


def _first_told(cause: object) -> dict[str, Any] | None:
    """Return what pydantic tells of the first value it refused, None where it was not asked."""
    errors = getattr(cause, "errors", None)
    told: list[dict[str, Any]] = errors() if callable(errors) else []
    return told[0] if told else None


def _wanted(told: dict[str, Any]) -> str:
    limits = told.get("ctx", {})
    match told["type"].split("_"):
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
            return f"another value ({told['msg']})"


def _source(error: typer.BadParameter) -> str:
    """Say where the value stands: the flag, the variable, or the key and its file."""
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
