"""How a command runs: on which loop, what it writes where, and how it ends.

Knows the exit codes: 0 done, 1 a named failure in one line on standard error, 130 Ctrl-C. Who stops
reading what a command writes, as `| head -1` does, ends it with 1 and without a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TextIO

import typer

from shardnet.errors import ShardnetError, first_error

_ESCAPED: Final = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160))}
"""Control characters: in a node's or a file's name they would move a terminal's cursor and more."""
_IN_TEXTS: Final = _ESCAPED | {ord("\n"): "\n", ord("\t"): "\t"}
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def run_command(main: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine and turn its end into an exit code."""
    from shardnet.transport.loop import run  # asyncio: --help has no use for it

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
        _, other = group.split(ShardnetError)
        if other is not None:
            _, other = other.split(BrokenPipeError)
            if other is not None:
                raise
            _nobody_reads()
        fail(str(first_error(group)))
    except BrokenPipeError:
        _nobody_reads()
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def open_missing_streams() -> None:
    """Put the null device where standard input, output or error were closed before the start.

    Else the next file or socket takes the place of one, and would get what is meant for it; and
    uvloop ends the process when it closes such a one.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def one_line(text: str) -> str:
    """Put on one line what others have written, with control characters escaped as in JSON."""
    return text.replace("\n", " ").translate(_ESCAPED)


def write_out(text: object = "", *, end: str = "\n") -> None:
    """Print on standard output at once; control characters reach no terminal.

    Raises BrokenPipeError when nobody reads it any more, ShardnetError when it cannot be written
    for another reason, as on a full disk.
    """
    if sys.stdout.isatty():
        text = str(text).replace("\r", "").translate(_IN_TEXTS)
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _silence(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise ShardnetError(
            f"standard output cannot be written: {error.strerror}; what came before may be there"
        ) from error


class StreamedText:
    """Text on standard output that comes piece by piece."""

    def __init__(self) -> None:
        self._line_is_open = False

    def write(self, text: str, *, end: str = "") -> None:
        """Print more of it; raises what `write_out` does."""
        write_out(text, end=end)
        if written := text + end:
            self._line_is_open = not written.endswith("\n")

    def break_off(self) -> None:
        """End a line in the middle where standard output is a terminal: something else follows."""
        if self._line_is_open and sys.stdout.isatty():
            self.write("\n")


def say(line: str, *, end: str = "\n") -> None:
    """Print one line on standard error, whatever stands in it.

    Where nobody reads that any more it is dropped: no node and no generation fails because whoever
    started it has gone.
    """
    _print_error(one_line(line) + end)


def say_over(line: str) -> None:
    """Print one line over that on which a terminal at standard error stands."""
    _print_error(f"\r\x1b[K{one_line(line)}")


def fail(message: str) -> NoReturn:
    """End the command with a named failure."""
    say(f"error: {' '.join(message.split())}")
    raise typer.Exit(EXIT_FAILURE)


def _print_error(text: str) -> None:
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _nobody_reads() -> NoReturn:
    _silence(sys.stdout)
    raise typer.Exit(EXIT_FAILURE) from None


def _silence(stream: TextIO) -> None:
    """Have a stream write to the null device, also what it still holds when Python ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
