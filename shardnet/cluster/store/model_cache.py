"""Cache replicas, models fetched from other nodes, on disk within a size limit.

Knows where replicas are, which are in use by any process of this machine, and which to evict first.
Must not know links, nor the content of a replica.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardnet.checkpoint.replica import disk_error
from shardnet.checkpoint.sparse_files import disk_bytes
from shardnet.errors import BusyError, CapacityError, UsageError
from shardnet.files import (
    DiskShare,
    NotOwnError,
    check_own_folder,
    make_own_folder,
    open_own,
    read_own,
    rename,
    try_lock,
    write_whole,
)
from shardnet.permissions import make_private_folder

DEFAULT_SHARE_OF_DISK = 0.5
"""Without a limit, replicas take at most this share of the disk's free space and their own."""
LOCK_S = 5.0
"""How long a lock is waited for that another process holds."""
LOCK_EVERY_S = 0.05
MAX_HINT_BYTES = 1 << 16
LEFTOVER_S = 86400.0
"""Temporary folders older than this are left over from killed processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A cached replica. `name` is the path it was last requested by, `used_s` the time (Unix, s).

    `size_bytes` counts the bytes on disk, `whole_bytes` those of the whole model.
    """

    model_id: str
    name: str
    size_bytes: int
    whole_bytes: int
    used_s: float
    in_use: bool


