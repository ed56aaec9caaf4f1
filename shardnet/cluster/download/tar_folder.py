"""Unpacks a model that came as a tar file. No path leaves the folder, and nothing but files comes.

Must not know from where the tar file came.
"""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final

from shardnet.cluster.machine.disk_room import check_room
from shardnet.errors import CheckpointError

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_MEMBERS: Final = 10_000
_PIECE_BYTES: Final = 1 << 20


def folder_name(tar_name: str) -> str | None:
    """Return the name of the folder that a tar file is unpacked to; None for another file."""
    for suffix in SUFFIXES:
        if tar_name.lower().endswith(suffix) and len(tar_name) > len(suffix):
            return tar_name[: -len(suffix)]
    return None


def unpack(tar: Path, folder: Path, report: Callable[[str], None]) -> None:
    """Unpack `tar` into `folder`, which is not there yet. `report` takes the name of each file.

    Where all is in one folder of the tar file, that one becomes `folder`. Raises CheckpointError,
    which names the member, for a link, a device or a path that leads out, for a damaged file, and
    where the disk has no room; then nothing of it is left.
    """
    try:
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise CheckpointError(f"{tar} cannot be unpacked to {folder}: {error}") from error
    try:
        with tarfile.open(tar) as opened:
            for number, member in enumerate(opened):
                if number == MAX_MEMBERS:
                    raise CheckpointError(f"{tar} has more than {MAX_MEMBERS} members; refused")
                _unpack_member(tar, opened, member, staged, report)
        inside = list(staged.iterdir())
        is_one = len(inside) == 1 and inside[0].is_dir()
        (inside[0] if is_one else staged).rename(folder)
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise CheckpointError(f"{tar} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{tar} cannot be unpacked to {folder}: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    folder.chmod(0o755)  # mkdtemp's are for nobody else


def _unpack_member(
    tar: Path,
    opened: tarfile.TarFile,
    member: tarfile.TarInfo,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or set(member.name) & set("\\:\0"):
        raise CheckpointError(f"{tar}: {member.name!r} leads out of the folder; refused")
    target = folder.joinpath(*path.parts)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    source = opened.extractfile(member) if member.isreg() else None
    if source is None:
        raise CheckpointError(f"{tar}: {member.name!r} is neither a file nor a folder; refused")
    check_room(
        f"{tar}: {member.name!r}",
        member.size,
        folder.parent,
        else_do="choose another folder with --to",
        error=CheckpointError,
    )
    report(member.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("xb") as file:
        shutil.copyfileobj(source, file, _PIECE_BYTES)
