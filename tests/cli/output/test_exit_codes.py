"""Lines on standard error as JSON, and characters that standard output cannot write."""

from __future__ import annotations

import errno
import io
import json
import logging

import pytest
import typer

from shardnet.api.server.settings import LogLine
from shardnet_cli.output import exit_codes
from shardnet_cli.output.exit_codes import escape_unwritable, say, say_over, write_out


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
    escape_unwritable()
    text = "é → \U0001f600 \udce9"
    write_out(json.dumps(text, ensure_ascii=False))
    assert written.getvalue().startswith(b'"\xe9 \\u2192 ')
    assert json.loads(written.getvalue().decode("cp1252")) == text


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