class ModelCache:
    """The replicas below `folder`, at most `limit_bytes` in all (None: a share of the disk)."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._models = folder / "models"
        self._paths = folder / "paths"

    def find(self, model_id: str) -> Path | None:
        """Return the folder of a replica, None if there is none.

        Raises CheckpointError if it is a link, or another user's.
        """
        folder = self._models / model_id
        if not _is_id(model_id) or not os.path.isdir(folder):
            return None
        try:
            if folder.is_symlink():
                raise NotOwnError(folder, "it is a link")
            check_own_folder(folder)
        except OSError as error:
            raise disk_error(error, folder) from error
        return folder

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Create a temporary folder beside the replicas, deleted at the end unless installed.

        Raises CapacityError or CheckpointError if it cannot be created.
        """
        try:
            make_own_folder(self._models)
            folder = self._models / f".new-{secrets.token_hex(8)}"
            make_private_folder(folder)
        except OSError as error:
            raise disk_error(error, self._models) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def install(self, staged: Path, model_id: str) -> Path:
        """Move a staged replica to its folder, unless one is there by now; return that folder.

        Raises CapacityError or CheckpointError if it cannot be moved.
        """
        folder = self._models / _checked(model_id)
        try:
            rename(staged, folder)
        except OSError as error:
            if not folder.is_dir():
                raise disk_error(error, folder) from error
        return folder

    # --- which path means which model

    def remember(self, path: str, model_id: str) -> None:
        """Record that a path meant this model, for `recall`. Failing to is no error."""
        hint = json.dumps({"path": path, "id": _checked(model_id)})
        with contextlib.suppress(OSError):
            write_whole(self._hint(path), hint.encode())

    def recall(self, path: str) -> str | None:
        """Return the id of the model that a path meant last, None if unknown."""
        hint = _read_hint(self._hint(path))
        return hint[1] if hint is not None and hint[0] == path else None

    def _hint(self, path: str) -> Path:
        name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return self._paths / f"{name}.json"

    # --- use and eviction

    def use(self, model_id: str) -> ModelUse:
        """Protect a replica from deletion, by any process, until the use is closed.

        Raises UsageError for what is no model id, BusyError if another process holds the lock for
        more than LOCK_S, CheckpointError if the lock is not this user's own.
        """
        try:
            return ModelUse(self._lock_path(model_id))
        except OSError as error:
            raise disk_error(error, self._models) from error

    def models(self) -> list[CachedModel]:
        """List all replicas, the one used last first.

        Raises CheckpointError if the folder cannot be read.
        """
        try:
            names = {model_id: path for path, model_id in self._hints()}
            found = []
            for folder in self._models.glob("*"):
                with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                    if _is_id(folder.name) and folder.is_dir():
                        found.append(self._describe(folder, names.get(folder.name, "")))
        except OSError as error:
            raise disk_error(error, self._models) from error
        return sorted(found, key=lambda model: -model.used_s)

    def remove(self, model_id: str) -> int:
        """Delete a replica; return the bytes freed.

        Raises BusyError if a process of this machine uses it, UsageError if there is none.
        """
        missing = UsageError(
            f"{self._models}: there is no model {model_id[:12]} here",
            remedy="`shardnet cache ls` lists them",
        )
        folder = self.find(model_id)
        if folder is None:
            raise missing
        lock = self._lock_path(model_id)
        try:
            with os.fdopen(open_own(lock, os.O_RDWR | os.O_CREAT), "rb+") as file:
                if not try_lock(file.fileno(), is_shared=False):
                    raise BusyError(
                        f"model {model_id[:12]} is in use by a node of this machine",
                        remedy="run `shardnet unload`, or stop the node",
                    )
                freed = _size_bytes(folder)
                self._delete(folder)
        except FileNotFoundError as error:  # another process was faster
            raise missing from error
        except OSError as error:
            raise disk_error(error, folder) from error
        return freed

    def discard(self, model_id: str) -> None:
        """Delete a damaged replica, if there is one, whoever has asked for it.

        Raises CheckpointError if it cannot be deleted.
        """
        folder = self.find(model_id)
        if folder is not None:
            try:
                self._delete(folder)
            except OSError as error:
                raise disk_error(error, folder) from error

    def _delete(self, folder: Path) -> None:
        """Delete a replica, out of its place first. Raises OSError if it stays there."""
        doomed = self._models / f".old-{secrets.token_hex(8)}"
        make_private_folder(doomed)
        try:
            rename(folder, doomed / folder.name)
        finally:
            shutil.rmtree(doomed, ignore_errors=True)

    def make_room(self, n_bytes: int, keep: str) -> list[CachedModel]:
        """Evict the least recently used replicas until `n_bytes` more fit; return the evicted ones.

        Replicas in use and the one with the id `keep` stay. Raises CapacityError, and deletes
        nothing, if that is not enough, CheckpointError if the folder cannot be read.
        """
        self._sweep()
        share, with_all, unused = self._share(keep)
        self._check_room(with_all, n_bytes)  # else all would be deleted in vain

        def delete(model: CachedModel) -> int | None:
            try:
                return self.remove(model.model_id)
            except BusyError:
                return None
            except UsageError:  # it is gone by now
                return model.size_bytes

        deleted = share.evict(n_bytes, unused, delete)
        self._check_room(share, n_bytes)
        return deleted

    def room_bytes(self, keep: str) -> int:
        """Return how many bytes `make_room` can make room for. Raises CheckpointError as that."""
        _, share, _ = self._share(keep)
        return max(0, min(share.free_bytes, share.limit_bytes - share.used_bytes))

    def _share(self, keep: str) -> tuple[DiskShare, DiskShare, list[CachedModel]]:
        """Return the share of replicas now, that without the ones that may go, and these."""
        models = self.models()
        used = sum(model.size_bytes for model in models)
        try:
            there = next(one for one in (self._models, *self._models.parents) if one.exists())
            free = shutil.disk_usage(there).free
        except OSError as error:
            raise disk_error(error, self._models) from error
        share = DiskShare.of(DEFAULT_SHARE_OF_DISK, used_bytes=used, free_bytes=free)
        if self._limit_bytes is not None:
            share.limit_bytes = self._limit_bytes
        unused = [m for m in reversed(models) if m.model_id != keep and not m.in_use]
        spare = sum(model.size_bytes for model in unused)
        return share, replace(share, used_bytes=used - spare, free_bytes=free + spare), unused

    def _check_room(self, share: DiskShare, n_bytes: int) -> None:
        """Raise CapacityError if `n_bytes` more do not fit within the limit and on the disk."""
        if share.exceeds_limit(n_bytes):
            raise CapacityError(
                f"{self._models}: {n_bytes} bytes of weights more would make "
                f"{share.used_bytes + n_bytes}, above the limit of {share.limit_bytes}",
                remedy="raise --cache-limit, or run `shardnet cache rm`",
            )
        if not share.has_room(n_bytes):
            raise CapacityError(
                f"{self._models}: {n_bytes} bytes of weights are to come and {share.free_bytes} "
                "are free",
                remedy="free room there, or name another place with SHARDNET_CACHE_DIR",
            )

    def _sweep(self) -> None:
        """Delete temporary folders that killed processes have left."""
        for folder in [*self._models.glob(".new-*"), *self._models.glob(".old-*")]:
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime < time.time() - LEFTOVER_S:
                    shutil.rmtree(folder)

    def _lock_path(self, model_id: str) -> Path:
        return self._models / f"{_checked(model_id)}.lock"

    def _describe(self, folder: Path, name: str) -> CachedModel:
        lock = self._lock_path(folder.name)
        try:
            used_s = lock.stat().st_mtime
        except OSError:
            used_s = folder.stat().st_mtime
        files = [file.stat() for file in folder.iterdir()]
        return CachedModel(
            model_id=folder.name,
            name=name,
            size_bytes=_size_bytes(folder),
            whole_bytes=sum(status.st_size for status in files),
            used_s=used_s,
            in_use=_is_locked(lock),
        )

    def _hints(self) -> Iterator[tuple[str, str]]:
        files = sorted(self._paths.glob("*.json"), key=lambda file: file.stat().st_mtime)
        return (hint for file in files if (hint := _read_hint(file)) is not None)


