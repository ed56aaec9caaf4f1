"""All models of a machine, from every store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.hostile.small_files import GOOD
from support.models.model_stores import put_in_ollama

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import HeldModel, find_models
from shardnet.cluster.store.model_cache import CachedModel, ModelCache

MODEL_ID = "ab" * 32
COMMIT = "c" * 40


class Replicas(ModelCache):
    """A cache with parts of three models, one of which has no name."""

    def models(self) -> list[CachedModel]:
        return [
            CachedModel(
                model_id=MODEL_ID, name=name, size_bytes=3, whole_bytes=9, used_s=0, in_use=False
            )
            for name in ("lab/half", "", "ollama:tiny:latest")
        ]

    def find(self, model_id: str) -> Path | None:
        return self.folder / model_id


def test_each_store_is_looked_into_and_each_name_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica does not hide the whole model of its name."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    folders = (str(tmp_path / "own"), str(tmp_path / "gone"))
    monkeypatch.setenv("SHARDNET_MODEL_FOLDERS", os.pathsep.join(folders))
    content = GOOD["gguf"]()["model.gguf"]
    hub = tmp_path / ".cache" / "huggingface" / "hub" / "models--lab--owl"
    studio = tmp_path / ".lmstudio" / "models" / "lab" / "jay"
    for folder in (hub / "snapshots" / COMMIT, hub / "refs", studio, tmp_path / "own"):
        folder.mkdir(parents=True)
    (hub / "refs" / "main").write_text(COMMIT)
    for folder in (hub / "snapshots" / COMMIT, studio, tmp_path / "own"):
        (folder / "x-Q8_0.gguf").write_bytes(content)
    blob = put_in_ollama(tmp_path / "ollama", tmp_path / "own" / "x-Q8_0.gguf", "tiny")

    async def found() -> list[HeldModel]:
        disk = DiskJobs("test")
        try:
            return await find_models(disk, Replicas(tmp_path / "cache"))
        finally:
            disk.close()

    held = {model.found.name: model for model in asyncio.run(found())}
    gone = held.pop(folders[1])
    assert gone.found.failure == "No such file or directory"
    assert list(held) == [
        DEFAULT_MODEL_NAME,
        "lab/owl:Q8_0",
        "ollama:tiny:latest",
        "lmstudio:lab/jay/x-Q8_0.gguf",
        str(tmp_path / "own" / "x-Q8_0.gguf"),
        "lab/half",
    ]
    assert not any(model.found.failure for model in held.values())
    assert [model.found.modified_s > 0 for model in held.values()] == [True] * 5 + [False]
    assert held["ollama:tiny:latest"].found.path == blob
    half = held["lab/half"]
    assert (half.held_bytes, half.whole_bytes) == (3, 9)
    assert half.found.path == tmp_path / "cache" / MODEL_ID
