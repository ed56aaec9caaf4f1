"""Files of torch.save: read without torch, the same tensors, and no pickle ever run."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.models.checkpoints import make_gpt2, make_llama
from support.models.torch_checkpoints import to_torch_files

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.torch_files import read_torch_file
from shardnet.checkpoint.formats.torch_pickle import pickled_tensors
from shardnet.checkpoint.tensors.stored_tensor import FileState, read_stored
from shardnet.errors import CheckpointError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"), with_tokenizer=False)


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_tensors_as_in_safetensors(
    dtype: torch.dtype, n_files: int, tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "source", dtype=dtype, num_hidden_layers=2)
    kept = load_file(source / "model.safetensors")
    folder = to_torch_files(source, tmp_path / "torch", n_files)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == kept.keys()
    for name, tensor in kept.items():
        read = checkpoint.read(name)
        assert read.dtype is dtype
        assert torch.equal(read, tensor)
    assert sum(checkpoint.bytes_read.values()) == sum(tensor.nbytes for tensor in kept.values())


def test_gpt2_with_its_prefix(tmp_path: Path) -> None:
    source = make_gpt2(tmp_path / "source", with_tokenizer=False)
    checkpoint = Checkpoint.open(to_torch_files(source, tmp_path / "torch"))
    kept = load_file(source / "model.safetensors")
    assert torch.equal(checkpoint.read("wte.weight"), kept["transformer.wte.weight"])


def test_opening_imports_no_torch(source: Path, tmp_path: Path) -> None:
    folder = to_torch_files(source, tmp_path / "torch")
    code = (
        "import sys; from shardnet.checkpoint.checkpoint import Checkpoint;"
        f"Checkpoint.open({str(folder)!r}).model_id; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    file = read_torch_file(path)
    return {
        name: read_stored(path.parent, info, FileState.of(path))
        for name, info in file.tensors.items()
    }


def test_views_of_one_storage_and_other_orders(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    model = torch.nn.Linear(3, 2)
    saved = collections.OrderedDict(
        whole=base,
        turned=base.T,
        column=base[:, 2],
        block=base[1:3, 2:4],
        scalar=torch.tensor(7),
        empty=torch.empty(0, 5),
        parameter=torch.nn.Parameter(base[2]),
        repeated=base[0, :1].expand(3),
        **model.state_dict(),
    )
    saved._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    for protocol in (2, 4):
        torch.save(saved, tmp_path / "views.bin", pickle_protocol=protocol)
        read = read_all(tmp_path / "views.bin")
        assert read.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(read[name], tensor.detach()), name


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    kind=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64]),
)
def test_any_tensors(
    shapes: list[list[int]], kind: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.bin"
    saved = {
        f"t{n}": torch.ones(shape).cumsum(0).to(kind) for n, shape in enumerate(shapes) if shape
    }
    torch.save(saved, path)
    read = read_all(path)
    assert read.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(read[name], tensor)
    file = read_torch_file(path)
    with zipfile.ZipFile(path) as archive:
        data = sum(i.file_size for i in archive.infolist() if "/data/" in i.filename)
    assert sum(n for _, n in file.heads) == file.size_bytes - data


class _Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


def with_pickle(folder: Path, data: bytes) -> None:
    """Put another pickle into the archive."""
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in (members | {name: data}).items():
            archive.writestr(member, content)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("place", ["alone", "as a value", "as a key"])
def test_a_pickle_that_wants_to_run_code_is_refused_and_runs_nothing(
    source: Path, tmp_path: Path, protocol: int, place: str
) -> None:
    folder = to_torch_files(source, tmp_path / "torch")
    marker = tmp_path / "ran"
    evil = _Runs(marker)
    saved = {"alone": evil, "as a value": {"a": evil}, "as a key": {evil: 1}}[place]
    with_pickle(folder, pickle.dumps(saved, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: its pickle ") as error:
        Checkpoint.open(folder)
    assert "names posix.system" in str(error.value) or "takes the step" in str(error.value)
    assert "nothing of it was" in str(error.value)
    assert not marker.exists()
    pickle.loads(pickle.dumps(evil))
    assert marker.exists(), "the test's own trap works"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
        (b"(S'true'\nios\nsystem\n.", "takes the step"),
        (b"\x80\x02c__builtin__\neval\nX\x01\0\0\x001\x85R.", "names __builtin__.eval"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "called with something else"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "takes the step NEWOBJ"),
        (b"\x80\x02ccollections\nOrderedDict\nX\x01\0\0\x00ab.", "sets attributes"),
        (b"\x80\x02}.", None),
        (b"\x80\x02K\x01.", "holds no dict"),
        (b"\x80\x02}X\x01\0\0\x00aK\x01s.", "the entry 'a' of its pickle is no tensor"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02h\x05.", "damaged"),
        (b"\x80\x02}", "damaged"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "damaged"),
        (b"", "damaged"),
        (b"\x00", "damaged"),
        (b"\x80\x02K\x01K\x01t.", "damaged"),
    ],
)
def test_pickles_that_torch_does_not_write(data: bytes, message: str | None) -> None:
    if message is None:
        assert pickled_tensors(data, "x.bin") == {}
        return
    with pytest.raises(CheckpointError, match=r"^x\.bin: .*" + message):
        pickled_tensors(data, "x.bin")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of pickletools
@settings(max_examples=300)
@given(data=st.data())
def test_any_pickle_is_a_dict_or_an_error(data: st.DataObject) -> None:
    valid = _pickle()
    at = data.draw(st.integers(0, len(valid) - 1))
    other = data.draw(st.binary(min_size=1, max_size=4))
    found = {}
    with contextlib.suppress(CheckpointError):
        found = pickled_tensors(valid[:at] + other + valid[at + len(other) :], "x.bin")
    assert all(isinstance(name, str) for name in found)


@cache
def _pickle() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(3, 4), "b": torch.nn.Parameter(torch.ones(2))}, file)
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def truncate(path: Path, size_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size_bytes)


def rezip(path: Path, method: int = zipfile.ZIP_STORED, **changes: bytes | None) -> None:
    """Write the archive anew; `changes` are members by the end of their name, None leaves out."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            changed = changes.get(name.rsplit("/", 1)[-1].replace(".", "_"), content)
            if changed is not None:
                archive.writestr(name, changed)


