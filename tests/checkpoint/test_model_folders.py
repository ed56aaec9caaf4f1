"""LM Studio's folders, and those that people name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardnet.checkpoint import program_stores
from shardnet.checkpoint.program_stores import (
    find_in_lm_studio,
    lm_studio_models,
    models_below,
    named_folders,
)


def fill(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"GGUF")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(
        tmp_path / "models",
        "lab/Crow-GGUF/Crow-Q4_K_M.gguf",
        "lab/Crow-GGUF/Crow-Q8_0.gguf",
        "lab/Crow-GGUF/mmproj-Crow-F16.gguf",
        "lab/Owl-GGUF/owl-00001-of-00002.gguf",
        "lab/Owl-GGUF/owl-00002-of-00002.gguf",
        "mlx/Jay/config.json",
        "mlx/Jay/model.safetensors",
        "mlx/No-weights/config.json",
        "mlx/No-config/model.safetensors",
        ".hidden/x/y.gguf",
        "odd/a@b/c,d.gguf",
        "a/b/c/d/too-deep.gguf",
    )


def test_lm_studio_is_listed_by_publisher_and_repository(root: Path) -> None:
    found = {model.name: model.path for model in lm_studio_models(root)}
    plain = {
        f"lmstudio:{place}": root / place
        for place in (
            "lab/Crow-GGUF/Crow-Q4_K_M.gguf",
            "lab/Crow-GGUF/Crow-Q8_0.gguf",
            "lab/Owl-GGUF/owl-00001-of-00002.gguf",
            "mlx/Jay",
        )
    }
    odd = root / "odd/a@b/c,d.gguf"
    assert found == plain | {str(odd): odd}
    for name, path in plain.items():
        assert find_in_lm_studio(name, [root.parent / "none", root]) == path


@pytest.mark.parametrize(
    "name", ["lmstudio:lab/none", "lmstudio:../models/mlx/Jay", "lmstudio:/etc", "lmstudio:", "x"]
)
def test_what_is_in_no_folder_of_lm_studio(name: str, root: Path) -> None:
    assert find_in_lm_studio(name, [root]) is None


def test_a_named_folder_is_listed_by_paths_itself_included(root: Path) -> None:
    jay = root / "mlx" / "Jay"
    assert [model.name for model in models_below(jay)] == [str(jay)]
    assert {model.name for model in models_below(root)} > {str(jay)}
    with pytest.raises(FileNotFoundError):
        list(models_below(root / "none"))


def test_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = {"SHARDNET_MODEL_FOLDERS": os.pathsep.join(["/a", "~/b", ""])}
    assert named_folders(environment) == [Path("/a"), tmp_path / "b"]
    assert named_folders({}) == []


def test_a_folder_that_cannot_be_read_is_listed_with_the_reason(root: Path) -> None:
    (root / "lab" / "Owl-GGUF" / "config.json").write_bytes(b"{}")
    (root / "lab" / "Owl-GGUF" / "model.safetensors").symlink_to("/etc/passwd")
    [bad] = [model for model in models_below(root) if model.failure]
    assert bad.path == root / "lab" / "Owl-GGUF"
    assert "is a link that leaves" in bad.failure


def test_a_folder_of_very_many_is_left_at_a_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "lab" / "round").symlink_to(root)
    assert len(list(models_below(root))) < 50, "links in a circle end at the depth"
    monkeypatch.setattr(program_stores, "MAX_FOLDERS", 3)
    [*_, last] = models_below(root)
    assert "holds more than 3 folders" in last.failure
