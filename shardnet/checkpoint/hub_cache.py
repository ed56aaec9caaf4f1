"""Models of the Hugging Face Hub on this machine: their names, and the folders they are cached in.

Knows the layout of huggingface_hub's cache, so that models pulled by other programs are found too.
Must not reach the network: cluster/download/hub.py does.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shardnet.checkpoint.formats.indexed_files import weight_map
from shardnet.checkpoint.hub_files import CheckpointFiles, choices_of, choose_files
from shardnet.checkpoint.model_names import FoundModel
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries
from shardnet.errors import CheckpointError
from shardnet.files import write_whole

STORE: Final = "Hugging Face"

_NAME = re.compile(r"(?!.*(\.\.|--))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_CHOICE = re.compile(r"(?!.*\.\.)(?:[A-Za-z0-9_][\w.+-]{0,127}/){0,4}[A-Za-z0-9_][\w.+-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model of the Hub: `repo` is ORG/NAME, or NAME alone for the oldest ones.

    `choice` selects one of its GGUFs (see choose_files), "" for other formats.
    """

    repo: str
    revision: str = "main"
    choice: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse ORG/NAME[:CHOICE][@REVISION]; None if `text` cannot be such a name.

        A choice needs the ORG, so that C:MODELS is no name.
        """
        named, at, revision = text.partition("@")
        repo, colon, choice = named.partition(":")
        if not _NAME.fullmatch(repo) or repo.endswith((".git", ".safetensors", ".gguf")):
            return None
        if at and not _REVISION.fullmatch(revision):
            return None
        if colon and not ("/" in repo and _CHOICE.fullmatch(choice)):
            return None
        return cls(repo=repo, revision=revision or "main", choice=choice)

    def __str__(self) -> str:
        named = f"{self.repo}:{self.choice}" if self.choice else self.repo
        return named if self.revision == "main" else f"{named}@{self.revision}"


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder of huggingface_hub, by its own rule, the same on all systems."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    home = environment.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def repo_folder(name: HubName, root: Path) -> Path:
    """Return the folder of all revisions of a model."""
    return root / f"models--{name.repo.replace('/', '--')}"


def pulled_folder(name: HubName, root: Path | None = None) -> Path | None:
    """Return the folder with the model's files, or the chosen GGUF's first file.

    None if it is not cached completely.
    """
    try:
        folder = _snapshot(name, root or cache_root())
        return _whole(folder, name) if folder is not None else None
    except (OSError, ValueError, CheckpointError):
        return None


def pulled_models(root: Path) -> Iterator[FoundModel]:
    """List the models in the cache `root`, a GGUF each, with the reason for those not complete.

    Raises OSError or CheckpointError if the cache cannot be read.
    """
    for entry in folder_entries(root):
        repo = entry.removeprefix("models--").replace("--", "/")
        main = HubName.parse(repo)
        if not entry.startswith("models--") or main is None or str(main) != repo:
            continue
        snapshots = []
        for name in (main, *_other_revisions(main, root)):
            with contextlib.suppress(OSError, ValueError):  # a reference to nothing
                folder = _snapshot(name, root)
                if folder is not None and folder not in snapshots and folder.is_dir():
                    snapshots.append(folder)
                    yield from _pulled(name, folder, root)


def _other_revisions(name: HubName, root: Path) -> list[HubName]:
    """List the branches and tags of a model but `main`, which have plain names."""
    try:
        refs = folder_entries(repo_folder(name, root) / "refs")
    except OSError:
        return []
    named = [HubName.parse(f"{name.repo}@{ref}") for ref in refs if ref != name.revision]
    return [other for other in named if other is not None]


def _pulled(name: HubName, folder: Path, root: Path) -> Iterator[FoundModel]:
    """List the models of one revision, whose files are in `folder`."""
    for choice in choices_of(_files(folder)):
        chosen = replace(name, choice=choice)
        path = pulled_folder(chosen, root)
        failure = "" if path is not None else "some of its files are not here"
        failure += "" if path is not None else f"; `shardnet pull {chosen}` fetches them"
        yield FoundModel(name=str(chosen), store=STORE, path=path or folder, failure=failure)


def _snapshot(name: HubName, root: Path) -> Path | None:
    """Return where the files of a revision are, None if it has no commit.

    Raises OSError and ValueError for what is no reference to a commit.
    """
    repo, commit = repo_folder(name, root), name.revision
    if not _COMMIT.fullmatch(commit):
        commit = (repo / "refs" / name.revision).read_text("utf-8").strip()
    return repo / "snapshots" / commit if _COMMIT.fullmatch(commit) else None


def note_revision(name: HubName, commit: str, root: Path) -> None:
    """Record the commit of a revision, so that its folder is found by name.

    Other users may share the cache, so they may read the file. Raises OSError.
    """
    if name.revision == commit:
        return
    ref = repo_folder(name, root) / "refs" / name.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_whole(ref, commit.encode(), mode=0o644)


def indexed_files(files: CheckpointFiles, folder: Path) -> tuple[str, ...]:
    """List the tensor files of a checkpoint whose index, if any, is in `folder`.

    Raises CheckpointError if the index is damaged.
    """
    if not files.index:
        return files.tensors
    return tuple(sorted({*weight_map(folder / files.index).values()}))


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _whole(folder: Path, name: HubName) -> Path | None:
    """Return the path to open, None unless all tensor files are in `folder`.

    Raises OSError and CheckpointError.
    """
    here = _files(folder)
    files = choose_files(here, name.choice, str(name))
    if not here.issuperset(indexed_files(files, folder)):
        return None
    return folder / files.path if files.path else folder
