"""Pull models from the Hugging Face Hub, beside the loop, into the cache that programs share.

Blocks: to be called on a thread that may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.request import getproxies

from shardnet import __version__
from shardnet.checkpoint.hub_cache import (
    HubName,
    cache_root,
    choose_files,
    indexed_files,
    is_plain,
    note_revision,
    pulled_folder,
    repo_folder,
)
from shardnet.checkpoint.tensors.manifest import TENSOR_SUFFIXES
from shardnet.cluster.download.hub_ranges import RESUME, HubFile, HubRanges
from shardnet.errors import CancelledRequestError, HubError, ShardnetError
from shardnet.files import delete, rename
from shardnet.threads import DaemonThreads
from shardnet.tokenizers.formats.tokenizer_files import has_tokenizer
from shardnet.tokenizers.tokenizer import no_tokenizer
from shardnet.transport.loop import shielded

LEFT_FREE_BYTES: Final = 64 << 20
"""Space that is always left free for other programs."""


def check_room(
    what: str, n_bytes: int, folder: Path, *, else_do: str, error: type[ShardnetError]
) -> None:
    """Raise `error` if the disk of `folder`, which may not exist yet, has no room for `n_bytes`.

    `what` is the subject of the message; `else_do` its remedy besides making room, in the
    imperative.
    """
    place = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if place is None:  # Windows has no root above its drives
        raise error(f"{what}: there is no drive of {folder}", remedy=f"connect it, or {else_do}")
    free_bytes = max(0, shutil.disk_usage(place).free - LEFT_FREE_BYTES)
    if n_bytes > free_bytes:
        raise error(
            f"{what} needs {n_bytes / 2**30:.1f} GiB more in {folder} and "
            f"{free_bytes / 2**30:.1f} GiB are free",
            remedy=f"make room, or {else_do}",
        )


Report = Callable[[str, int, int], None]
"""Takes (file name, bytes done of all files, bytes in all). If it raises, the download ends."""

ANSWER_S: Final = 15.0
"""Timeout of a request to the Hub's API."""
MAX_FILES: Final = 20_000
"""Files of a repository."""
MAX_SMALL_BYTES: Final = 1 << 28
"""Largest file that is read into memory: configs, tokenizers, indexes."""
MAX_IN_VAIN: Final = 5
"""How often a download may start over without coming further than before."""
_SLACK_BYTES: Final = 1 << 20
"""What may come beyond the announced size before a download ends: it is counted in pieces."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
PROXY_VARIABLES: Final = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model downloaded completely. `n_new_bytes` were transferred in this call.

    `folder` is the path to open: the folder, or a GGUF's first file.
    """

    name: str
    commit: str
    folder: Path
    files: tuple[HubFile, ...]
    n_new_bytes: int


def pull(
    name: HubName, report: Report, *, root: Path | None = None, tokenizer_for: str = ""
) -> PulledModel:
    """Download the missing files of a model: config, tokenizer and one format of weights, no code.

    An interrupted download goes on where it stopped. `root` is the cache folder, by default that of
    huggingface_hub.
    `tokenizer_for` says what needs a tokenizer, without which nothing is downloaded then, "" for
    nothing.
    Raises HubError if the Hub does not answer, refuses, or sends other bytes than it announced, or
    if the disk is full; CheckpointError if the weights are in no supported format, or in several
    GGUFs.
    """
    root = root or cache_root()
    with named_errors(name):
        commit, files = look_up(name, root)
        if tokenizer_for and not any(has_tokenizer(file.name) for file in files):
            raise no_tokenizer(name, tokenizer_for)
        present = _present(name, commit, files, root)
        missing = [file for file in files if file.name not in present]
        n_missing = sum(file.size_bytes for file in missing)
        n_new = n_missing - sum(_n_come(_part(name, file, root), file) for file in missing)
        check_room(
            str(name),
            n_new,
            root,
            else_do="set HF_HOME to a folder on a larger disk",
            error=HubError,
        )
        total = sum(file.size_bytes for file in files)
        done = total - n_missing
        for file in sorted(missing, key=lambda file: file.size_bytes):
            _fetch(name, commit, file, root, _Counter(report, name, file, done, total))
            done += file.size_bytes
        note_revision(name, commit, root)
        folder = pulled_folder(replace(name, revision=commit), root)
    if folder is None:
        raise HubError(f"{name}: the downloaded files are gone from {root} again", remedy=RESUME)
    return PulledModel(
        name=str(name), commit=commit, folder=folder, files=tuple(files), n_new_bytes=n_new
    )


