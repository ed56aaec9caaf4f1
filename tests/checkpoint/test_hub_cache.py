"""Names of the Hub's models, and where what was pulled lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardnet.checkpoint.hub_cache import (
    HubName,
    cache_root,
    note_revision,
    pulled_folder,
    pulled_models,
    repo_folder,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = HubName(repo="lab/parrot")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lab/parrot", NAME),
        ("gpt2", HubName(repo="gpt2")),
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName(repo="Qwen/Qwen2.5-0.5B-Instruct")),
        ("lab/parrot@v1.0", HubName(repo="lab/parrot", revision="v1.0")),
        ("lab/parrot@refs/pr/1", HubName(repo="lab/parrot", revision="refs/pr/1")),
        ("lab/parrot:Q4_K_M", HubName(repo="lab/parrot", choice="Q4_K_M")),
        ("lab/parrot:Q8/a-b.Q8.gguf", HubName(repo="lab/parrot", choice="Q8/a-b.Q8.gguf")),
        ("lab/parrot:Q8@v1", HubName(repo="lab/parrot", choice="Q8", revision="v1")),
        *[
            (text, None)
            for text in (
                *("/lab/parrot", "./lab", "../lab", "~/lab", "a/b/c", "", "a b", "lab/", "-a"),
                *("lab/..", "lab/parrot@", "lab/parrot@../x", "a--b", "model.gguf", "x\n"),
                *("C:/models/x", "C:models", "C:\\models", "lab/x:", "lab/x:../y", "lab/x:/y"),
                *("lab/x:a:b", "lab/x:.y", "lab/x:y/", "lab/x@v1:Q8"),
            )
        ],
    ],
)
def test_what_can_be_a_name(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name


def test_the_cache_is_where_huggingface_hub_keeps_it() -> None:
    assert cache_root({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert cache_root({"HF_HOME": "/b"}) == Path("/b/hub")
    assert cache_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert cache_root({}) == Path.home() / ".cache" / "huggingface" / "hub"


def make_snapshot(root: Path, *files: str, index: dict[str, str] | None = None) -> Path:
    folder = repo_folder(NAME, root) / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_a_model_is_here_when_its_revision_is_written_down(tmp_path: Path) -> None:
    folder = make_snapshot(tmp_path, "config.json", "model.safetensors")
    assert pulled_folder(NAME, tmp_path) is None
    assert pulled_folder(HubName(repo=NAME.repo, revision=COMMIT), tmp_path) == folder
    note_revision(NAME, COMMIT, tmp_path)
    assert pulled_folder(NAME, tmp_path) == folder
    other = HubName(repo=NAME.repo, revision="v1")
    assert pulled_folder(other, tmp_path) is None


@pytest.mark.parametrize(
    ("files", "index"),
    [
        (["config.json"], None),
        (["model.safetensors"], None),
        (["config.json", "a.safetensors"], {"x": "a.safetensors", "y": "b.safetensors"}),
    ],
)
def test_a_model_that_is_not_whole_is_not_here(
    files: list[str], index: dict[str, str] | None, tmp_path: Path
) -> None:
    make_snapshot(tmp_path, *files, index=index)
    note_revision(NAME, COMMIT, tmp_path)
    assert pulled_folder(NAME, tmp_path) is None


def test_a_chosen_gguf_is_here_when_all_its_parts_are(tmp_path: Path) -> None:
    """It is opened as a file; the folder without a choice is another model, and not here."""
    folder = make_snapshot(tmp_path, "config.json", "x-Q8_0.gguf")
    note_revision(NAME, COMMIT, tmp_path)
    assert pulled_folder(NAME, tmp_path) is None
    chosen = HubName(repo=NAME.repo, choice="q8_0")
    assert pulled_folder(chosen, tmp_path) == folder / "x-Q8_0.gguf"
    (folder / "F16").mkdir()
    split = HubName(repo=NAME.repo, choice="F16")
    for number in (1, 2):
        assert pulled_folder(split, tmp_path) is None
        (folder / "F16" / f"x-F16-0000{number}-of-00002.gguf").write_text("")
    assert pulled_folder(split, tmp_path) == folder / "F16" / "x-F16-00001-of-00002.gguf"


def test_a_damaged_index_or_revision_means_not_here(tmp_path: Path) -> None:
    folder = make_snapshot(tmp_path, "config.json", "model.safetensors")
    note_revision(NAME, "../../secrets", tmp_path)
    assert pulled_folder(NAME, tmp_path) is None
    note_revision(NAME, COMMIT, tmp_path)
    (folder / "model.safetensors").unlink()
    for damaged in ("{", "[]", '{"weight_map": [1]}'):
        (folder / "model.safetensors.index.json").write_text(damaged)
        assert pulled_folder(NAME, tmp_path) is None


def test_all_models_of_the_cache_are_listed(tmp_path: Path) -> None:
    """Each as it can be asked for, with the reason where some of it is not there."""
    make_snapshot(tmp_path, "config.json", "model.safetensors", "a-Q4_K_M.gguf", "a-Q8_0.gguf")
    for revision in ("main", "v1"):
        note_revision(HubName(repo=NAME.repo, revision=revision), COMMIT, tmp_path)
    other = repo_folder(NAME, tmp_path) / "snapshots" / ("f" * 40)
    other.mkdir()
    for file in ("config.json", "model.safetensors"):
        (other / file).write_text("{}")
    note_revision(HubName(repo=NAME.repo, revision="v2"), "f" * 40, tmp_path)
    half = HubName(repo="lab/half")
    folder = repo_folder(half, tmp_path) / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    note_revision(half, COMMIT, tmp_path)
    for stray in ("datasets--lab--x", "models--", "models--..--x", ".locks"):
        (tmp_path / stray).mkdir()
    (repo_folder(NAME, tmp_path) / "refs" / "broken").write_text("../../..")
    found = {model.name: model for model in pulled_models(tmp_path)}
    names = ["lab/parrot", "lab/parrot:Q4_K_M", "lab/parrot:Q8_0", "lab/parrot@v2", "lab/half"]
    assert sorted(found) == sorted(names)
    assert "`shardnet pull lab/half` fetches them" in found.pop("lab/half").failure
    for name, model in found.items():
        parsed = HubName.parse(name)
        assert parsed is not None
        assert (model.path, model.failure) == (pulled_folder(parsed, tmp_path), "")
