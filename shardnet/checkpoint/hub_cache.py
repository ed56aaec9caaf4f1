"""Models of the Hugging Face Hub: their names, cache folders, and which of their files to take."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from shardnet.checkpoint.formats import consolidated
from shardnet.checkpoint.formats.gguf_header import (
    ahead_name,
    first_part_name,
    is_model_name,
    is_projector_name,
    part_names,
)
from shardnet.checkpoint.formats.huggingface import HF_INDEX_FILES, HF_WHOLE, SINGLE_FILES
from shardnet.checkpoint.formats.safetensors_files import weight_map
from shardnet.checkpoint.model_names import FoundModel
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries, is_file_name
from shardnet.errors import CheckpointError, ShortageError, shortage, telling_shortages
from shardnet.files import expanded, write_whole

MAX_NAMED: Final = 12
"""How many files a message names."""
MAX_NAME: Final = 500
"""Longest name of a file, its folders included."""
_OF_ENCODERS: Final = re.compile(
    r"modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    r"|[0-9]_(Pooling|LogitScore)/config\.json|[0-9]_Dense/(config\.json|model\.safetensors|pytorch_model\.bin)"
)
"""What sentence-transformers writes beside a model."""
_PLAIN_NAME = re.compile(r"(?:[\w+-][\w .+()-]*/)*[\w+-][\w .+()-]*")
PROJECTOR_KINDS: Final = ("f16", "bf16", "f32", "q8_0")
"""The ends of projectors' names, the one to fetch first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of one checkpoint. `path` is what a program opens: "" for the folder.

    `tensors` are empty if there is an `index`, which names them.
    """

    whole: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    index: str = ""
    path: str = ""


def is_plain(name: str) -> bool:
    """Say whether a file's name stays below its folder and is of usual length."""
    if len(name) > MAX_NAME or ".." in name or not _PLAIN_NAME.fullmatch(name):
        return False
    return all(map(is_file_name, name.split("/")))


def choose_files(names: Collection[str], choice: str, model: str) -> CheckpointFiles:
    """Choose the files of one checkpoint from the `names` in a repository: one format of weights.

    The order of preference is that for a folder: safetensors, torch's, Meta's and Mistral's own. A
    GGUF is taken by `choice` only: its quantization (the end of its name) or its whole name, in
    upper or lower case; with it comes a projector that lies beside it. `model` names the repository
    in messages. Raises CheckpointError, which lists the files to choose from.
    """
    safe = [name for name in names if is_plain(name)]
    if choice:
        return _chosen_gguf(safe, choice, model)
    files = _huggingface(safe) or _consolidated(safe)
    if files is not None:
        return files
    ggufs = gguf_models(safe)
    if ggufs:
        repo = model.partition("@")[0]
        labels = _labels(ggufs)
        raise CheckpointError(
            f"{model} has GGUF files only; there are {_listed(labels)}",
            remedy=f"choose one as {repo}:{labels[0]}",
        )
    raise CheckpointError(
        f"{model} has no weights that are read here (its files: {_listed(sorted(names))}): neither "
        "config.json with model.safetensors or pytorch_model.bin, nor params.json with "
        "consolidated files, nor GGUF",
        remedy="choose a repository that has one of these",
    )


def _huggingface(names: Sequence[str]) -> CheckpointFiles | None:
    if "config.json" not in names:
        return None
    whole = tuple(name for name in HF_WHOLE if name in names)
    whole += tuple(name for name in names if _OF_ENCODERS.fullmatch(name))
    for single, index in zip(SINGLE_FILES, HF_INDEX_FILES, strict=True):
        if single in names:
            return CheckpointFiles(whole=whole, tensors=(single,))
        if index in names:
            return CheckpointFiles(whole=(*whole, index), index=index)
    return None


def _consolidated(names: Sequence[str]) -> CheckpointFiles | None:
    if consolidated.PARAMS_FILE not in names:
        return None
    whole = tuple(name for name in consolidated.OWN_WHOLE if name in names)
    if consolidated.SINGLE_FILE in names:
        return CheckpointFiles(whole=whole, tensors=(consolidated.SINGLE_FILE,))
    if consolidated.INDEX_FILE in names:
        return CheckpointFiles(
            whole=(*whole, consolidated.INDEX_FILE), index=consolidated.INDEX_FILE
        )
    parts = consolidated.part_files(names)
    return CheckpointFiles(whole=whole, tensors=tuple(parts)) if parts else None