def look_up(name: HubName, root: Path) -> tuple[str, list[HubFile]]:
    """Look up the commit and the needed files on the Hub, with the weights in one format.

    Downloads the index that names the tensor files, if there is one. Raises CheckpointError if
    there is no supported format, HubError if the index names a file that the Hub does not have.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="shardnet", library_version=__version__)
    info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=ANSWER_S)
    siblings, commit = info.siblings or (), info.sha or ""
    if len(siblings) > MAX_FILES or not _COMMIT.fullmatch(commit):
        raise HubError(
            f"{name}: the Hub lists {len(siblings)} files at commit {commit[:80]!r}, expected at "
            f"most {MAX_FILES} at one of 40 hex digits",
            remedy="check the name, and HF_ENDPOINT if that is set",
        )
    found = {
        said.rfilename: HubFile(
            name=said.rfilename,
            size_bytes=max(0, said.size or 0),
            sha256=said.lfs.sha256 if said.lfs is not None else "",
        )
        for said in siblings
        if is_plain(said.rfilename)
    }
    files = choose_files(found, name.choice, str(name))
    if files.index:
        fetch_small(name, commit, found[files.index], root)
    tensors = indexed_files(files, _snapshot(name, commit, root))
    for file in tensors:
        if file not in found or not file.endswith(TENSOR_SUFFIXES):
            raise HubError(
                f"{name}: {files.index} names {file}, which is no tensor file that the Hub has",
                remedy="report it to its authors",
            )
    return commit, [found[file] for file in (*files.whole, *tensors)]


def _snapshot(name: HubName, commit: str, root: Path) -> Path:
    return repo_folder(name, root) / "snapshots" / commit


def _present(name: HubName, commit: str, files: Iterable[HubFile], root: Path) -> set[str]:
    """Return the names of a commit's files that are in the cache."""
    folder = _snapshot(name, commit, root)
    return {file.name for file in files if (folder / file.name).is_file()}


