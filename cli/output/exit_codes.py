"""How a command runs: its event loop, its output streams and how lines look there, its exit code.

Exit codes: 0 done, 1 a named failure in one line on standard error, 130 Ctrl-C. A command whose
reader goes away, as with `| head -1`, exits with 1 and no line.
"""

from __future__ import annotations

import codecs
import datetime
import errno
import io
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn, TextIO

import typer

from shardnet.errors import ShardnetError, first_error, shortage
from shardnet.files import text_encoding

_ESCAPED: Final = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160))}
"""Control characters: in a node's or a file's name they would move a terminal's cursor and more."""
_IN_TEXTS: Final = _ESCAPED | {ord("\n"): "\n", ord("\t"): "\t"}
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
_ESCAPES_COUNT: Final = 4
"""ENABLE_VIRTUAL_TERMINAL_PROCESSING"""
RESTORE: Final = b"\x1b[?2004l\x1b[?25h"
"""Pasted text comes as if typed, and the cursor shows."""


VARIABLE: Final = "SHARDNET_LOG_FORMAT"
FORMATS: Final = ("text", "json")
_LEVELS: Final = ("warning", "error")


def run_command(main: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine; exit with 1 on ShardnetError, 130 on Ctrl-C."""
    from shardnet.transport.loop import run  # asyncio: --help has no use for it

    with exit_codes():
        run(main)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Report errors of the body in one line; exit with 1 on ShardnetError, 130 on Ctrl-C."""
    try:
        yield
    except ShardnetError as error:
        fail(str(error))
    except BaseExceptionGroup as group:
        _, other = group.split(ShardnetError)
        if other is not None:
            readers, other = other.split(BrokenPipeError)
            if other is not None and _of_machine(first_error(other)) is None:
                raise
            if readers is not None:
                _nobody_reads()
        first = first_error(other or group)
        fail(str(_of_machine(first) or first))
    except OSError as error:
        if _has_no_reader(error):
            _nobody_reads()
        if (short := _of_machine(error)) is None:
            raise
        if error.errno == errno.ENOSPC:
            _silence(sys.stdout)  # a help text of click's
        fail(str(short))
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _of_machine(error: BaseException) -> ShardnetError | None:
    """Return the error for what this machine lacks, None for any other."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ShardnetError(f"there is no room to write: {error}")
    if isinstance(error, FileNotFoundError) and _NO_TEMPORARY in str(error):
        return ShardnetError(
            f"there is no folder for temporary files: {error.strerror}",
            remedy="set TMPDIR to a folder that this user may write and that has room",
        )
    return shortage(error, "this command")


_NO_TEMPORARY: Final = "No usable temporary directory"
"""What Python's tempfile says."""


def _has_no_reader(error: OSError) -> bool:
    """Whether a pipe's reader has ended. Windows' library has no number of its own for that."""
    is_unnamed = sys.platform == "win32" and error.errno == errno.EINVAL and not error.filename
    return isinstance(error, BrokenPipeError) or is_unnamed


def open_missing_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that was closed before the start.

    Else the next file or socket gets that descriptor, and with it what is written to the stream;
    and uvloop ends the process when it closes such a descriptor.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def standard_input() -> TextIO:
    """Return standard input, its encoding by the byte order mark where a pipe begins with one.

    To be called once, before anything is read.
    """
    text = sys.stdin
    if isinstance(text, io.TextIOWrapper) and not text.isatty():
        peek = getattr(text.buffer, "peek", lambda _: b"")
        text.reconfigure(encoding=text_encoding(peek(3), text.encoding), errors=text.errors)
    return text


def no_text(error: UnicodeDecodeError) -> str:
    """Say that standard input holds no text in its encoding, and what to do."""
    remedy = ""
    if sys.platform == "win32":
        remedy = (
            "; write `chcp 65001` first in cmd, and in PowerShell "
            "`$OutputEncoding = [Text.Encoding]::UTF8`"
        )
    return f"standard input is not {error.encoding} text: {error}{remedy}"


def prepare_streams() -> None:
    """Have every text come out, whatever a terminal, pipe or file is set to.

    On Windows pipes and files are UTF-8 with plain line ends, in place of its code page, and the
    console takes colours. Elsewhere characters that the encoding of standard output lacks, as in a
    locale that is not UTF-8, are written as JSON escapes them: else they would end a command amid
    its text. Whoever sets PYTHONIOENCODING has what it names.
    """
    if sys.platform == "win32":
        _prepare_windows()

    def escaped(error: UnicodeError) -> tuple[str, int]:
        import json  # --help has no use for it

        assert isinstance(error, UnicodeEncodeError)
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("json", escaped)
    stdout, unasked = sys.stdout, ("strict", "surrogateescape")  # the latter in the C locale
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors in unasked:
        stdout.reconfigure(errors="json")


def _prepare_windows() -> None:
    for stream, kernels_name in ((sys.stdin, 0), (sys.stdout, -11), (sys.stderr, -12)):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.isatty():  # Python writes UTF-16 there
            if kernels_name:
                _take_escapes(kernels_name)
        elif "PYTHONIOENCODING" not in os.environ:
            strict = "strict" if stream.errors == "surrogateescape" else stream.errors
            stream.reconfigure(encoding="utf-8", errors=strict)
            if kernels_name:
                stream.reconfigure(newline="\n")


def _take_escapes(kernels_name: int) -> None:
    """Have an old console of Windows obey escape sequences: it would print them."""
    import ctypes

    from shardnet.windows import library

    kernel, mode = library("kernel32"), ctypes.c_uint32()
    handle = kernel.GetStdHandle(kernels_name)
    if kernel.GetConsoleMode(handle, ctypes.byref(mode)):
        kernel.SetConsoleMode(handle, mode.value | _ESCAPES_COUNT)


def counted(n: int, noun: str) -> str:
    """Write `1 node`, `2 nodes`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def one_line(text: str) -> str:
    """Replace line ends by spaces and escape control characters as JSON does."""
    return text.replace("\n", " ").translate(_ESCAPED)


def write_out(text: object = "", *, end: str = "\n") -> None:
    """Print on standard output and flush; on a terminal control characters are escaped.

    Raises BrokenPipeError when the reader is gone, ShardnetError when it cannot be written for
    another reason, such as a full disk.
    """
    write_raw((printable(str(text)) if sys.stdout.isatty() else str(text)) + end)


def write_json(value: object) -> None:
    """Print a value as one line of JSON."""
    import msgspec  # --help has no use for it

    write_out(msgspec.json.encode(value).decode())


def picked(told: object, *names: str) -> dict[str, Any]:
    """Return fields of an object by their names, for JSON."""
    return {name: getattr(told, name) for name in names}


def printable(text: str) -> str:
    """Escape control characters but line ends and tabs."""
    return text.replace("\r", "").translate(_IN_TEXTS)


def write_raw(text: str) -> None:
    """Write on standard output and flush, as it is; raises what `write_out` does."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        _silence(sys.stdout)
        if _has_no_reader(error):
            raise BrokenPipeError(*error.args) from error
        raise ShardnetError(
            f"standard output cannot be written: {error.strerror}; earlier output may be there"
        ) from error


class StreamedText:
    """Text on standard output, written piece by piece."""

    def __init__(self) -> None:
        self._line_is_open = False

    def write(self, text: str, *, end: str = "") -> None:
        """Print the next piece; raises what `write_out` does."""
        write_out(text, end=end)
        if written := text + end:
            self._line_is_open = not written.endswith("\n")

    def finish(self) -> None:
        """End the line."""
        self.write("\n")

    def break_off(self) -> None:
        """End an unfinished line on a terminal, so that other output starts on a new one."""
        if self._line_is_open and sys.stdout.isatty():
            self.write("\n")

    def make_way(self) -> None:
        """Let other output come on a line of its own; the text goes on behind it."""
        self.break_off()


def say(line: str, *, end: str = "\n") -> None:
    """Print `line` on standard error, on one line; as JSON where --log-format says so.

    Dropped where the reader of standard error is gone: a node or a generation continues without
    the terminal that started it.
    """
    _print_error(as_json(line) + "\n" if is_json() else one_line(line) + end)


def say_as(line: str, level: str) -> None:
    """Write `line` as JSON on standard error, with this level."""
    _print_error(as_json(line, level) + "\n")


def say_over(line: str) -> None:
    """Overwrite the current line of a terminal on standard error."""
    if not is_json():
        _print_error(f"\r\x1b[K{one_line(line)}")


def fail(message: str) -> NoReturn:
    """Print `error: message` on standard error and exit with 1."""
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
    """Redirect a stream to the null device, including what it flushes when Python exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def restore_at_sigterm() -> None:
    """Make SIGTERM restore echo and cursor before it ends this process.

    Without this a command that is ended at its prompt, or while bars move, leaves a shell in which
    typed text cannot be seen. Does nothing without a terminal.
    """
    if sys.platform == "win32" or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    import termios

    stdin, stderr = sys.stdin.fileno(), sys.stderr.fileno()
    found = termios.tcgetattr(stdin)

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends it wherever it stands
        if os.tcgetpgrp(stdin) == os.getpgrp():  # else the shell has it, and changing it stops us
            termios.tcsetattr(stdin, termios.TCSANOW, found)
            os.write(stderr, RESTORE)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)


def keep_log_format(wanted: str) -> None:
    """Have this process and the nodes that it starts write their lines so; "" changes nothing."""
    if wanted:
        os.environ[VARIABLE] = wanted
    if wanted == "json":
        _take_logging()


def is_json() -> bool:
    """Whether lines are written as JSON."""
    return os.environ.get(VARIABLE) == "json"


def as_json(line: str, level: str = "") -> str:
    """Write a line as one JSON object: time, level, message, and the facts that it carries.

    A level that is not given is what the line begins with, `warning: ` or `error: `, else info.
    """
    import json  # --help has no use for it

    from shardnet.api.server.settings import LogLine

    facts = line.facts if isinstance(line, LogLine) else {}
    begins_with, _, rest = line.partition(": ")
    if not level and begins_with in _LEVELS:
        level, line = begins_with, rest
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    told = {"time": now, "level": level or "info", "message": str(line).strip(), "pid": os.getpid()}
    return json.dumps({**told, **{n: f for n, f in facts.items() if n not in told}}, default=str)


def _take_logging() -> None:
    """Write what libraries and our own modules log in the same way."""
    import logging

    from .exit_codes import say_as

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say_as(record.getMessage(), record.levelname.lower())

    logging.basicConfig(handlers=[Handler()], level=logging.WARNING, force=True)
