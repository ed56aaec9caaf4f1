"""Texts as editors and shells on Windows write them: with a byte order mark, also in UTF-16."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import typer
from typer.core import TyperGroup

from shardnet.api.batches.files import read_lines
from shardnet.api.requests import Prompt
from shardnet.cluster.machine.folders import ClusterKey, load_key
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.chat.chat_template import _read_text
from shardnet_cli.commands import key as key_commands
from shardnet_cli.commands.bench import _pieces
from shardnet_cli.conversation.conversation import load
from shardnet_cli.flags.config import read_config
from shardnet_cli.flags.http_options import HttpOptions
from shardnet_cli.flags.sampling_options import SamplingOptions, read_prompts
from shardnet_cli.main import app
from shardnet_cli.output.exit_codes import standard_input

MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}
KEY = ClusterKey.make()


def config(path: Path) -> object:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return read_config(path, command)["serve"]["threads"]


def api_key(path: Path) -> object:
    return HttpOptions(api_key_file=str(path)).listening("::", 0).settings.keys.find("one").name  # type: ignore[union-attr]


SAID = '{"messages": [{"role": "user", "content": "é"}]}'
READERS = MappingProxyType[str, tuple[str, Callable[[Path], object], object]](
    {
        "config.toml": ("threads = 3\r\n", config, 3),
        "keys of the server": ("ann:one\r\n", api_key, "ann"),
        "key of the cluster": (KEY.text(), load_key, KEY),
        "conversation": (SAID, load, [{"role": "user", "content": "é"}]),
        "prompts": (
            "é\r\nb\r\n",
            lambda path: read_prompts(str(path), SamplingParams())[1],
            [Prompt("é"), Prompt("b")],
        ),
        "schema": (
            "{}\r\n",
            lambda path: SamplingOptions(json_schema=str(path)).generation()["constraint"].text,  # type: ignore[union-attr]
            "{}\n",
        ),
        "text for its perplexity": ("é\r\nb", lambda path: _pieces(str(path), 9), ["é\nb"]),
        "chat template": ("{{ é }}", _read_text, "{{ é }}"),
    }
)


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize("name", READERS)
def test_the_mark_of_a_file_is_no_part_of_its_text(
    name: str, encoding: str, tmp_path: Path
) -> None:
    text, read, expected = READERS[name]
    path = tmp_path / "file"
    path.write_bytes(MARKED[encoding] + text.encode(encoding))
    path.chmod(0o600)
    assert read(path) == expected


@pytest.mark.parametrize("encoding", MARKED)
def test_the_mark_of_a_pipe_is_no_part_of_what_comes(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe(text: str) -> None:
        raw = io.BytesIO(MARKED[encoding] + text.encode(encoding))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(raw), "utf-8"))  # type: ignore[type-var]

    pipe("é\r\nb\r\n")
    text = standard_input()
    assert (text.readline(), text.read()) == ("é\n", "b\n")
    pipe(f"{KEY.text()}\r\n")
    key_commands.join("-", str(tmp_path / "cluster.key"))
    assert load_key(tmp_path / "cluster.key") == KEY


def test_the_mark_of_a_batch_is_no_part_of_its_first_line() -> None:
    """RFC 8259 allows no other encoding of JSON between programs, and lets a mark be ignored."""
    line = '{"custom_id": "é", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    [read] = read_lines(codecs.BOM_UTF8 + line.encode(), "/v1/completions")
    assert read.custom_id == "é"
