"""The folder of finished prompts: damage, limits, several processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardnet.stage.prefixes import prefix_store
from shardnet.stage.prefixes.prefix_store import (
    PrefixStore,
    StageFolder,
    stored_prefixes,
)

PAYLOAD = bytes(range(256)) * 4
SIZE = len(PAYLOAD) + 48
KEYS = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrefixStore:
    monkeypatch.setattr(prefix_store, "KEEP_FREE_BYTES", 0)
    return PrefixStore(tmp_path / "prefixes", 4 * SIZE)


def filled(store: PrefixStore, identity: str = "a", keys: list[bytes] = KEYS) -> StageFolder:
    files = store.of_stage(identity, "/m", "layers 0-3")
    files.begin()
    for key in keys:
        files.write(files.path(key, "kv"), key, memoryview(PAYLOAD))
    return files


def read(files: StageFolder, key: bytes, size: int = len(PAYLOAD)) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if files.read(files.path(key, "kv"), key, memoryview(target)) else None


@pytest.mark.parametrize("at", [0, 4, 8, 20, 40, 48, SIZE - 1])
def test_a_file_with_any_changed_byte_is_refused_and_deleted(store: PrefixStore, at: int) -> None:
    files = filled(store)
    path = files.path(KEYS[0], "kv")
    content = bytearray(path.read_bytes())
    assert len(content) == SIZE
    content[at] ^= 1
    path.write_bytes(content)
    assert read(files, KEYS[0]) is None
    assert not path.exists()
    assert read(files, KEYS[1]) == PAYLOAD


def test_a_file_of_another_size_or_under_another_key_is_refused(store: PrefixStore) -> None:
    files = filled(store)
    assert read(files, KEYS[0], size=len(PAYLOAD) - 1) is None
    assert read(files, KEYS[1], size=len(PAYLOAD) + 1) is None
    os.rename(files.path(KEYS[2], "kv"), files.path(KEYS[0], "kv"))
    assert read(files, KEYS[0]) is None
    os.truncate(files.path(KEYS[3], "kv"), 20)
    assert read(files, KEYS[3]) is None
    assert files.names() == {"about.json"}


def test_what_was_not_used_for_longest_goes_first_and_ends_before_beginnings(
    store: PrefixStore,
) -> None:
    """Two processes share the folder: each sees what the other has written."""
    files = filled(store, keys=KEYS[:2])
    other = PrefixStore(store.folder, store.limit_bytes)
    others = filled(other, "b", KEYS[2:])
    others.touch([others.path(key, "kv") for key in KEYS[2:]])
    files.touch([files.path(key, "kv") for key in KEYS[:2]])
    assert store.make_room(SIZE, keep=()) == SIZE
    assert [read(others, key) for key in KEYS[2:]] == [PAYLOAD, None]
    assert store.make_room(3 * SIZE, keep={files.path(KEYS[1], "kv")}) == 3 * SIZE
    assert files.names() - {"about.json"} == {files.path(KEYS[1], "kv").name}
    assert store.make_room(5 * SIZE, keep={files.path(KEYS[1], "kv")}) == 3 * SIZE
    assert (other.make_room(0, keep=()), other.used_bytes) == (3 * SIZE, SIZE)


def test_a_disk_that_is_nearly_full_is_left_to_others(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store, keys=KEYS[:1])
    monkeypatch.setattr(prefix_store, "KEEP_FREE_BYTES", 1 << 62)
    assert store.make_room(SIZE, keep=()) == 0


def test_prefixes_are_listed_and_deleted_while_a_node_goes_on(store: PrefixStore) -> None:
    files = filled(store)
    [listed] = stored_prefixes(store.folder)
    assert (listed.model, listed.form, listed.size_bytes) == ("/m", "layers 0-3", 4 * SIZE)
    assert listed.remove()
    assert stored_prefixes(store.folder) == []
    assert read(files, KEYS[0]) is None
    with pytest.raises(FileNotFoundError):
        files.write(files.path(KEYS[0], "kv"), KEYS[0], memoryview(PAYLOAD))
    assert read(filled(store), KEYS[0]) == PAYLOAD


def test_nothing_is_deleted_in_vain_beside_what_is_kept(store: PrefixStore) -> None:
    files = filled(store)
    keep = {files.path(key, "kv") for key in KEYS[:2]}
    names = files.names()
    assert store.make_room(3 * SIZE, keep, all_or_none=True) == 0
    assert files.names() == names
    assert store.make_room(2 * SIZE, keep, all_or_none=True) == 2 * SIZE
