"""Files that strangers made: every case of the corpus is refused by name, before it costs much."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile import small_files as small
from support.hostile.file_readers import read_everything
from support.hostile.hostile_files import CASES, FOLDER, Case
from support.hostile.mutate_files import fuzz_files
from support.hostile.small_files import GOOD, Files

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats import (
    gguf_header,
    safetensors_files,
    torch_pickle,
)
from shardnet.checkpoint.replica import TensorFiles
from shardnet.checkpoint.tensors import checkpoint_files, json_files, stored_tensor
from shardnet.checkpoint.tensors.stored_tensor import FileTotals, TensorFile, in_order
from shardnet.errors import CheckpointError, shown
from shardnet.runtime.loading.measuring import measure_disk
from shardnet.stage.streaming.buffers import FilePart
from shardnet.tokenizers.backends.token_files import MAX_LINES, read_lines
from shardnet.tokenizers.chat.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
from shardnet.tokenizers.formats.tokenizer_files import read_tokenizer

ROOT = Path(__file__).parents[2]


def make(folder: Path, base: str = "safetensors", **more: bytes) -> Path:
    """Write a good checkpoint, with other content for some files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: Files = GOOD[base]() | more
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("base", list(GOOD))
def test_the_good_file_next_to_the_hostile_ones_passes(base: str, tmp_path: Path) -> None:
    assert read_everything(make(tmp_path, base)) == []


@pytest.mark.parametrize("name", list(CASES))
def test_a_hostile_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    make(tmp_path, case.base)
    stored = {path.name: path.read_bytes() for path in (FOLDER / name).iterdir()}
    assert stored == case.files, "run `python -m support.hostile.hostile_files` in tests/"
    for file, content in stored.items():
        (tmp_path / file).write_bytes(content)
    messages = [str(error) for error in read_everything(tmp_path)]
    expected = [m for m in messages if case.refused in m and str(tmp_path / case.file) in m]
    assert expected, messages
    assert all(len(m) < 1000 and m.isprintable() for m in messages)


def test_the_corpus_has_every_case_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(CASES)
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", readme, re.M)) >= set(CASES)


class Never:
    """A parser that must not be reached."""

    def decode(self, data: object) -> object:
        """Fail the test."""
        raise AssertionError("parsed")

    run = __call__ = decode


def entries(n: int, entry: bytes) -> bytes:
    """A JSON object of `n` equal entries under different keys."""
    return b"{" + b",".join(b'"%d":%b' % (number, entry) for number in range(n)) + b"}"


def hole(path: Path, n_bytes: int) -> None:
    """Make a file of so many zeros that takes no room."""
    with path.open("wb") as file:
        file.truncate(n_bytes)


LARGE_HEADERS: dict[str, Callable[[], bytes]] = {
    "too many keys": lambda: entries(stored_tensor.MAX_FILE_TENSORS * 5 + 2, b"1"),
    "empty lists": lambda: b'{"a":[' + b"[]," * (stored_tensor.MAX_FILE_TENSORS * 10) + b"0,0]}",
}


