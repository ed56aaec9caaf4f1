"""Models in plain folders on this machine: LM Studio's, and those that its user names.

Knows LM Studio's layout, PUBLISHER/REPO/FILE.gguf or a folder of safetensors, and what in a folder
is a checkpoint. Must not open any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from shardnet.checkpoint.checkpoint import names_checkpoint
from shardnet.checkpoint.formats.consolidated import has_consolidated_files
from shardnet.checkpoint.formats.huggingface import has_huggingface_tensors
from shardnet.checkpoint.hub_files import gguf_models, is_plain
from shardnet.checkpoint.model_names import FOLDERS_VARIABLE, LM_STUDIO, FoundModel
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries
from shardnet.errors import CheckpointError

LM_STUDIO_STORE: Final = "LM Studio"
FOLDER_STORE: Final = "folder"
DEPTH: Final = 3
"""How far below such a folder models are looked for: PUBLISHER/REPO/FOLDER."""
MAX_FOLDERS: Final = 4096
"""Folders that are looked into below one of them."""


def lm_studio_roots() -> list[Path]:
    """List the folders in which LM Studio keeps models, today and before version 0.3.6."""
    home = Path.home()
    return [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def named_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """List the folders of SHARDNET_MODEL_FOLDERS."""
    named = environment.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    return [Path(os.path.abspath(Path(folder).expanduser())) for folder in named if folder]


def find_in_lm_studio(model: str, roots: list[Path] | None = None) -> Path | None:
    """Return the path of `lmstudio:PUBLISHER/REPO[/FILE.gguf]`, None if it is in no folder."""
    place = model.removeprefix(LM_STUDIO)
    if not model.startswith(LM_STUDIO) or not is_plain(place):
        return None
    paths = [root / place for root in (lm_studio_roots() if roots is None else roots)]
    return next((path for path in paths if names_checkpoint(path)), None)


def lm_studio_models(root: Path) -> Iterator[FoundModel]:
    """List the models below a folder of LM Studio; raises as `models_below`."""
    for found in models_below(root, LM_STUDIO_STORE):
        place = found.path.relative_to(root).as_posix()
        name = f"{LM_STUDIO}{place}" if is_plain(place) and not found.failure else found.name
        yield FoundModel(name=name, store=found.store, path=found.path, failure=found.failure)


def models_below(root: Path, store: str = FOLDER_STORE) -> Iterator[FoundModel]:
    """List the checkpoints in the folder `root` and below, by their paths.

    A folder below that cannot be read is listed with the reason. Hidden ones are left out. Raises
    OSError if `root` cannot be read.
    """
    folder_entries(root)
    left, n_seen = [(root, 0)], 0
    while left:
        folder, depth = left.pop()
        n_seen += 1
        if n_seen > MAX_FOLDERS:
            why = f"holds more than {MAX_FOLDERS} folders: the rest was not looked into"
            yield FoundModel(name=str(root), store=store, path=root, failure=why)
            return
        try:
            names = folder_entries(folder)
            paths = _checkpoints(folder, names)
        except (OSError, CheckpointError) as error:
            yield FoundModel(name=str(folder), store=store, path=folder, failure=str(error))
            continue
        yield from (FoundModel(name=str(path), store=store, path=path) for path in paths)
        if depth < DEPTH:
            inside = [folder / name for name in names if not name.startswith(".")]
            left += [(path, depth + 1) for path in reversed(inside) if os.path.isdir(path)]


def _checkpoints(folder: Path, names: list[str]) -> list[Path]:
    """List the checkpoints in a folder: itself, if it has tensors beside a config, and GGUFs."""
    has_config = "config.json" in names and has_huggingface_tensors(folder)
    own = [folder] if has_config or has_consolidated_files(folder) else []
    return own + [folder / name for name in gguf_models(names)]
