"""Pulls models from the Hugging Face Hub into the cache that other programs share.

Knows the Hub through `huggingface_hub`: which files a model needs, what can go wrong on the way and
what a person can do about it. Blocks: to be called on a thread that may wait. Must not know nodes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardnet import __version__
from shardnet.checkpoint.hub_cache import (
    HubName,
    cache_root,
    indexed_files,
    note_revision,
    pulled_folder,
    repo_folder,
)
from shardnet.checkpoint.hub_files import choose_files
from shardnet.checkpoint.tensors.manifest import TENSOR_SUFFIXES
from shardnet.cluster.download.web_address import check_proxies, what_to_look_at
from shardnet.cluster.download.web_file import GO_ON, Report, sha256_of
from shardnet.cluster.machine.disk_room import check_room
from shardnet.errors import HubError

ANSWER_S = 15.0
"""How long the Hub may take to answer a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a model. `sha256` is what the Hub says of large ones, "" of small ones."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model that is here whole. `n_new_bytes` came over the network just now.

    `folder` is what to open: a GGUF's first file, else the folder.
    """

    name: str
    commit: str
    folder: Path
    files: tuple[HubFile, ...]
    n_new_bytes: int


def pull(name: HubName, report: Report, *, root: Path | None = None) -> PulledModel:
    """Download what is missing of a model: config, tokenizer and its weights once, never code.

    What a broken attempt has left is gone on with. Raises HubError, which says what to do, when the
    Hub does not answer, refuses, or gives something else than it promised; CheckpointError for a
    model whose weights are in no format that is read here, or in several GGUFs.
    """
    root = root or cache_root()
    with named_errors(name):
        commit, files = look_up(name, root)
        present = _present(name, commit, files, root)
        missing = [file for file in files if file.name not in present]
        n_missing = sum(file.size_bytes for file in missing)
        check_room(
            str(name),
            n_missing,
            root,
            else_do="set HF_HOME to a folder on a larger disk",
            error=HubError,
        )
        total = sum(file.size_bytes for file in files)
        done = total - n_missing
        for file in sorted(missing, key=lambda file: file.size_bytes):
            _fetch(name, commit, file, root, _Counter(report, file.name, done, total))
            done += file.size_bytes
        note_revision(name, commit, root)
        folder = pulled_folder(replace(name, revision=commit), root)
    if folder is None:
        raise HubError(f"{name}: what came is gone from {root} again; {GO_ON}")
    return PulledModel(
        name=str(name), commit=commit, folder=folder, files=tuple(files), n_new_bytes=n_missing
    )


def look_up(name: HubName, root: Path) -> tuple[str, list[HubFile]]:
    """Ask the Hub for the commit and the files that are needed: the weights in one format only.

    An index, which names tensor files, is fetched. Raises CheckpointError where there is no format
    that is read here, HubError where the index names what the Hub does not have.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="shardnet", library_version=__version__)
    info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=ANSWER_S)
    found = {
        said.rfilename: HubFile(
            name=said.rfilename,
            size_bytes=said.size or 0,
            sha256=said.lfs.sha256 if said.lfs is not None else "",
        )
        for said in info.siblings or ()
    }
    commit = info.sha
    assert commit is not None
    files = choose_files(found, name.choice, str(name))
    if files.index:
        fetch_small(name, commit, found[files.index], root)
    tensors = indexed_files(files, _snapshot(name, commit, root))
    for file in tensors:
        if file not in found or not file.endswith(TENSOR_SUFFIXES):
            raise HubError(
                f"{name}: {files.index} names {file}, which is no tensor file that the Hub has: "
                "tell its authors"
            )
    return commit, [found[file] for file in (*files.whole, *tensors)]


def _snapshot(name: HubName, commit: str, root: Path) -> Path:
    return repo_folder(name, root) / "snapshots" / commit


def _present(name: HubName, commit: str, files: Iterable[HubFile], root: Path) -> set[str]:
    """Say which of a commit's files are here."""
    folder = _snapshot(name, commit, root)
    return {file.name for file in files if (folder / file.name).is_file()}


class _Counter:
    """What huggingface_hub takes for a progress bar."""

    def __init__(self, report: Report, name: str, done: int, total: int) -> None:
        self._report, self._name = report, name
        self._done, self._total = done, total

    def __call__(self, *_: Any, initial: int = 0, **__: Any) -> _Counter:
        """Begin a file of which `initial` bytes are there."""
        self.update(initial)
        return self

    def __enter__(self) -> _Counter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float | None = 1) -> None:
        """Take note of `n` more bytes."""
        self._done += int(n or 0)
        self._report(self._name, self._done, self._total)

    def close(self) -> None:
        """Nothing is shown."""

    def set_postfix_str(self, *_: Any, **__: Any) -> None:
        """Nothing is shown."""


def fetch_small(name: HubName, commit: str, file: HubFile, root: Path) -> bytes:
    """Return what is in a small file of a model, downloaded if it is not here."""
    return _fetch(name, commit, file, root, _Counter(lambda *_: None, "", 0, 0)).read_bytes()


def _fetch(name: HubName, commit: str, file: HubFile, root: Path, counter: _Counter) -> Path:
    """Download a file, or what is missing of it, and hold it against what the Hub said of it."""
    from huggingface_hub import hf_hub_download

    bar: Any = counter  # whatever can be called like a bar's class will do
    path = hf_hub_download(
        name.repo,
        file.name,
        revision=commit,
        cache_dir=root,
        library_name="shardnet",
        library_version=__version__,
        tqdm_class=bar,
    )
    _check(name, file, Path(path))
    return Path(path)


def _check(name: HubName, file: HubFile, path: Path) -> None:
    """Hold a file against what the Hub said of it; one that differs is deleted."""
    why = ""
    if path.stat().st_size != file.size_bytes:
        why = f"{path.stat().st_size} bytes, not {file.size_bytes}"
    elif file.sha256 and sha256_of(path) != file.sha256:
        why = "another SHA-256 than the Hub says"
    if why:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise HubError(f"{name}: {file.name} came with {why}, and was deleted; {GO_ON}")


@contextlib.contextmanager
def named_errors(name: HubName) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line that says what to do."""
    import httpx2
    from huggingface_hub import errors

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it warns of is said here
    check_proxies()
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name.repo}, then give a "
            "token with `hf auth login` or HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{name}: {name.repo} has no revision {name.revision}; check it") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name} is neither a folder where it was asked for, nor a model of the Hub that may "
            "be read: check the name; for a private one give a token (`hf auth login`, HF_TOKEN)"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(
            f"{name} is not on this machine and downloads are switched off (--offline or "
            "HF_HUB_OFFLINE): allow them, or copy the model"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise HubError(f"{name}: the Hub answered {status}; try again later: {GO_ON}") from error
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise HubError(
            f"{name} is no folder here, and the Hub cannot be reached ({_first_line(error)}): "
            f"check the name and {what_to_look_at()}; {GO_ON}"
        ) from error
    except OSError as error:
        raise HubError(f"{name}: {_first_line(error)}; {GO_ON}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:300]