def _chosen_gguf(names: Sequence[str], choice: str, model: str) -> CheckpointFiles:
    models = gguf_models(names)
    if not models:
        raise CheckpointError(f"{model} has no GGUF files", remedy=f"leave out :{choice}")
    found = [name for name in models if _is_named(name, choice)] or [
        name for name in models if _is_kind(name, choice)
    ]
    if len(found) != 1:
        what = "more than one GGUF" if found else "no GGUF"
        offered = found or _labels(models)
        raise CheckpointError(
            f"{model} has {what} of the name {choice}; there are {_listed(offered)}",
            remedy="choose one",
        )
    path = PurePosixPath(found[0])
    parts = tuple(str(path.with_name(part)) for part in part_names(path.name))
    lacking = [part for part in parts if part not in names]
    if lacking:
        raise CheckpointError(
            f"{model} lacks the part {lacking[0]}", remedy="report it to its authors"
        )
    ahead = str(path.with_name(ahead_name(path.name)))
    tensors = (*parts, ahead) if ahead in names else parts
    return CheckpointFiles(whole=_projector(names, path.parent), tensors=tensors, path=parts[0])


def _projector(names: Sequence[str], folder: PurePosixPath) -> tuple[str, ...]:
    """Choose one of the projectors (mmproj) that lie in a folder, if any, for a GGUF there."""
    beside = [name for name in sorted(names) if PurePosixPath(name).parent == folder]
    found = [name for name in beside if is_projector_name(name)]
    kinds = [name for kind in PROJECTOR_KINDS for name in found if _is_kind(name, kind)]
    return tuple([*kinds, *found][:1])


def choices_of(names: Collection[str]) -> list[str]:
    """List what `choose_files` can be asked for among these files: "" for what is no GGUF."""
    safe = [name for name in names if is_plain(name)]
    whole = _huggingface(safe) or _consolidated(safe)
    return [""] * (whole is not None) + _labels(gguf_models(safe))


def gguf_models(names: Sequence[str]) -> list[str]:
    """Name the GGUF models among files by their first parts; not projectors and the like."""
    paths = [PurePosixPath(name) for name in names if name.endswith(".gguf")]
    models = {
        str(path.with_name(first_part_name(path.name)))
        for path in paths
        if is_model_name(path.name)
    }
    return sorted(models)


def _plain_stem(name: str) -> str:
    """The name of a GGUF without what all of them end with."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name)


def _is_named(name: str, choice: str) -> bool:
    spellings = {name, PurePosixPath(name).name, _plain_stem(name), _plain_stem(_base(name))}
    return choice.lower() in {spelled.lower() for spelled in spellings}


def _is_kind(name: str, choice: str) -> bool:
    """Whether the last words of a name, or the name of its folder, are the choice."""
    last_words = rf"(?i)(.*[-./])?{re.escape(choice)}"
    folder = str(PurePosixPath(name).parent)
    return any(re.fullmatch(last_words, said) for said in (_plain_stem(name), folder))


def _base(name: str) -> str:
    return PurePosixPath(name).name


def _labels(models: Sequence[str]) -> list[str]:
    """Name each GGUF as it can be chosen: by its last word where no other has it."""
    labels = []
    for name in models:
        word = re.split(r"[-.]", _plain_stem(_base(name)))[-1]
        alone = [other for other in models if _is_named(other, word) or _is_kind(other, word)]
        labels.append(word if alone == [name] else name)
    return labels


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (", ".join(names[:MAX_NAMED]) or "none at all") + more


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
        return expanded(environment["HF_HUB_CACHE"])
    home = environment.get("HF_HOME")
    if home:
        return expanded(home) / "hub"
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
        try:
            yield from _of_repo(main, root)
        except ShortageError as error:  # a bad block of the disk is one model's, not the store's
            folder = repo_folder(main, root)
            yield FoundModel(name=repo, store=STORE, path=folder, failure=str(error))


def _of_repo(main: HubName, root: Path) -> Iterator[FoundModel]:
    """List the models of all revisions of a repository."""
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
        with telling_shortages(name):
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
    """List the files below a folder. Raises ShortageError where this machine cannot."""

    def failed(error: OSError) -> None:
        if (short := shortage(error, folder.name)) is not None:
            raise short from error

    walked = os.walk(folder, onerror=failed)
    files = (Path(at, name) for at, _, names in walked for name in names)
    return {path.relative_to(folder).as_posix() for path in files if path.is_file()}


def _whole(folder: Path, name: HubName) -> Path | None:
    """Return the path to open, None unless all tensor files are in `folder`.

    Raises OSError and CheckpointError.
    """
    here = _files(folder)
    files = choose_files(here, name.choice, str(name))
    if not here.issuperset(indexed_files(files, folder)):
        return None
    return folder / files.path if files.path else folder
