"""Models in the stores of other programs on this machine: Ollama's, LM Studio's, plain folders.

A manifest comes from strangers: its size is bounded, and a digest is nothing but hex. Templates and
parameters in other layers are not used: the GGUF has its own chat template.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.checkpoint import names_checkpoint
from shardnet.checkpoint.formats.consolidated import has_consolidated_files
from shardnet.checkpoint.formats.huggingface import has_huggingface_tensors
from shardnet.checkpoint.hub_cache import gguf_models, is_plain
from shardnet.checkpoint.model_names import FOLDERS_VARIABLE, LM_STUDIO, OLLAMA, FoundModel
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries, has_file, is_file_name
from shardnet.checkpoint.tensors.json_files import parse_object, read_file
from shardnet.checkpoint.tensors.stored_tensor import damaged
from shardnet.errors import CheckpointError, ShortageError
from shardnet.files import expanded

MAX_MANIFEST_BYTES: Final = 1 << 20
MAX_MODELS: Final = 4096
"""Manifests that are read of one store."""
STORE: Final = "Ollama"

_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_PART = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MODEL = "application/vnd.ollama.image.model"
_PROJECTOR = "application/vnd.ollama.image.projector"
_ADAPTER = "application/vnd.ollama.image.adapter"
_TENSOR = "application/vnd.ollama.image.tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaName:
    """A model of Ollama, as `ollama:llama3.2:3b` or `ollama:user/name:tag` name it."""

    name: str
    tag: str = _TAG
    namespace: str = _NAMESPACE
    registry: str = _REGISTRY

    @classmethod
    def parse(cls, text: str) -> OllamaName | None:
        """Parse ollama:[[REGISTRY/]NAMESPACE/]NAME[:TAG]; None if `text` is no such name."""
        if not text.startswith(OLLAMA):
            return None
        path, colon, tag = text.removeprefix(OLLAMA).partition(":")
        parts = path.split("/")
        named = [*parts, tag if colon else _TAG]
        if len(parts) > 3 or not all(_PART.fullmatch(one) and is_file_name(one) for one in named):
            return None
        registry, namespace, name = [_REGISTRY, _NAMESPACE][: 3 - len(parts)] + parts
        return cls(name=name, tag=tag or _TAG, namespace=namespace, registry=registry)

    def __str__(self) -> str:
        parts = [self.registry, self.namespace, self.name]
        if self.registry == _REGISTRY:
            parts = parts[1:] if self.namespace != _NAMESPACE else parts[2:]
        return f"{OLLAMA}{'/'.join(parts)}:{self.tag}"

    def manifest(self, root: Path) -> Path:
        """Return where the manifest is in the store `root`."""
        return root / "manifests" / self.registry / self.namespace / self.name / self.tag


def ollama_roots() -> list[Path]:
    """List the folders that may be Ollama's store: the user's and the system service's."""
    own = os.environ.get("OLLAMA_MODELS")
    places = [expanded(own)] if own else []
    places += [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    return list(dict.fromkeys(places))


def find_ollama(name: OllamaName, roots: list[Path] | None = None) -> Path | None:
    """Return the GGUF of a model, None if no store has it: a peer may. `ollama_models` says why."""
    for root in roots if roots is not None else ollama_roots():
        with contextlib.suppress(CheckpointError):
            path = name.manifest(root)
            return _blob(root, path, _layers(path))
    return None


def ollama_models(root: Path) -> Iterator[FoundModel]:
    """List the models of the store `root`, with the reason for each that cannot be used.

    Raises OSError if the store cannot be read, CheckpointError if it is no store.
    """
    for name in _names(root):
        path = name.manifest(root)
        try:
            found, failure = _blob(root, path, _layers(path)), ""
        except (CheckpointError, ShortageError) as error:
            found, failure = path, str(error)
        yield FoundModel(name=str(name), store=STORE, path=found, failure=failure)


def projectors_of(blob: Path) -> list[Path]:
    """List the projectors of a model in a store, the path of whose GGUF is `blob`: those that lie
    beside it in some manifest.

    Raises OSError if the store cannot be read, CheckpointError if it holds too many models.
    """
    root, found = blob.parent.parent, dict[Path, None]()
    for name in _names(root):
        path = name.manifest(root)
        with contextlib.suppress(CheckpointError):
            layers = _layers(path)
            if _blob(root, path, layers) == blob:
                found |= {_file(root, path, one): None for one in _of_kind(layers, _PROJECTOR)}
    return list(found)


def _names(root: Path) -> Iterator[OllamaName]:
    """List what has a manifest; names that `OllamaName.parse` would not take are left out."""
    top, n_found = root / "manifests", 0
    for registry in _parts(top):
        for namespace in _parts(top / registry):
            for name in _parts(top / registry / namespace):
                for tag in _parts(top / registry / namespace / name):
                    n_found += 1
                    if n_found > MAX_MODELS:
                        raise CheckpointError(
                            f"{root} holds more than {MAX_MODELS} models",
                            remedy="name the one you mean, as ollama:NAME:TAG",
                        )
                    yield OllamaName(name=name, tag=tag, namespace=namespace, registry=registry)


def _parts(folder: Path) -> list[str]:
    if not os.path.isdir(folder):
        return []
    entries = folder_entries(folder)
    return [entry for entry in entries if _PART.fullmatch(entry) and is_file_name(entry)]


def _layers(manifest: Path) -> list[dict[str, Any]]:
    """Read what a manifest names. Raises CheckpointError if it is none."""
    layers = parse_object(read_file(manifest, MAX_MANIFEST_BYTES), manifest).get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if type(layers) is list else []


def _of_kind(layers: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [layer for layer in layers if layer.get("mediaType") == kind]


def _blob(root: Path, manifest: Path, layers: list[dict[str, Any]]) -> Path:
    """Return the GGUF among a manifest's layers. Raises CheckpointError if there is none to use."""
    if _of_kind(layers, _ADAPTER):
        raise CheckpointError(
            f"{manifest}: an adapter (LoRA) belongs to this model, and none is applied here",
            remedy="use a model with the adapter merged into it",
        )
    models = _of_kind(layers, _MODEL)
    if len(models) != 1:
        what = f"{len(models)} GGUF files" if models else "no GGUF"
        if _of_kind(layers, _TENSOR):
            what = "no GGUF, but safetensors in Ollama's own form"
        raise CheckpointError(
            f"{manifest} names {what}", remedy="`ollama pull` another tag of the model"
        )
    return _file(root, manifest, models[0])


def _file(root: Path, manifest: Path, layer: dict[str, Any]) -> Path:
    """Return the file of a layer. Raises CheckpointError if it has no digest, or is not there."""
    digest = layer.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise damaged(f"{manifest}: digest is {digest!r:.80}, expected sha256: and 64 hex digits")
    blob = root / "blobs" / digest.replace(":", "-")
    if not has_file(blob):
        raise CheckpointError(f"{blob}: missing", remedy="`ollama pull` the model again")
    return blob


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
    return [Path(os.path.abspath(expanded(folder))) for folder in named if folder]


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
        except (OSError, CheckpointError, ShortageError) as error:
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
