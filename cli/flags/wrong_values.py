"""Error texts for flag values that typer refuses: the source, the value, and what is accepted.

Knows how pydantic, beneath typer, describes a refused value. Must not know any flag.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from shardnet.cluster.machine.folders import config_path


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
