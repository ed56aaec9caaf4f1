"""`shardnet connect`: how a program is set up to ask this server."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from shardnet.api.programs import (
    DEFAULT_CONTEXT,
    KEY_PLACEHOLDER,
    PROGRAMS,
    Program,
    Served,
    server_address,
)
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.checkpoint.model_names import nearest_name
from shardnet.errors import UsageError, shown

from ..flags.options import option
from ..output.exit_codes import say, write_out

DEFAULT_URL: Final = "http://127.0.0.1:8000"


def connect(
    client: Annotated[
        str,
        typer.Argument(
            metavar="CLIENT", help=f"One of {', '.join(PROGRAMS)}. Without it they are listed."
        ),
    ] = "",
    *,
    url: Annotated[
        str, option("--url URL", "Where the server is, as the program sees it.")
    ] = DEFAULT_URL,
    api_key: Annotated[
        str, option("--api-key KEY", "The key that the program is to send.")
    ] = KEY_PLACEHOLDER,
    model: Annotated[
        str, option("--model NAME", "The model, by a name of /v1/models.")
    ] = DEFAULT_MODEL_NAME,
    context: Annotated[
        int, option("--context N", "The context of the ring, in tokens.", min=1)
    ] = DEFAULT_CONTEXT,
) -> None:
    """Print the settings with which a program asks `shardnet serve`; nothing is written.

    Where they belong is said on standard error.
    """
    if not client:
        width = max(map(len, PROGRAMS))
        for name, program in PROGRAMS.items():
            write_out(f"{name:{width}}  {program.where}")
        return
    program = _find(client)
    served = Served(url=server_address(url), key=api_key, model=model, context=context)
    say(f"for {program.where}:")
    write_out(program.write(served))
    if program.note:
        say(program.note)


def _find(client: str) -> Program:
    """Return a program by its name. Raises UsageError, which lists all."""
    if client in PROGRAMS:
        return PROGRAMS[client]
    near = nearest_name(client, PROGRAMS)
    raise UsageError(
        f"there is no client {shown(client)}" + (f", did you mean '{near}'?" if near else ""),
        remedy=f"give one of {', '.join(PROGRAMS)}",
    )
