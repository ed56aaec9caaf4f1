"""Models of the Hugging Face Hub on this machine: their names, and the folders of what was pulled.

Knows how huggingface_hub lays its cache out, so that what other programs have pulled is found too.
Must not reach the network: cluster/hub.py does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?!.*(\.\.|--))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model of the Hub: `repo` is ORG/NAME, or NAME alone for the oldest ones."""

    repo: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Read ORG/NAME or ORG/NAME@REVISION; None for what cannot be such a name."""
        repo, at, revision = text.partition("@")
        if not _NAME.fullmatch(repo) or repo.endswith((".git", ".safetensors", ".gguf")):
            return None
        if at and not _REVISION.fullmatch(revision):
            return None
        return cls(repo=repo, revision=revision or "main")

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where huggingface_hub keeps models."""
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
    """Return the folder with the model's files, None where it is not here, or not all of it."""
    repo = repo_folder(name, root or cache_root())
    try:
        commit = name.revision
        if not _COMMIT.fullmatch(commit):
            commit = (repo / "refs" / name.revision).read_text("utf-8").strip()
        folder = repo / "snapshots" / commit
        return folder if _COMMIT.fullmatch(commit) and _is_whole(folder) else None
    except (OSError, ValueError):
        return None


def note_revision(name: HubName, commit: str, root: Path) -> None:
    """Write down which commit a revision is now: from then on its folder is found by name."""
    if name.revision == commit:
        return
    ref = repo_folder(name, root) / "refs" / name.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    new = ref.with_name(f"{ref.name}.{os.getpid()}.new")
    new.write_text(commit, encoding="utf-8")
    new.replace(ref)


def _is_whole(folder: Path) -> bool:
    """Say whether config and all tensor files are there. Raises OSError and ValueError."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / INDEX_FILE
    if not index.is_file():
        return (folder / SINGLE_FILE).is_file()
    if index.stat().st_size > _MAX_INDEX_BYTES:
        return False
    said = json.loads(index.read_text("utf-8"))
    named = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(named, dict):
        return False
    return all((folder / Path(file).name).is_file() for file in {*map(str, named.values())})
