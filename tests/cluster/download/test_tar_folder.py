"""Tar files: what is unpacked, and what is refused."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.full_disk import full_disk

from shardnet.cluster.download import tar_folder
from shardnet.cluster.download.tar_folder import folder_name, unpack
from shardnet.errors import CheckpointError

WEIGHTS = random.Random(1).randbytes(100_000)


def make_tar(path: Path, files: dict[str, bytes], *more: tarfile.TarInfo) -> Path:
    mode = {".gz": "w:gz", ".xz": "w:xz", ".bz2": "w:bz2"}.get(path.suffix, "w")
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o4755
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info)
    return path


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".tar.bz2"])
@pytest.mark.parametrize("top", ["", "./", "model-v1/"])
def test_the_files_come_out(tmp_path: Path, suffix: str, top: str) -> None:
    files = {f"{top}config.json": b"{}", f"{top}sub/model.safetensors": WEIGHTS}
    tar = make_tar(tmp_path / f"m{suffix}", files)
    seen: list[str] = []
    unpack(tar, tmp_path / "m", seen.append)
    assert (tmp_path / "m" / "config.json").read_bytes() == b"{}"
    assert (tmp_path / "m" / "sub" / "model.safetensors").read_bytes() == WEIGHTS
    assert len(seen) == 2
    assert not (tmp_path / "m" / "config.json").stat().st_mode & 0o4111
    assert {path.name for path in tmp_path.iterdir()} == {tar.name, "m"}


LEADS_OUT: dict[str, Callable[[Path], Path]] = {
    "parent": lambda tar: make_tar(tar, {"config.json": b"{}", "../evil": b"x"}),
    "parent inside": lambda tar: make_tar(tar, {"a/../../evil": b"x"}),
    "absolute": lambda tar: make_tar(tar, {"/tmp/evil": b"x"}),
    "windows": lambda tar: make_tar(tar, {"c:\\evil": b"x"}),
}
NO_FILE: dict[str, Callable[[Path], Path]] = {
    "symlink": lambda tar: make_tar(tar, {}, member("link", tarfile.SYMTYPE, "/etc/passwd")),
    "hard link": lambda tar: make_tar(tar, {"a": b"x"}, member("link", tarfile.LNKTYPE, "a")),
    "device": lambda tar: make_tar(tar, {}, member("zero", tarfile.CHRTYPE)),
    "pipe": lambda tar: make_tar(tar, {}, member("pipe", tarfile.FIFOTYPE)),
}


@pytest.mark.parametrize("what", LEADS_OUT)
def test_no_path_leaves_the_folder(tmp_path: Path, what: str) -> None:
    tar = LEADS_OUT[what](tmp_path / "m.tar")
    with pytest.raises(CheckpointError, match="evil' leads out of the folder"):
        unpack(tar, tmp_path / "m", lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar"}


@pytest.mark.parametrize("what", NO_FILE)
def test_nothing_but_files_comes(tmp_path: Path, what: str) -> None:
    tar = NO_FILE[what](tmp_path / "m.tar")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        unpack(tar, tmp_path / "m", lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar"}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".tar.bz2"])
def test_a_damaged_tar_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    tar = make_tar(tmp_path / f"m{suffix}", {"a": WEIGHTS, "b": WEIGHTS})
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        unpack(tar, tmp_path / "m", lambda _: None)
    tar.write_bytes(b"no tar at all")
    with pytest.raises(CheckpointError, match="is damaged"):
        unpack(tar, tmp_path / "m", lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {tar.name}


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = make_tar(tmp_path / "m.tar", {str(n): b"" for n in range(4)})
    monkeypatch.setattr(tar_folder, "MAX_MEMBERS", 3)
    with pytest.raises(CheckpointError, match="more than 3 members"):
        unpack(tar, tmp_path / "m", lambda _: None)
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 60
    (tmp_path / "m.tar").write_bytes(huge.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(CheckpointError, match=r"'huge' needs .* GiB more in .* make room"):
        unpack(tar, tmp_path / "m", lambda _: None)


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "m.tar", {"a": WEIGHTS})
    with full_disk(1000), pytest.raises(CheckpointError, match=r"cannot be unpacked .* too large"):
        unpack(tar, tmp_path / "m", lambda _: None)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be unpacked to .* Not a directory"):
        unpack(tar, tmp_path / "file" / "m", lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"m.tar", "file"}


@pytest.mark.parametrize(
    ("name", "folder"),
    [("a.tar", "a"), ("b-1.2.TAR.GZ", "b-1.2"), ("c.tgz", "c"), ("d.gguf", None), (".tar", None)],
)
def test_which_files_are_unpacked(name: str, folder: str | None) -> None:
    assert folder_name(name) == folder
