"""Replicas on disk: found, in use, deleted, the oldest first."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from shardnet.cluster.store import model_cache
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import BusyError, CapacityError, CheckpointError, UsageError

MIB = 1 << 20
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def put(cache: ModelCache, model_id: str, n_bytes: int = MIB, used_s: int = 0) -> Path:
    with cache.staging() as staged:
        (staged / "model.safetensors").write_bytes(os.urandom(n_bytes))
        with (staged / "model.safetensors").open("r+b") as file:
            file.truncate(n_bytes * 10)
        folder = cache.install(staged, model_id)
    cache.use(model_id).close()
    os.utime(cache.folder / "models" / f"{model_id}.lock", (used_s, used_s))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def test_what_is_installed_is_found_and_listed_with_its_bytes_on_disk(cache: ModelCache) -> None:
    assert cache.find(A) is None
    assert cache.models() == []
    folder = put(cache, A, used_s=5)
    put(cache, B, used_s=7)
    assert cache.find(A) == folder
    cache.remember("/models/a", A)
    second, first = cache.models()[::-1][0], cache.models()[0]
    assert (first.model_id, first.name, first.used_s) == (B, "", 7)
    assert (second.model_id, second.name, second.in_use) == (A, "/models/a", False)
    assert MIB <= second.size_bytes < 2 * MIB
    assert second.whole_bytes == 10 * MIB
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["../x", "", "A" * 64, "a" * 63, "/etc"])
def test_only_ids_are_looked_for(cache: ModelCache, name: str) -> None:
    (cache.folder / "models" / "x").mkdir(parents=True)
    assert cache.find(name) is None


def test_installing_what_is_there_keeps_what_is_there(cache: ModelCache) -> None:
    folder = put(cache, A)
    (folder / "mark").touch()
    assert put(cache, A) == folder
    assert (folder / "mark").exists()


def test_a_path_means_what_it_was_last_said_to_mean(cache: ModelCache) -> None:
    assert cache.recall("/m") is None
    cache.remember("/m", A)
    cache.remember("/n", B)
    assert (cache.recall("/m"), cache.recall("/n")) == (A, B)
    cache.remember("/m", C)
    assert ModelCache(cache.folder).recall("/m") == C
    for file in (cache.folder / "paths").iterdir():
        file.write_text("{")
    assert cache.recall("/m") is None


def test_what_is_in_use_is_not_deleted(cache: ModelCache) -> None:
    folder = put(cache, A)
    first, second = cache.use(A), cache.use(A)
    assert cache.models()[0].in_use
    first.close()
    with pytest.raises(BusyError, match="in use by a node"):
        cache.remove(A)
    assert folder.exists()
    second.close()
    assert cache.remove(A) >= MIB
    assert not folder.exists()
    with pytest.raises(UsageError, match="no model aaaaaaaaaaaa"):
        cache.remove(A)


def test_room_is_made_by_deleting_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, limit_bytes=4 * MIB)
    for model_id, used_s in ((A, 3), (B, 1), (C, 2)):
        put(cache, model_id, used_s=used_s)
    use = cache.use(B)
    os.utime(tmp_path / "models" / f"{B}.lock", (1, 1))
    assert cache.make_room(MIB // 2, keep=A) == []
    assert cache.room_bytes(keep=A) >= 3 * MIB // 2
    deleted = cache.make_room(3 * MIB // 2, keep=A)
    assert [model.model_id for model in deleted] == [C], "B is older, and in use"
    with pytest.raises(CapacityError, match="raise --cache-limit"):
        cache.make_room(3 * MIB, keep=A)
    assert cache.find(A)
    assert cache.find(B)
    use.close()


def test_a_model_is_used_until_its_use_ends(tmp_path: Path) -> None:
    """One that a node had for weeks is not the first to go when it is freed."""
    cache = ModelCache(tmp_path, limit_bytes=3 * MIB)
    for model_id in (A, B):
        put(cache, model_id, used_s=2)
    use = cache.use(A)
    os.utime(tmp_path / "models" / f"{A}.lock", (1, 1))
    use.close()
    use.close()
    assert [model.model_id for model in cache.make_room(2 * MIB - MIB // 2, keep=C)] == [B]


def test_nothing_is_deleted_for_what_does_not_fit_anyway(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, limit_bytes=4 * MIB)
    for model_id in (A, B):
        put(cache, model_id)
    for n_bytes in (4 * MIB, 1 << 60):
        with pytest.raises(CapacityError, match="above the limit of"):
            cache.make_room(n_bytes, keep=B)
    assert cache.find(A)
    assert [model.model_id for model in cache.make_room(2 * MIB + MIB // 2, keep=B)] == [A]


def test_what_another_process_deletes_meanwhile_is_gone(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, A)
    put(cache, B)
    real = model_cache._size_bytes

    def size_bytes(folder: Path) -> int:
        if folder.name == A:
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(model_cache, "_size_bytes", size_bytes)
    assert [model.model_id for model in cache.models()] == [B]
    put(cache, A)
    with pytest.raises(UsageError, match="no model aaaaaaaaaaaa"):
        cache.remove(A)


def test_what_a_killed_process_left_is_swept_away(cache: ModelCache) -> None:
    put(cache, A)
    old, new = (cache.folder / "models" / name for name in (".new-old", ".new-just-now"))
    for folder in (old, new):
        (folder / "x").mkdir(parents=True)
    os.utime(old, (1, 1))
    cache.make_room(1, keep=A)
    assert not old.exists()
    assert new.exists()


def test_more_than_the_disk_has_is_refused_with_what_to_do(cache: ModelCache) -> None:
    put(cache, A)
    with pytest.raises(CapacityError, match="cache"):
        cache.make_room(1 << 60, keep=A)
    with pytest.raises(CapacityError, match="are free; free room there"):
        ModelCache(cache.folder, limit_bytes=1 << 62).make_room(1 << 60, keep=A)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = ModelCache(tmp_path / "file")
    with pytest.raises(CheckpointError, match="SHARDNET_CACHE_DIR"), cache.staging():
        pass
    with pytest.raises(CheckpointError, match="SHARDNET_CACHE_DIR"):
        cache.use(A)
    cache.remember("/m", A)
    assert cache.recall("/m") is None


@pytest.mark.parametrize("name", ["../x", "", "/etc/evil", "A" * 64, "a" * 63])
def test_what_is_no_id_makes_no_file_and_no_folder(cache: ModelCache, name: str) -> None:
    before = [*cache.folder.parent.rglob("*")]
    for entry in (
        lambda: cache.use(name),
        lambda: cache.remember("/m", name),
        lambda: cache.install(cache.folder, name),
        lambda: cache.remove(name),
    ):
        with pytest.raises(UsageError, match=r"no model"):
            entry()
    assert [*cache.folder.parent.rglob("*")] == before


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such locks")
def test_a_lock_that_is_never_released_is_named(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    put(cache, A)
    monkeypatch.setattr(model_cache, "LOCK_S", 0.01)
    lock = cache.folder / "models" / f"{A}.lock"
    with lock.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match=rf"{A}\.lock: another process has held this lock"):
            cache.use(A)
    cache.use(A).close()


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such links")
def test_links_that_somebody_has_laid_are_refused(cache: ModelCache, tmp_path: Path) -> None:
    folder = put(cache, A)
    lock = cache.folder / "models" / f"{A}.lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="it is a link"):
        cache.use(A)
    assert not (tmp_path / "elsewhere").exists()
    folder.rename(tmp_path / "evil")
    folder.symlink_to(tmp_path / "evil")
    with pytest.raises(CheckpointError, match="it is a link"):
        cache.find(A)
    cache.remember("/m", A)
    [hint] = (cache.folder / "paths").iterdir()
    hint.rename(tmp_path / "hint")
    hint.symlink_to(tmp_path / "hint")
    assert cache.recall("/m") is None