@pytest.mark.parametrize("name", list(LARGE_HEADERS))
def test_a_large_header_is_refused_before_it_is_parsed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "_entries", Never())
    folder = make(tmp_path, **{"model.safetensors": small.safetensors(LARGE_HEADERS[name]())})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* \(more than \d+ times"):
        Checkpoint.open(folder)


def test_a_header_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    folder = make(tmp_path)
    hole(folder / "model.safetensors", 1 << 30)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", stored_tensor.MAX_HEADER_BYTES + 1))
    with pytest.raises(CheckpointError, match=r"header claims 33554433, at most 33554432"):
        Checkpoint.open(folder)


def test_a_long_entry_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "_ENTRY", Never())
    header = b'{"a":{"shape":[' + b"1," * 1000 + b"1]}}"
    folder = make(tmp_path, **{"model.safetensors": small.safetensors(header)})
    with pytest.raises(CheckpointError, match="entry of tensor a is damaged"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":[' + b"0," * json_files.MAX_VALUES + b"0,0]}", "more than 262144 times ','"),
        (b'{"a":' + b"[" * (json_files.MAX_VALUES + 1), r"more than 262144 times '\['"),
        (b'{"a":"' + b"a" * json_files.MAX_JSON_BYTES + b'"}', "at most 16777216"),
        (b'{"a":' + b"1" * 401 + b"}", "more than 400 digits"),
        (b'{"a":0.' + b"1" * 401 + b"}", "more than 400 digits"),
        (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "nested more than 32 deep"),
        (b'{"\\\\":' + b'{"a":' * 32 + b'"]"' + b"}" * 33, "nested more than 32 deep"),
        (b'{"a":' + b"[" * 5000, "brackets that do not match"),
    ],
)
def test_a_json_text_is_refused_before_it_is_parsed(
    text: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "_parse", Never())
    with pytest.raises(CheckpointError, match=rf"^x\.json: not readable as JSON \(.*{why}"):
        json_files.parse_object(text, Path("x.json"))


def test_large_json_is_not_parsed_in_c_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value: dict[str, Any] = {str(n): n for n in range(20_000)}
    value |= {"deep": {"a": [[0.5, "]}", {"b": "\\"}, None]] * 900}, "odd": float("-inf")}
    text = json.dumps(value).encode()
    monkeypatch.setattr(json_files, "_AT_ONCE", 1 << 20)
    in_c = json_files.parse_object(text, Path("x.json"), distinct=True)
    monkeypatch.undo()
    monkeypatch.setattr("json.decoder.scanner.c_make_scanner", Never())
    monkeypatch.setattr("json.scanner.make_scanner", Never())
    monkeypatch.setattr(json, "JSONDecoder", Never())
    assert json_files.parse_object(text, Path("x.json"), distinct=True) == in_c == value


def test_the_most_that_is_allowed() -> None:
    near = b'{"a":' + b"[" * 31 + b"]" * 31 + b',"b":' + b"1" * 400 + b"}"
    assert json_files.parse_object(near, Path("x.json"))["b"] == int("1" * 400)


def test_a_key_that_comes_twice_deep_inside_is_named() -> None:
    with pytest.raises(CheckpointError, match="the key 'b' is there twice"):
        json_files.parse_object(b'{"a":[{"b":1,"b":1}]}', Path("x"), distinct=True)
    assert json_files.parse_object(b'{"a":[{"b":":"},{"b":1}]}', Path("x"), distinct=True)


def test_a_large_index_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "YIELDING", Never())
    folder = make(tmp_path, "indexed")
    index = folder / "model.safetensors.index.json"
    index.write_bytes(b'{"weight_map":' + entries(stored_tensor.MAX_TENSORS + 1200, b'"a"') + b"}")
    with pytest.raises(CheckpointError, match=r"index\.json: .* more than 263168 times|263168"):
        Checkpoint.open(folder)
    hole(index, safetensors_files.MAX_INDEX_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"index\.json has 33554433 bytes, at most 33554432"):
        Checkpoint.open(folder)


def test_an_index_of_the_most_files() -> None:
    one = TensorFile(name="a", size_bytes=0, heads=((0, 8),), sha256="", tensors={})
    totals = FileTotals(Path("x"))
    for _ in range(stored_tensor.MAX_FILES):
        totals.add(one)
    with pytest.raises(CheckpointError, match="x: more than 4096 tensor files up to a"):
        totals.add(one)
    many = {str(n): None for n in range(stored_tensor.MAX_TENSORS + 1)}
    large = TensorFile(name="b", size_bytes=0, heads=(), sha256="", tensors=many)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="x: more than 262144 tensors up to b"):
        FileTotals(Path("x")).add(large)


def test_many_tensors_are_sorted_a_part_at_a_time() -> None:
    numbers = [n * 7919 % 100_003 for n in range(100_003)]
    assert list(in_order(numbers, lambda n: n)) == sorted(numbers)
    assert list(in_order([], lambda n: n)) == []


