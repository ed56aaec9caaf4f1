"""The cluster key: written and read by people, kept for its owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.machine.folders import (
    KEY_BYTES,
    ClusterKey,
    default_key_path,
    load_key,
    store_key,
)
from shardnet.errors import ConfigurationError, UsageError

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(ClusterKey)
PLACES = st.integers(0, 27)


def refusal(text: str) -> str:
    """Why `text` is no key; the reason does not show it."""
    with pytest.raises(UsageError) as refused:
        ClusterKey.parse(text)
    reason = str(refused.value)
    assert not any(group in reason for group in text.split("-") if len(group) > 2)
    return reason


# --- as people write it


@given(KEYS)
def test_a_key_is_read_as_it_was_written(key: ClusterKey) -> None:
    text = key.text()
    assert [len(group) for group in text.split("-")] == [4] * 7
    assert set(text) <= {*ALPHABET, "-"}
    assert ClusterKey.parse(text) == key


@given(KEYS, st.sampled_from([" ", "", "  -  ", "\t"]))
def test_case_groups_and_alike_letters_do_not_matter(key: ClusterKey, between: str) -> None:
    text = key.text().lower().replace("-", between).replace("0", "o").replace("1", "l")
    assert ClusterKey.parse(f" {text}\n") == key
    assert ClusterKey.parse(key.text().replace("1", "I")) == key


@given(KEYS, PLACES, st.sampled_from(ALPHABET))
def test_any_wrong_character_is_found(key: ClusterKey, place: int, other: str) -> None:
    characters = list(key.text().replace("-", ""))
    if characters[place] != other:
        characters[place] = other
        assert "the cluster key is mistyped" in refusal("".join(characters))


@given(KEYS, PLACES, PLACES)
def test_any_two_exchanged_characters_are_found(key: ClusterKey, one: int, other: int) -> None:
    characters = list(key.text().replace("-", ""))
    if characters[one] != characters[other]:
        characters[one], characters[other] = characters[other], characters[one]
        assert "the cluster key is mistyped" in refusal("".join(characters))


@given(KEYS, PLACES)
def test_a_missing_or_doubled_character_is_counted(key: ClusterKey, place: int) -> None:
    characters = key.text().replace("-", "")
    assert "27 were given" in refusal(characters[:place] + characters[place + 1 :])
    assert "29 were given" in refusal(characters[:place] + characters[place] + characters[place:])


def test_what_is_in_no_key_is_named_by_its_place() -> None:
    text = ClusterKey(bytes(KEY_BYTES)).text()
    assert "character 6 of the cluster key, in group 2" in refusal(f"{text[:6]}!{text[7:]}")
    assert "character 1 of the cluster key, in group 1" in refusal(f"U{text[1:]}")
    assert "0 were given" in refusal("")


@given(st.text(max_size=60))
def test_whatever_is_typed_is_a_key_or_refused(text: str) -> None:
    try:
        key = ClusterKey.parse(text)
    except UsageError:
        return
    assert ClusterKey.parse(key.text()) == key


def test_the_text_of_a_key_never_changes() -> None:
    assert ClusterKey(bytes(range(16))).text() == "000G-40R4-0M30-E209-185G-R38E-1ZBQ"
    assert "mistyped" in refusal("0000-0000-0000-0000-0000-0000-0000")


def test_new_keys_differ_and_hide() -> None:
    key, other = ClusterKey.make(), ClusterKey.make()
    assert key != other
    assert len(key.secret) == KEY_BYTES
    assert str(key) == repr(key) == f"{key}" == "ClusterKey()"


# --- as it is kept


def test_a_stored_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "cluster.key"
    before = os.umask(0)
    try:
        store_key(key := ClusterKey.make(), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_key(path) == key
    assert [file.name for file in path.parent.iterdir()] == ["cluster.key"]


def test_no_file_is_no_key(tmp_path: Path) -> None:
    assert load_key(tmp_path / "cluster.key") is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666, 0o610])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cluster.key"
    store_key(key := ClusterKey.make(), path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"run `chmod 600 {path}`") as refused:
        load_key(path)
    assert key.text()[:4] not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe" * 14, b"x" * 100_000, b"0000-" * 7])
def test_a_damaged_key_file_is_named_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"{path} is damaged: ") as refused:
        load_key(path)
    assert len(str(refused.value)) < len(str(path)) + 150


def test_a_folder_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"the key file {tmp_path} cannot be read: Is a"):
        load_key(tmp_path)


def test_another_clusters_key_is_replaced_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    first, second = ClusterKey.make(), ClusterKey.make()
    store_key(first, path)
    store_key(first, path)
    with pytest.raises(ConfigurationError, match=r"holds the key of another cluster.* --replace"):
        store_key(second, path)
    assert load_key(path) == first
    store_key(second, path, replace=True)
    assert load_key(path) == second


def test_replacing_mends_what_load_refuses(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("rubbish")
    path.chmod(0o644)
    store_key(key := ClusterKey.make(), path, replace=True)
    assert load_key(path) == key


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "cluster.key"
    with pytest.raises(ConfigurationError, match=f"{path} cannot be"):
        store_key(ClusterKey.make(), path)


def test_the_default_place_is_beside_the_configuration() -> None:
    assert default_key_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/shardnet/cluster.key")
    assert default_key_path({}) == Path.home() / ".config/shardnet/cluster.key"
