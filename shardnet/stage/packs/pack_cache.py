"""Caches quantised, packed weights on disk, so that later starts need not quantise again.

Knows files, digests and the size limit. Damaged files, and weights packed from other files, count
as missing. Must not know how weights are packed, nor where the folder is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64

from shardnet.files import (
    ABOUT,
    CacheFolder,
    DiskShare,
    cache_folders,
    note_model,
    open_own,
    replacing,
    sweep_cache,
)
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.worker_pool import WorkerPool
from shardnet.stage_form import StageForm

if TYPE_CHECKING:
    from torch import Tensor

FORMAT: Final = 3
"""Counts up when the packed layout, the rounding or the digest changes."""
SHARE_OF_DISK: Final = 0.5
"""Packed weights take at most this share of the disk space that nothing else uses."""
_PIECE_BYTES: Final = 1 << 20
"""Bytes that are read or written, and checksummed, at a time: they fit the CPU's caches."""
_MAX_THREADS: Final = 8
"""Upper limit of reading threads: fewer saturate a machine's memory."""


class PackCache:
    """The packed weights of one checkpoint below `folder`.

    `identity` identifies the checkpoint's files, `model` is its display name. Nothing here raises:
    what cannot be read is missing, what cannot be written is not cached. One object serves one
    load: it scans the whole folder only when the space that it found is used up.
    """

    def __init__(self, folder: Path, identity: str, model: str, kind: Quantization) -> None:
        name = hashlib.sha256(f"{FORMAT} {kind.value} {identity}".encode()).hexdigest()[:32]
        self._all = folder
        self._folder = folder / name
        self._model = model
        self._kind = kind
        self._room_bytes = 0
        """Bytes that may be added before the folder must be scanned again."""
        self._is_full = False
        self._has_begun = False
        self._workers: WorkerPool | None = None

    @classmethod
    def used(cls, folder: str | Path | None, identity: str, form: StageForm) -> PackCache | None:
        """Return the cache of a stage of `form`, used now; None without quantisation or folder."""
        kind = Quantization.named(form.quant)
        if not folder or kind is None:
            return None
        cache = cls(Path(folder), identity, form.model, kind)
        cache.touch()
        return cache

    def get(
        self,
        names: Sequence[str],
        kind: Quantization,
        shape: tuple[int, ...],
        came: Callable[[int], None] = lambda n_bytes: None,
    ) -> Tensor | None:
        """Return the packed weights of the parameters `names`, uint8 of `shape`; None if missing.

        `came` is called with the number of bytes read since its last call; an exception it raises
        aborts the reading.
        """
        import torch

        path, packed = self._path(names, kind), torch.empty(shape, dtype=torch.uint8)
        view, ends = _bytes_of(packed), deque[int]()

        def alive() -> None:
            came(sum(ends.popleft() for _ in range(len(ends))))

        try:
            if path.stat().st_size != _DIGEST_BYTES + len(view):
                return None
            with os.fdopen(open_own(path), "rb", buffering=0) as file:
                expected = file.read(_DIGEST_BYTES)
            sums = self._read(path, view, ends, alive)
        except OSError:
            return None
        if ends:
            alive()
        return packed if _digest(sums) == expected else None

    def _read(
        self, path: Path, view: memoryview, ends: deque[int], alive: Callable[[], None]
    ) -> list[bytes]:
        """Fill `view` from a file; return the hashes of its pieces, each of which adds its size to
        `ends`.

        Raises OSError, also if the file is too short.
        """
        import torch

        begins = range(0, len(view), _PIECE_BYTES)
        sums = [b""] * len(begins)

        def read(number: int) -> None:
            piece = view[begins[number] :][:_PIECE_BYTES]
            with os.fdopen(open_own(path), "rb", buffering=0) as file:
                file.seek(_DIGEST_BYTES + begins[number])
                _read_whole(file, piece)
            sums[number] = xxh3_64(piece).digest()
            ends.append(len(piece))

        if self._workers is None:
            n_threads = min(torch.get_num_threads(), _MAX_THREADS)
            self._workers = WorkerPool(n_threads, "shardnet-packs")
        self._workers.run(read, range(len(begins)), alive)
        return sums

    def put(
        self,
        names: Sequence[str],
        kind: Quantization,
        packed: Tensor,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Write packed weights to the cache, unless the disk has no room for them.

        Once the folder has been deleted meanwhile, nothing more is written: a user wants it gone,
        or other weights need the space. `alive` is called after every piece; an exception it raises
        aborts the writing.
        """
        if self._is_full:
            return
        view = _bytes_of(packed.contiguous())
        with contextlib.suppress(OSError):
            self._begin()
            self._take_room(len(view))
            with replacing(self._path(names, kind)) as file:
                _write(file, view, alive)

    def place(self, names: Sequence[str], kind: Quantization) -> tuple[Path, int]:
        """Return the file of packed weights, cached or not, and their offset in it."""
        return self._path(names, kind), _DIGEST_BYTES

    def touch(self) -> None:
        """Record that these weights are in use."""
        with contextlib.suppress(OSError):
            os.utime(self._folder / ABOUT)

    def _take_room(self, n_bytes: int) -> None:
        """Reserve `n_bytes`. Raises OSError if there is no room; later calls raise too."""
        if n_bytes > self._room_bytes:
            self._is_full = True
            self._room_bytes = make_room(self._all, n_bytes, keep=self._folder)
            self._is_full = False
        self._room_bytes -= n_bytes

    def _begin(self) -> None:
        if not self._has_begun:
            note_model(self._folder, {"model": self._model, "quant": self._kind.value})
        self._has_begun = True

    def _path(self, names: Sequence[str], kind: Quantization) -> Path:
        key = json.dumps([kind.value, *names])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.packed"


def packed_models(folder: Path) -> list[CacheFolder]:
    """List the packed models below `folder`, most recently used first.

    A node that uses one has read it already, unless it streams its layers.
    """
    return cache_folders(folder, "quant", lambda place: sum(_sizes(place)))


def drop_pages(folder: Path) -> None:
    """Have the system forget the content of packed weights that it keeps in memory (Linux)."""
    if sys.platform != "linux":
        return
    for path in folder.glob("*/*.packed"):
        with contextlib.suppress(OSError), os.fdopen(open_own(path), "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_room(folder: Path, n_bytes: int, keep: Path) -> int:
    """Delete least recently used models, except `keep`, until `n_bytes` may be added.

    Returns how many bytes may be added, at least `n_bytes`. Raises OSError if it is less.
    """
    sweep_cache(folder)
    models = packed_models(folder)
    share = DiskShare.of(
        SHARE_OF_DISK,
        used_bytes=sum(model.size_bytes for model in models),
        free_bytes=shutil.disk_usage(folder).free,
    )

    def delete(model: CacheFolder) -> int | None:
        if model.folder == keep:
            return None
        model.remove()
        return model.size_bytes

    share.evict(n_bytes, reversed(models), delete)
    if share.exceeds_limit(n_bytes):
        raise OSError("packed weights have their share of the disk")
    return share.limit_bytes - share.used_bytes


def _sizes(folder: Path) -> Iterator[int]:
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has finished or deleted it
            yield file.stat().st_size


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # numpy's arrays are buffers, which its types do not say
    return memoryview(array).cast("B")


def _digest(sums: Iterable[bytes]) -> bytes:
    """Combine the XXH3 hashes of all pieces, in their order, into one digest.

    Files on a disk meet damage, not attacks, and XXH3 is many times as fast as SHA-256.
    """
    return hashlib.sha256(b"".join(sums)).digest()


_DIGEST_BYTES: Final = len(_digest(()))


def _write(file: RawIOBase, view: memoryview, alive: Callable[[], None]) -> None:
    """Write a digest and what it is of. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        with contextlib.suppress(
            OSError
        ):  # not supported everywhere; avoids growing the file repeatedly
            os.posix_fallocate(file.fileno(), 0, _DIGEST_BYTES + len(view))
    file.seek(_DIGEST_BYTES)
    sums = []
    for begin in range(0, len(view), _PIECE_BYTES):
        piece = view[begin : begin + _PIECE_BYTES]
        sums.append(xxh3_64(piece).digest())
        while piece:
            piece = piece[file.write(piece) :]
        alive()
    file.seek(0)
    file.write(_digest(sums))


def _read_whole(file: RawIOBase, view: memoryview) -> None:
    """Fill `view` from an open file. Raises OSError if the file is too short."""
    while view:
        n_bytes = file.readinto(view)
        if not n_bytes:
            raise OSError("packed weights end too early")
        view = view[n_bytes:]