class _Counter:
    """Counts bytes, with the interface of a progress bar of huggingface_hub.

    Ends a download of more bytes than the Hub announced, and one that starts over again and again:
    huggingface_hub tries for ever as long as some bytes come.
    """

    def __init__(
        self, report: Report, model: HubName, file: HubFile, done: int, total: int
    ) -> None:
        self._report, self._model, self._file = report, model, file
        self._before, self._done, self._total = done, done, total
        self._most = self._n_in_vain = 0

    def __call__(self, *_: Any, initial: int = 0, **__: Any) -> _Counter:
        """Begin a file of which `initial` bytes are in the cache already."""
        self.update(initial)
        return self

    def __enter__(self) -> _Counter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float | None = 1) -> None:
        """Count `n` more bytes, or take back what was lost. Raises HubError as the class says."""
        n_bytes, come = int(n or 0), self._done - self._before
        if n_bytes < 0:
            self._n_in_vain = 0 if come > self._most else self._n_in_vain + 1
            self._most = max(self._most, come)
            if self._n_in_vain >= MAX_IN_VAIN:
                raise HubError(
                    f"{self._model}: {self._file.name} starts over again and again, and never came "
                    f"further than {self._most} bytes",
                    remedy="try again later, or over another network or proxy",
                )
        size_bytes = self._file.size_bytes
        if come + n_bytes > size_bytes + size_bytes // 8 + _SLACK_BYTES:
            raise HubError(
                f"{self._model}: more of {self._file.name} came than the {self._file.size_bytes} "
                "bytes that the Hub announced",
                remedy="check HF_ENDPOINT if that is set, or choose another repository",
            )
        self._done += n_bytes
        self._report(self._file.name, self._done, self._total)

    def close(self) -> None:
        """Do nothing: there is no bar."""

    def set_postfix_str(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no bar."""


def fetch_small(name: HubName, commit: str, file: HubFile, root: Path) -> bytes:
    """Return the content of a small file of a model, downloaded unless cached below `root`.

    Raises HubError if its size or digest differs or it is no small file, and as huggingface_hub
    (see `named_errors`).
    """
    if file.size_bytes > MAX_SMALL_BYTES:
        raise HubError(
            f"{name}: {file.name} has {file.size_bytes} bytes, at most {MAX_SMALL_BYTES} are read",
            remedy="report it to its authors",
        )
    counter = _Counter(lambda *_: None, name, file, 0, 0)
    return _fetch(name, commit, file, root, counter).read_bytes()


def _fetch(name: HubName, commit: str, file: HubFile, root: Path, counter: _Counter) -> Path:
    """Download a file and check its size and SHA-256."""
    from huggingface_hub import hf_hub_download

    if file.sha256:
        _go_on(name, commit, file, root, counter)
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


def _go_on(name: HubName, commit: str, file: HubFile, root: Path, counter: _Counter) -> None:
    """Download a large file to where huggingface_hub finds it, on from what has come of it.

    huggingface_hub itself begins anew. It is left to do so where another program downloads the
    file, where the Hub keeps it under another name than its SHA-256, and where it sends no ranges.
    """
    from filelock import FileLock, Timeout
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import are_symlinks_supported

    part = _part(name, file, root)
    whole = part.with_suffix("")
    if not are_symlinks_supported(root):  # from whole it would be copied
        whole = repo_folder(name, root) / "snapshots" / commit / file.name
    stored = get_hf_file_metadata(hf_hub_url(name.repo, file.name, revision=commit))
    if whole.exists() or stored.etag != file.sha256:
        return
    lock = root / ".locks" / repo_folder(name, root).name / f"{file.sha256}.lock"
    for folder in (lock.parent, part.parent, whole.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        begin = n_come = _n_come(part, file)
        try:
            with part.open("ab") as out:
                out.truncate(begin)
                counter.update(begin)
                for piece in HubRanges(name, commit).stream(file.name, begin, file.size_bytes):
                    out.write(piece)
                    n_come += len(piece)
                    counter.update(len(piece))
            rename(part, whole)
        except HubError:
            if n_come > begin:
                raise
            delete(part)
            counter.update(-begin)


def _part(name: HubName, file: HubFile, root: Path) -> Path:
    """Return where a file is kept as long as it is not whole."""
    return repo_folder(name, root) / "blobs" / f"{file.sha256 or file.name}.incomplete"


def _n_come(part: Path, file: HubFile) -> int:
    """Return how many bytes of a file have come, 0 where it cannot be what is asked for."""
    size_bytes = part.stat().st_size if part.exists() else 0
    return size_bytes if size_bytes <= file.size_bytes else 0


def _check(name: HubName, file: HubFile, path: Path) -> None:
    """Compare a file with the size and SHA-256 that the Hub states; delete one that differs."""
    why = ""
    if path.stat().st_size != file.size_bytes:
        why = f"{path.stat().st_size} bytes, not {file.size_bytes}"
    elif file.sha256 and _sha256_of(path) != file.sha256:
        why = "another SHA-256 than the Hub says"
    if why:
        delete(path.resolve())
        delete(path)
        raise HubError(f"{name}: {file.name} came with {why}, and was deleted", remedy=RESUME)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_proxies() -> None:
    """Raise HubError where the environment names a proxy that cannot be used.

    The message names the variables, not their values: those may hold a password.
    """
    import httpx2

    try:
        httpx2.Client(verify=False).close()  # it connects to nothing
    except ImportError as error:
        raise HubError(
            "the environment names a SOCKS proxy, which needs the package socksio",
            remedy=f"install it (pip install socksio), or name an HTTP proxy in {PROXY_VARIABLES}",
        ) from error
    except (ValueError, httpx2.InvalidURL) as error:
        raise HubError(
            f"the proxy named in {PROXY_VARIABLES} cannot be used",
            remedy="give http://HOST:PORT, with special characters of a password as %XX, or "
            "unset it",
        ) from error


def _where_to_look() -> str:
    """Return what to check if the Hub does not answer."""
    if getproxies():
        return f"the network and the proxy that the environment names ({PROXY_VARIABLES})"
    return "the network"


@contextlib.contextmanager
def named_errors(name: HubName) -> Iterator[None]:
    """Map exceptions of huggingface_hub to HubErrors with a remedy."""
    import httpx2
    from huggingface_hub import errors

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it warns of is said here
    check_proxies()
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated",
            remedy=f"accept its terms at https://huggingface.co/{name.repo}, then give a token "
            "with `hf auth login` or HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name}: {name.repo} has no revision {name.revision}",
            remedy="check what stands behind @, or --revision of `shardnet pull`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name} is neither a folder where it was asked for, nor a model of the Hub that may "
            "be read",
            remedy="check the name; for a private one give a token (`hf auth login`, HF_TOKEN)",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(
            f"{name} is not on this machine and downloads are switched off (--offline or "
            "HF_HUB_OFFLINE)",
            remedy="allow them, or copy the model",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise HubError(
            f"{name}: the Hub answered {status}", remedy=f"try again later: {RESUME}"
        ) from error
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise HubError(
            f"{name} is no folder here, and the Hub cannot be reached ({_first_line(error)})",
            remedy=f"check the name and {_where_to_look()}; {RESUME}",
        ) from error
    except OSError as error:
        raise HubError(f"{name}: {_first_line(error)}", remedy=RESUME) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:300]


REPORT_EVERY_S = 0.2

OnBytes = Callable[[int, int], None]
"""Takes (bytes done, bytes in all); called on the loop."""


async def pull_beside(
    name: HubName, on_bytes: OnBytes, log: Callable[[str], None], tokenizer_for: str = ""
) -> None:
    """Pull a model, reporting progress to `on_bytes` and lines for people to `log`.

    Cancelling stops at the next piece; a later pull goes on from there.
    `tokenizer_for` and errors as hub.pull.
    """
    from shardnet.cluster.download import hub

    loop = asyncio.get_running_loop()
    is_cancelled, reported_s = False, 0.0

    def report(file: str, done: int, total: int) -> None:
        """Pass progress to the loop; runs on the thread."""
        nonlocal reported_s
        if is_cancelled:
            raise CancelledRequestError(f"pulling {name} was cancelled")
        if done == total or time.monotonic() - reported_s > REPORT_EVERY_S:
            reported_s = time.monotonic()
            loop.call_soon_threadsafe(on_bytes, done, total)

    log(f"pulling {name} from the Hub")
    pull = partial(hub.pull, name, report, tokenizer_for=tokenizer_for)
    pulling = asyncio.wrap_future(DaemonThreads(1, "shardnet-pull").submit(pull))
    try:
        pulled = await shielded(pulling)
    except asyncio.CancelledError:
        is_cancelled = True
        raise
    log(f"pulled {name}: {pulled.n_new_bytes / 2**20:.0f} MiB into {pulled.folder}")
