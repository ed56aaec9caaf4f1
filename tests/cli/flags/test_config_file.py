"""The configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from shardnet.checkpoint.program_stores import named_folders
from shardnet.cluster.machine.folders import config_path
from shardnet.errors import ConfigurationError
from shardnet_cli.flags.config import read_config
from shardnet_cli.flags.options import keep_model_folders, parse_size
from shardnet_cli.main import app


def group() -> TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_no_file_is_no_configuration(tmp_path: Path) -> None:
    assert read_config(tmp_path / "none.toml", group()) == {}


def test_a_top_key_holds_for_every_command_and_a_table_for_its_own(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'threads = 3\nport = 9\n[generate]\nthreads = 4\nstop = ["x"]\n'
        '[serve]\nalias = ["gpt-4o=org/Tiny", "*=org/Big"]\napi_key = "one"\n',
    )
    defaults = read_config(path, group())
    assert defaults["node"] == {"threads": 3, "port": 9}
    assert defaults["serve"]["alias"] == ["gpt-4o=org/Tiny", "*=org/Big"]
    assert defaults["serve"]["api_key"] == ["one"]  # of several that there may be
    assert defaults["plan"] == {"threads": 3}
    assert defaults["generate"] == {"threads": 4, "stop": ["x"]}


def test_a_key_holds_for_the_commands_of_a_group_too(tmp_path: Path) -> None:
    defaults = read_config(written(tmp_path, 'key_file = "k"\n[key]\nreplace = true\n'), group())
    assert defaults["node"] == {"key_file": "k"}
    assert defaults["key"] == {
        "new": {"key_file": "k", "replace": True},
        "join": {"key_file": "k", "replace": True},
        "show": {"key_file": "k"},
        "rotate": {"key_file": "k"},
        "authority": {"key_file": "k"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_token = 3\n", "unknown key 'max_token'; did you mean 'max_tokens'"),
        ("[key]\nport = 3\n", r"\[key\]: unknown key 'port'"),
        ("[generate]\nport = 3\n", r"\[generate\]: unknown key 'port'"),
        ("[nod]\nport = 3\n", "unknown key 'nod'"),
        ("generate = 3\n", "'generate' should be a table"),
        ("port = \n", "config.toml: "),
        ('peers = "a:1"\n', "peers should be a list of texts, not 'a:1'"),
        ("[generate]\npeers = [1]\n", r"\[generate\]: peers should be a list of texts"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_config(written(tmp_path, text), group())


def test_folders_of_models_go_to_the_environment_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = read_config(written(tmp_path, 'model_folders = ["/a", "~/b"]\n'), group())
    expected = {"model_folder": ["/a", "~/b"]}
    assert {name for name, found in defaults.items() if found == expected} == {
        *("node", "models", "plan", "generate", "chat", "serve", "bench", "inspect")
    }
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHARDNET_MODEL_FOLDERS", "/c")
    keep_model_folders(None)
    assert named_folders() == [Path("/c")]
    keep_model_folders([Path("/a"), Path("~/b")])
    assert named_folders() == [Path("/a"), tmp_path / "b"]


def test_the_place_comes_from_the_environment() -> None:
    assert config_path({"SHARDNET_CONFIG": "/x/y.toml"}) == Path("/x/y.toml")
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/shardnet/config.toml")
    assert config_path({}) == Path.home() / ".config/shardnet/config.toml"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8GiB", 8 * 2**30), ("1.5 gib", 3 * 2**29), ("500MB", 500_000_000), ("77", 77)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text, "--memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-3GiB", "8 gigs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a size"):
        parse_size(text, "--memory")