class TestPickle:
    @pytest.mark.parametrize(
        ("steps", "why"),
        [
            (b"N0" * 9, "takes the step POP"),
            (b"}" + b"Nr\0\0\0\0" * torch_pickle.MAX_STEPS, "values wait"),
            (b"N" * (torch_pickle.MAX_STACK + 1), "more than 16384 values wait"),
            (b"}" + b"q\0" * 5000, "more than 5000 steps"),
            (b"X\xff\xff\xff\xff", "4294967295 bytes at"),
            (b"\x8b\xff\xff\xff\x7f", "takes the step LONG4"),
            (b"F" + b"1" * 1_000_000 + b"\n", "takes the step FLOAT"),
            (b"L" + b"1" * 1_000_000 + b"\n", "takes the step LONG"),
        ],
    )
    def test_steps(self, steps: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if "steps" in why:
            monkeypatch.setattr(torch_pickle, "MAX_STEPS", 5000)
        with pytest.raises(CheckpointError, match=rf"^x\.bin: .*{why}"):
            torch_pickle.pickled_tensors(b"\x80\x02" + steps, "x.bin")

    def test_too_many_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_pickle, "_Machine", Never())
        with pytest.raises(CheckpointError, match="its pickle has 8388609 bytes"):
            torch_pickle.pickled_tensors(bytes(torch_pickle.MAX_PICKLE_BYTES + 1), "x.bin")


