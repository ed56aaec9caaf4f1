"""Lines on standard error as JSON, and characters that standard output cannot write."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import logging
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from shardnet import windows
from shardnet.api.server.settings import LogLine
from shardnet_cli.output import exit_codes
from shardnet_cli.output.exit_codes import (
    prepare_streams,
    say,
    say_over,
    standard_input,
    write_out,
)


def test_lines_are_objects_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(exit_codes.VARIABLE, "text")  # what the format leaves there is taken back
    logger = logging.getLogger("shardnet.test")
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        say("first")
        exit_codes.keep_log_format("json")
        say("warning: the disk\nis full")
        say(LogLine.of("GET / 200", status=200, message="not this one"))
        logger.error("a bug in %s", "here")
        say_over("a bar that would be overwritten")
    finally:
        root.handlers[:], root.level = before
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "first"
    told = [json.loads(line) for line in lines]
    assert [(entry["level"], entry["message"]) for entry in told] == [
        ("warning", "the disk\nis full"),
        ("info", "GET / 200"),
        ("error", "a bug in here"),
    ]
    assert told[1]["status"] == 200
    assert all(entry["time"].endswith("+00:00") for entry in told)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_the_encoding_lacks_is_escaped_as_in_json(
    monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    """Also in the C locale, where Python writes bytes of names that are no text as they are."""
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="cp1252", errors=errors)
    monkeypatch.setattr("sys.stdout", stdout)
    prepare_streams()
    text = "é → \U0001f600 \udce9"
    write_out(json.dumps(text, ensure_ascii=False))
    assert written.getvalue().startswith(b'"\xe9 \\u2192 ')
    assert json.loads(written.getvalue().decode("cp1252")) == text


class Stream(io.TextIOWrapper):
    """One of Windows' streams, as Python opens it: with the code page, or at a console."""

    def __init__(self, content: bytes = b"", errors: str = "strict", *, tty: bool = False) -> None:
        self.raw_bytes = io.BytesIO(content)
        self.tty = tty
        super().__init__(self.raw_bytes, encoding="cp1252", errors=errors, newline="\r\n")

    def isatty(self) -> bool:
        return self.tty


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")


@pytest.mark.usefixtures("on_windows")
def test_pipes_are_utf8_with_plain_line_ends_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin, stdout = Stream("é 世\r\n".encode()), Stream(errors="surrogateescape")
    stderr = Stream(errors="backslashreplace")
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        monkeypatch.setattr(sys, name, stream)
    prepare_streams()
    text = "é → 世 \U0001f600 ━\n"
    write_out(text, end="")
    say(text.strip())
    assert stdout.raw_bytes.getvalue() == stderr.raw_bytes.getvalue() == text.encode()
    assert standard_input().read().split() == ["é", "世"]
    write_out(json.dumps("\udce9", ensure_ascii=False))
    assert stdout.raw_bytes.getvalue().endswith(b'"\\udce9"\n')


@pytest.mark.usefixtures("on_windows")
def test_an_old_console_of_windows_is_told_to_obey_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_modes = []

    class Kernel:
        def __init__(self) -> None:
            self.GetStdHandle = Mock(side_effect=lambda name: ctypes.c_void_p(100 - name))

        def GetConsoleMode(self, handle: ctypes.c_void_p, mode: Any) -> int:
            mode._obj.value = 3
            return int(handle.value == 112)  # standard error is no console

        def SetConsoleMode(self, handle: ctypes.c_void_p, mode: int) -> int:
            set_modes.append((handle.value, mode))
            return 1

    monkeypatch.setattr(windows, "library", lambda name: Kernel())
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(tty=True))
    prepare_streams()
    assert set_modes == [(112, 3 | 4)]
    assert sys.stdout.encoding == "cp1252", "Python knows consoles"


@pytest.mark.usefixtures("on_windows")
def test_a_reader_that_has_gone_ends_a_command_silently_on_windows(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The C library there gives it the number of a wrong argument."""
    with pytest.raises(typer.Exit) as ended, exit_codes.exit_codes():
        raise OSError(errno.EINVAL, "Invalid argument")
    assert (ended.value.exit_code, capfd.readouterr().err) == (1, "")
    with pytest.raises(OSError, match="no file"), exit_codes.exit_codes():
        raise OSError(errno.EINVAL, "Invalid argument", "no file")


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "may open no more files"),
        (OSError(errno.EIO, "Input/output error"), "the disk fails"),
        (OSError(errno.ENOSPC, "No space left on device"), "there is no room to write"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []"), "TMPDIR"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(
    error: OSError, words: str, in_group: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, exit_codes.exit_codes():
        raise ExceptionGroup("tasks", [error]) if in_group else error
    assert ended.value.exit_code == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_bug_is_no_shortage() -> None:
    with pytest.raises(FileNotFoundError), exit_codes.exit_codes():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