class ModelUse:
    """A shared lock on a replica; deletion needs it exclusively.

    Lock files stay when a replica is deleted: a new file would be another lock.
    """

    def __init__(self, lock: Path) -> None:
        make_own_folder(lock.parent)
        self._lock = lock
        self._file = os.fdopen(open_own(lock, os.O_RDWR | os.O_CREAT), "rb+")
        try:
            _lock_shared(self._file.fileno(), lock)
            self._note_time()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """End the use: it was used until now, for however long."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._note_time()
        self._file.close()

    def _note_time(self) -> None:
        os.utime(self._file.fileno() if os.utime in os.supports_fd else self._lock)


def _checked(model_id: str) -> str:
    """Return `model_id`. Raises UsageError if it is none: it becomes part of a path."""
    if not _is_id(model_id):
        raise UsageError(
            f"{model_id[:80]!r} is no model id, which has 64 hex digits",
            remedy="name the model as `shardnet cache ls` lists it",
        )
    return model_id


def _is_id(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _read_hint(file: Path) -> tuple[str, str] | None:
    try:
        match json.loads(read_own(file, MAX_HINT_BYTES)):
            case {"path": str(path), "id": str(model_id)}:
                return path, model_id
    except (OSError, ValueError):
        pass
    return None


def _size_bytes(folder: Path) -> int:
    """Return the bytes on disk, without the holes of sparse files where the system counts them."""
    return sum(map(disk_bytes, folder.iterdir()))


def _is_locked(lock: Path) -> bool:
    try:
        with os.fdopen(open_own(lock), "rb") as file:
            return not try_lock(file.fileno(), is_shared=False)
    except OSError:
        return False


def _lock_shared(file: int, path: Path) -> None:
    """Lock an open file, shared; waits while a replica is being deleted.

    Raises BusyError after LOCK_S.
    """
    until_s = time.monotonic() + LOCK_S
    while not try_lock(file, is_shared=True):
        if time.monotonic() >= until_s:
            raise BusyError(
                f"{path}: another process has held this lock for {LOCK_S:g} s",
                remedy="ask again when the model is deleted, or end that process",
            )
        time.sleep(LOCK_EVERY_S)