@pytest.mark.parametrize(
    ("cap", "why"),
    [
        ("MAX_TEXTS", "8 texts with it, at most 7"),
        ("MAX_ELEMENTS", "claims 4 entries, but .* at most 3 entries"),
    ],
)
def test_what_arrays_of_a_gguf_hold_is_counted_over_all_of_them(
    cap: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "gguf")
    assert Checkpoint.open(tmp_path)
    monkeypatch.setattr(gguf_header, cap, 7)
    more = small.GGUF_METADATA | {"tokenizer.ggml.merges": small.gguf_value(["a b"] * 4)}
    (tmp_path / "model.gguf").write_bytes(small.gguf(more, small.GGUF_TENSORS))
    with pytest.raises(CheckpointError, match=rf"merges': {why}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("alignment", [0, (1 << 20) + 1, "32"])
def test_an_alignment_that_no_gguf_has(alignment: object, tmp_path: Path) -> None:
    more = small.GGUF_METADATA | {"general.alignment": small.gguf_value(alignment)}
    (tmp_path / "model.gguf").write_bytes(small.gguf(more, small.GGUF_TENSORS))
    with pytest.raises(CheckpointError, match=r"general\.alignment: .* is not a number of bytes"):
        Checkpoint.open(tmp_path)


def test_long_files_of_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_bytes(b"\n" * (MAX_LINES + 1))
    with pytest.raises(CheckpointError, match=r"merges\.txt has 1048577 lines, at most 1048576"):
        read_lines(tmp_path / "merges.txt")
    make(tmp_path)
    hole(tmp_path / "chat_template.jinja", MAX_TEMPLATE_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja has 1048577 bytes"):
        ChatTemplate.find(tmp_path)


def test_a_value_in_a_message_is_short() -> None:
    value: object = [10**390] * 3000
    for _ in range(500):
        value = [value, "\x1b[2J" * 3000, {str(n): value for n in range(9)}]
    assert len(shown(value)) < 2000
    assert shown(value).isprintable()


SECRET = b"the content of another file"


@pytest.mark.parametrize(
    ("base", "name"),
    [(base, name) for base, files in GOOD.items() for name in files() if base != "indexed"]
    + [("indexed", "model-2.safetensors"), ("safetensors", "tokenizer.json")]
    + [("safetensors", "vocab.json"), ("safetensors", "replica.jsonl")],
)
class TestLinksAndSpecialFiles:
    """Whatever file of the folder is one."""

    def test_a_link_that_leaves(self, base: str, name: str, tmp_path: Path) -> None:
        folder = make(tmp_path / "model", base)
        outside = tmp_path / "outside"
        outside.write_bytes(GOOD[base]().get(name, SECRET))
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
        self._is_refused(folder, name, "is a link that leaves the checkpoint's folder")

    def test_a_fifo(self, base: str, name: str, tmp_path: Path) -> None:
        folder = make(tmp_path, base)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        self._is_refused(folder, name, "is a FIFO, expected a regular file")

    def test_a_folder(self, base: str, name: str, tmp_path: Path) -> None:
        folder = make(tmp_path, base)
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        self._is_refused(folder, name, "is a folder, expected a regular file")

    @staticmethod
    def _is_refused(folder: Path, name: str, why: str) -> None:
        messages = [str(error) for error in read_everything(folder)]
        try:
            read_tokenizer(folder)
        except CheckpointError as error:
            messages.append(str(error))
        assert any(f"{folder / name} {why}" in message for message in messages), messages


class TestLinks:
    def test_within_the_folder(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        (folder / "inner").mkdir()
        (folder / "model.safetensors").rename(folder / "inner" / "weights")
        (folder / "model.safetensors").symlink_to("inner/weights")
        (folder / "config.json").rename(folder / "other.json")
        (folder / "config.json").symlink_to(folder / "other.json")
        assert read_everything(folder) == []

    def test_of_the_hubs_cache(self, tmp_path: Path) -> None:
        folder = make_snapshot(tmp_path, "safetensors")
        assert read_everything(folder) == []
        (tmp_path / "named").symlink_to(folder)
        assert read_everything(tmp_path / "named") == []
        gguf = make_snapshot(tmp_path / "other", "gguf") / "model.gguf"
        assert Checkpoint.open(gguf).model_id

    def test_to_the_blobs_of_another_model(self, tmp_path: Path) -> None:
        folder = make_snapshot(tmp_path, "safetensors")
        other = tmp_path / "models--b" / "blobs"
        other.mkdir(parents=True)
        (folder / "config.json").resolve().rename(other / ("0" * 40))
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(f"../../../models--b/blobs/{'0' * 40}")
        with pytest.raises(CheckpointError, match=r"config\.json is a link that leaves"):
            Checkpoint.open(folder)

    def test_blobs_that_are_a_link(self, tmp_path: Path) -> None:
        folder = make_snapshot(tmp_path, "safetensors")
        (tmp_path / "models--a" / "blobs").rename(tmp_path / "elsewhere")
        (tmp_path / "models--a" / "blobs").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="is a link that leaves"):
            Checkpoint.open(folder)

    def test_a_blob_that_was_not_pulled_is_a_missing_file(self, tmp_path: Path) -> None:
        folder = make_snapshot(tmp_path, "safetensors")
        (folder / "generation_config.json").resolve().unlink()
        assert read_everything(folder) == []

    def test_a_gguf_named_by_a_link(self, tmp_path: Path) -> None:
        folder = make(tmp_path / "model", "gguf")
        named = tmp_path / "elsewhere" / "named.gguf"
        named.parent.mkdir()
        named.symlink_to(folder / "model.gguf")
        assert Checkpoint.open(named).folder == folder
        (folder / "model.gguf").rename(folder / "data")
        named.unlink()
        named.symlink_to(folder / "data")
        with pytest.raises(CheckpointError, match=r"named\.gguf is a link that leaves"):
            Checkpoint.open(named)

    def test_in_a_circle(self, tmp_path: Path) -> None:
        folder = make(tmp_path)
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.jinja").symlink_to("chat_template.jinja")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja is a"):
            ChatTemplate.find(folder)

    def test_put_in_place_of_a_file_that_was_good(self, tmp_path: Path) -> None:
        """Nothing that reads it later is led outside: bulk links, stages, streams, the disk's."""
        folder = make(tmp_path / "model")
        checkpoint = Checkpoint.open(folder)
        path = folder / "model.safetensors"
        part = FilePart.of(path, 0, 8)
        path.rename(tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
        for read in (
            lambda: TensorFiles(folder).read(path.name, 0, 8),
            lambda: TensorFiles(folder, writable=True).read(path.name, 0, 8),
            lambda: checkpoint.read("model.norm.weight"),
            lambda: checkpoint.model_id,
            lambda: checkpoint_files.open_file(part.path),
        ):
            with pytest.raises(CheckpointError, match=r"model\.safetensors is a link that leaves"):
                read()
        assert measure_disk(folder) is None

    def test_a_folder_on_the_way_that_becomes_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_snapshot(tmp_path, "safetensors")
        blobs = tmp_path / "models--a" / "blobs"
        open_at_once = checkpoint_files._open

        def swapped(place: checkpoint_files._Place, mode: int) -> int:
            blobs.rename(tmp_path / "elsewhere")
            blobs.symlink_to(tmp_path / "elsewhere")
            return open_at_once(place, mode)

        monkeypatch.setattr(checkpoint_files, "_open", swapped)
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            checkpoint_files.open_file(folder / "config.json")


def make_snapshot(root: Path, base: str) -> Path:
    """A checkpoint as huggingface_hub caches it."""
    blobs = root / "models--a" / "blobs"
    folder = root / "models--a" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    blobs.mkdir()
    for number, (name, content) in enumerate(GOOD[base]().items()):
        (blobs / f"{number:040x}").write_bytes(content)
        (folder / name).symlink_to(f"../../blobs/{number:040x}")
    return folder


def test_other_special_files(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "config.json").unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "config.json"))
        with pytest.raises(CheckpointError, match=r"config\.json is a socket"):
            Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="/dev/null is a device"):
        checkpoint_files.open_file(Path("/dev/null"))


