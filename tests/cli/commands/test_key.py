"""Typing the cluster key at a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from shardnet.cluster.machine.folders import ClusterKey, load_key
from shardnet.errors import UsageError
from shardnet_cli.commands import key as key_commands


class Terminal(io.StringIO):
    """A person who types these lines."""

    def isatty(self) -> bool:
        return True


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))


def test_a_mistyped_key_may_be_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, path = ClusterKey.make(), tmp_path / "cluster.key"
    type_lines(monkeypatch, key.text()[:-1], key.text())
    key_commands.join("", str(path))
    assert load_key(path) == key
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("cluster key: ") == 2
    assert "27 were given; type it again" in said.err
    assert key.text()[:4] not in said.err


def test_three_mistyped_keys_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.key"
    type_lines(monkeypatch, "a", "b", "c", ClusterKey.make().text())
    with pytest.raises(UsageError):
        key_commands.join("", str(path))
    assert capsys.readouterr().err.endswith("cluster key: ")
    assert not path.exists()


def test_what_is_no_text_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(UsageError, match="standard input is not utf-8 text"):
        key_commands.join("-", str(tmp_path / "cluster.key"))
