"""The file of a household: read, and refused with what is wrong where."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardnet.api.switching.household_file import OPTIONS, read_household
from shardnet.errors import ConfigurationError
from shardnet.wire.messages.household import MAX_HOUSEHOLD
from shardnet.wire.messages.plans import ModelChoice

FILE = """
[models.coder]
model = "org/large"
context = 65536
kv-dtype = "int8"
priority = 10
keep = true
parallel = 2
nodes = ["bert", "cleo"]

[models."for titles"]
model = "~/small"
idle-unload = "1h30m"
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "household.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_what_a_file_says_is_what_nodes_are_sent(tmp_path: Path) -> None:
    coder, titles = read_household(write(tmp_path, FILE))
    assert coder.choice == ModelChoice(model="org/large", context=65536, kv_dtype="int8")
    assert (coder.name, coder.priority, coder.kept, coder.parallel) == ("coder", 10, True, 2)
    assert (coder.only, coder.idle_s) == (["bert", "cleo"], None)
    assert (titles.name, titles.idle_s) == ("for titles", 5400.0)
    assert titles.choice.model == str(Path("~/small").expanduser())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models = 3", r"has no table \[models.NAME\]"),
        ("", r"has no table \[models.NAME\]"),
        ("[models]\n", r"has no table \[models.NAME\]"),
        ("[models.a]\n", "models.a: .*model"),
        ('[models.a]\nmodel = "m"\ncolour = 3\n', "models.a: .*colour"),
        ('[models.a]\nmodel = "m"\npriority = "high"\n', "models.a: .*priority"),
        ('[models.a]\nmodel = "m"\npriority = 1000\n', "models.a: .*priority"),
        ('[models.a]\nmodel = "m"\nidle-unload = "soon"\n', "models.a: 'soon' is no duration"),
        ('[models.a]\nmodel = "m"\nquant = "int3"\n', "models.a: .*int3"),
        ('[models.a]\nmodel = "m"\n[more]\n', r"unknown \['more'\]"),
        ("[models", "is no TOML"),
        (b"\xff\xfe", "is no TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, why: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError, match=why) as caught:
        read_household(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_household(tmp_path / "none.toml")
    many = "".join(f'[models.m{n}]\nmodel = "m"\n' for n in range(MAX_HOUSEHOLD + 1))
    with pytest.raises(ConfigurationError, match=f"{MAX_HOUSEHOLD} at most"):
        read_household(write(tmp_path, many))


def test_options_are_those_of_a_ring() -> None:
    assert {*OPTIONS} <= {*ModelChoice.__struct_fields__}