def test_a_name_that_no_file_can_have() -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(CheckpointError, match="cannot be the name of a file"):
            checkpoint_files.has_file(Path("/tmp") / name)


def test_a_folder_of_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    assert checkpoint_files.folder_entries(tmp_path) == sorted(GOOD["safetensors"]())
    monkeypatch.setattr(checkpoint_files, "MAX_ENTRIES", 3)
    with pytest.raises(CheckpointError, match="holds more than 3 entries"):
        checkpoint_files.folder_entries(tmp_path)


_OTHER_DOORS = re.compile(
    r"\.open\(\"|(?<![._\w])(?<!def )open\(|\.read_bytes\(\)|\.read_text\(|\.is_file\(\)"
)
_OWN_FILES = {
    "checkpoint/replica.py": 1,
    "checkpoint/replica_journal.py": 2,
    "checkpoint/hub_cache.py": 2,
}
"""What does without the one door: files that this node itself writes, and listings."""


def test_all_files_of_a_checkpoint_are_opened_by_one_door() -> None:
    found = {}
    for room in ("checkpoint", "tokenizers", "stage/streaming"):
        for path in sorted((ROOT / "shardnet" / room).rglob("*.py")):
            code = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.S)
            n = len(_OTHER_DOORS.findall(code))
            if n:
                found[path.relative_to(ROOT / "shardnet").as_posix()] = n
    assert found == _OWN_FILES


def test_mutated_files_end_in_documented_errors() -> None:
    figures = fuzz_files(150, seed=13)
    assert figures.found == []
    assert figures.n_files == 150
    assert {"CheckpointError", "UnsupportedModelError", "read"} <= figures.errors.keys()


def test_what_the_mutator_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that fails is found, and the folder handed over."""
    monkeypatch.setattr(
        "support.hostile.mutate_files.read_everything",
        lambda folder: (_ for _ in ()).throw(ValueError("x")) if folder.name == "folder" else [],
    )
    given: list[str] = []
    figures = fuzz_files(2, 0, lambda folder, why: given.append(why))
    assert figures.found == given != []
    assert figures.errors["ValueError"] == 2
