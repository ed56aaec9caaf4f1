"""Models of the Hugging Face Hub on this machine: their names, and the folders they are cached in.

Knows the layout of huggingface_hub's cache, so that models pulled by other programs are found too.
Must not reach the network: cluster/download/hub.py does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardnet.checkpoint.formats.indexed_files import weight_map
from shardnet.checkpoint.hub_files import CheckpointFiles, choose_files
from shardnet.errors import CheckpointError
from shardnet.files import write_whole

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
    repo = repo_folder(name, root or cache_root())
    try:
        commit = name.revision
        if not _COMMIT.fullmatch(commit):
            commit = (repo / "refs" / name.revision).read_text("utf-8").strip()
        folder = repo / "snapshots" / commit
        return _whole(folder, name) if _COMMIT.fullmatch(commit) else None
    except (OSError, ValueError, CheckpointError):
        return None


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


def _whole(folder: Path, name: HubName) -> Path | None:
    """Return the path to open, None unless all tensor files are in `folder`.

    Raises OSError and CheckpointError.
    """
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    files = choose_files(here, name.choice, str(name))
    if not here.issuperset(indexed_files(files, folder)):
        return None
    return folder / files.path if files.path else folder
