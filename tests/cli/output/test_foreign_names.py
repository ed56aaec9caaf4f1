"""What others have named reaches no terminal as anything but text."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from shardnet.wire.messages.membership import NodeInfo
from shardnet_cli.commands.nodes import node_lines
from shardnet_cli.main import app
from shardnet_cli.output.exit_codes import StreamedText, say, write_out

NAME = "\x1b[31m[/b]\x9b2J\nerror: forged"
SHOWN = r"\u001b[31m[/b]\u009b2J error: forged"


def info(name: str) -> NodeInfo:
    return NodeInfo(
        node="a" * 32,
        name=name,
        address="127.0.0.1:1",
        version="1",
        device="cpu",
        memory_bytes=0,
        memory_free_bytes=0,
        cores=1,
        threads=1,
        dtypes=[],
        host_id="h",
    )


def test_a_table_shows_a_name_as_it_is_written() -> None:
    shown = "\n".join(node_lines([info(NAME)], 80))
    assert SHOWN in shown
    assert "\x1b" not in shown


def test_a_line_on_standard_error_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"asking {NAME}")
    assert capsys.readouterr().err == f"asking {SHOWN}\n"


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a\n\\u001b[2J\tb"), (False, None)])
def test_text_is_changed_for_a_terminal_only(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    shown: str | None,
) -> None:
    text = "a\r\n\x1b[2J\tb"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    StreamedText().write(text)
    write_out(text)
    expected = shown or text
    assert capsys.readouterr().out == f"{expected}{expected}\n"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "n" * 65])
def test_a_node_takes_no_name_that_cannot_be_shown(name: str) -> None:
    outcome = CliRunner().invoke(app, ["node", "--name", name])
    assert outcome.exit_code == 2
    assert "give at most 64 characters on one line" in outcome.stderr
