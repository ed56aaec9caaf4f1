"""How a command runs: on which loop, and how it ends.

Knows the exit codes: 0 done, 1 a named failure in one line on standard error, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from shardnet.errors import ShardnetError, first_error
from shardnet.transport.loop import run

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def run_command(main: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine and turn its end into an exit code."""
    with exit_codes():
        run(main)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the end of a command into an exit code."""
    try:
        yield
    except ShardnetError as error:
        fail(str(error))
    except BaseExceptionGroup as group:
        named, other = group.split(ShardnetError)
        if named is None or other is not None:
            raise
        fail(str(first_error(named)))
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; say nothing more
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def say(line: str) -> None:
    """Print one line on standard error."""
    print(line, file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """End the command with a named failure."""
    say(f"error: {' '.join(message.split())}")
    raise typer.Exit(EXIT_FAILURE)
