"""What this machine lacks is not told as a fault of a checkpoint's files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hostile.small_files import GOOD
from support.models.checkpoints import make_llama
from support.models.model_stores import put_in_ollama
from support.models.torch_checkpoints import to_torch_files

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.gguf_header import gguf_files, is_gguf
from shardnet.checkpoint.hub_cache import (
    HubName,
    note_revision,
    pulled_folder,
    pulled_models,
    repo_folder,
)
from shardnet.checkpoint.model_names import FoundModel
from shardnet.checkpoint.program_stores import models_below, ollama_models
from shardnet.checkpoint.recommended_sampling import read_recommended
from shardnet.checkpoint.replica import disk_error
from shardnet.checkpoint.replica_journal import Journal
from shardnet.checkpoint.tensors import checkpoint_files
from shardnet.checkpoint.tensors.checkpoint_files import (
    folder_entries,
    has_file,
    is_file_name,
    open_file,
)
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.errors import CapacityError, CheckpointError, ShortageError
from shardnet.runtime.loading.model_facts import stamp
from shardnet.tokenizers.chat.chat_template import ChatTemplate
from shardnet.tokenizers.text_backend import TextBackend
from shardnet.tokenizers.tokenizer import read_eos_ids

SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
TEMPLATE = "chat_template.jinja"
READS: dict[str, Callable[[Path], object]] = {
    "a checkpoint": Checkpoint.open,
    "one in torch's files": lambda folder: Checkpoint.open(folder.parent / "torch"),
    "a config": lambda folder: read_json(folder / "config.json"),
    "a tokenizer": TextBackend.load_optional,
    "end tokens": read_eos_ids,
    "a chat template": ChatTemplate.find,
    "recommended sampling": read_recommended,
    "the parts of a GGUF": gguf_files,
    "what may be a GGUF": lambda folder: is_gguf(folder / TEMPLATE),
    "a folder": folder_entries,
    "the stamp of a loaded model": stamp,
    "a replica": lambda folder: Journal.find(folder / "replica"),
    "a tensor": lambda folder: OPENED[folder].read("model.norm.weight"),
    "a model of the Hub": lambda folder: pulled_folder(HUB_NAME, folder / "hub"),
}
OPENED: dict[Path, Checkpoint] = {}
HUB_NAME = HubName.parse("org/name") or pytest.fail("no name")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, the same in other files, and beside them what else is read."""
    folder = make_llama(tmp_path_factory.mktemp("short") / "model")
    to_torch_files(folder, folder.parent / "torch")
    (folder / TEMPLATE).write_text("{{ messages }}")
    (folder / "replica").mkdir()
    Journal.begin(folder / "replica", {})
    repo = folder / "hub" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c" * 40)
    (repo / "snapshots" / ("c" * 40)).mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        os.link(folder / name, repo / "snapshots" / ("c" * 40) / name)
    OPENED[folder] = Checkpoint.open(folder)
    return folder


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize("what", READS)
def test_a_shortage_of_this_machine_is_told_as_one(
    folder: Path, what: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read of a model, and it can be read when the shortage is over."""
    READS[what](folder)

    def short(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as lacking:
        lacking.setattr(checkpoint_files.os, "open", short)
        lacking.setattr(checkpoint_files.os, "scandir", short)
        lacking.setattr(Path, "read_text", short)
        with pytest.raises(ShortageError) as error:
            READS[what](folder)
    assert os.strerror(number) in error.value.message
    assert "checkpoint" not in str(error.value)
    READS[what](folder)


def test_a_file_that_may_not_be_read_is_the_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as refusing:
        refusing.setattr(checkpoint_files.os, "open", closed)
        with pytest.raises(CheckpointError, match="Permission denied"):
            Checkpoint.open(folder)
    assert has_file(folder / "config.json")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has a file that cannot be read")
def test_a_disk_that_fails_amid_a_file_is_told_as_one() -> None:
    with open_file(Path("/proc/self/mem")) as file:
        with pytest.raises(ShortageError, match="mem: the disk fails"):
            file.read(8)
        with pytest.raises(ShortageError, match="mem: the disk fails"):
            file.readinto(torch.empty(8, dtype=torch.uint8).numpy())


def test_writing_to_the_cache_tells_them_apart(tmp_path: Path) -> None:
    def told(number: int) -> type[Exception]:
        return type(disk_error(OSError(number, os.strerror(number)), tmp_path))

    assert [told(number) for number in SHORT] == [ShortageError] * len(SHORT)
    assert (told(errno.ENOSPC), told(errno.EACCES)) == (CapacityError, CheckpointError)


@pytest.mark.parametrize("store", ["hub", "ollama", "folders"])
def test_a_model_that_the_disk_fails_hides_no_other_one_of_its_store(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: Callable[[Path], Iterator[FoundModel]]
    lists = {"hub": pulled_models, "ollama": ollama_models, "folders": models_below}[store]
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(GOOD["gguf"]()["model.gguf"])
    root = tmp_path / store
    for name in ("bad", "good"):
        if store == "ollama":
            put_in_ollama(root, gguf, name)
            continue
        folder = root / name
        if store == "hub":
            named = HubName(repo=f"lab/{name}")
            folder = repo_folder(named, root) / "snapshots" / ("c" * 40)
            note_revision(named, folder.name, root)
        folder.mkdir(parents=True)
        os.link(gguf, folder / gguf.name)

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **named: Any) -> Any:
            if "bad" in str(path).removeprefix(str(tmp_path)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path, *more, **named)

        return call

    with monkeypatch.context() as broken:
        for job in ("lstat", "scandir") if store != "ollama" else ("lstat",):
            broken.setattr(os, job, failing(getattr(os, job)))
        bad, good = sorted(lists(root), key=lambda model: "bad" not in model.name)
    assert ("bad" in bad.name, "the disk fails" in bad.failure) == (True, True)
    assert ("good" in good.name, good.failure) == (True, "")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "sha256-ab", "konsole"])
def test_a_file_name_is_one_on_every_system(name: str) -> None:
    assert is_file_name(name)


FOLDERS = ("", ".", "..", "a/b", "a\\b", "..\\a", "C:a", "C:\\a", "a:b", "\\\\server\\a")
DEVICES = ("CON", "nul.bin", "Aux.tar.gz", "com1", "LPT9.bin", "nul .", "con\t")


@pytest.mark.parametrize("name", [*FOLDERS, *DEVICES, "a\0", "a\n", "a.", "a ", "a?", "a*", "<a>"])
def test_what_windows_takes_for_something_else_is_no_file_name(name: str) -> None:
    assert not is_file_name(name)