def patch_end(path: Path, at: int, data: bytes) -> None:
    """Put bytes into the record at the archive's end."""
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\5\6") + at
    content[place : place + len(data)] = data
    path.write_bytes(content)


def insert_hole(path: Path, n_bytes: int) -> None:
    """Put zeros that take no room on disk before the record at the end, as its directory."""
    content = path.read_bytes()
    place = content.rindex(b"PK\5\6")
    with path.open("r+b") as file:
        file.seek(place + n_bytes)
        file.write(content[place:])
    end = struct.pack("<II", n_bytes, place)
    with path.open("r+b") as file:
        file.seek(place + n_bytes + 12)
        file.write(end)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: truncate(p, 0), "not a zip archive of torch.save"),
    "legacy": (
        lambda p: torch.save({"a": torch.ones(1)}, p, _use_new_zipfile_serialization=False),
        "of torch before 1.6; save it anew",
    ),
    "cut": (lambda p: truncate(p, 50_000), "damaged zip archive: File is not a zip file"),
    "compressed": (lambda p: rezip(p, zipfile.ZIP_DEFLATED), "is compressed"),
    "no pickle": (lambda p: rezip(p, data_pkl=None), "it holds no data.pkl"),
    "a storage is missing": (lambda p: rezip(p, **{"3": None}), "the storage '3' of tensor"),
    "a storage is shorter": (lambda p: rezip(p, **{"3": b"1234"}), "of another size than"),
    "big-endian": (lambda p: rezip(p, byteorder=b"big"), "not little-endian"),
    "a directory of 2 GiB": (
        lambda p: insert_hole(p, 1 << 31),
        "a directory of 2147483648 bytes, at most 2097152",
    ),
    "a directory larger than the file": (
        lambda p: (rezip(p), patch_end(p, 12, struct.pack("<I", 1 << 31))),
        "Bad offset for central directory",
    ),
    "a directory cut short": (
        lambda p: (rezip(p), patch_end(p, 12, struct.pack("<I", 60))),
        "for central directory",
    ),
    "a directory beyond the end": (
        lambda p: (rezip(p), patch_end(p, 16, struct.pack("<I", 1 << 31))),
        "Invalid argument|is not where the directory says",
    ),
    "a directory in the middle": (
        lambda p: (rezip(p), patch_end(p, 16, struct.pack("<I", 1000))),
        "is not where the directory says",
    ),
    "a zip64 end that is none": (
        lambda p: (rezip(p), patch_end(p, 16, b"\xff" * 4)),
        "Invalid argument|is not where the directory says",
    ),
    "no archive of torch": (
        lambda p: zipfile.ZipFile(p, "w").writestr("a.txt", "x") or None,
        "it holds no data.pkl, so torch.save did not write it",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_damaged_file_is_named(source: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    folder = to_torch_files(source, tmp_path / "torch")
    damage(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint.open(folder)
    assert "pytorch_model.bin: " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tensor_that_lies_beyond_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(3, 4), "b": torch.nn.Parameter(torch.ones(2))}, path)
    with_pickle(tmp_path, _pickle().replace(b"K\x03K\x04\x86", b"K\x03K\x05\x86"))
    with pytest.raises(CheckpointError, match=r"tensor a of shape \[3, 5\] lies beyond its stor"):
        read_torch_file(path)


def test_safetensors_go_before_torch(source: Path, tmp_path: Path) -> None:
    folder = to_torch_files(source, tmp_path / "torch")
    shutil.copy(source / "model.safetensors", folder)
    (folder / "pytorch_model.bin").write_bytes(b"never looked at")
    assert Checkpoint.open(folder).model_id == Checkpoint.open(source).model_id
