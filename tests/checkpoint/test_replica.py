"""Replicas: laid out, filled, known to be sound, and refused where they lack something."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_gpt2, make_llama

from shardnet.checkpoint import replica as replica_module
from shardnet.checkpoint import replica_journal
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import (
    Replica,
    TensorFiles,
    TensorPart,
    begin_replica,
    check_heads,
    disk_error,
    lay_out,
    part_of,
    parts_of,
    range_tensors,
    stored_layers,
)
from shardnet.checkpoint.replica_journal import JOURNAL_FILE, Journal
from shardnet.checkpoint.tensors.manifest import TOOL_TEMPLATE
from shardnet.checkpoint.tensors.stored_tensor import FileHead
from shardnet.errors import CapacityError, CheckpointError
from shardnet.runtime.loading.model_facts import stamp
from shardnet.types import LayerRange

PART_BYTES = 1000


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replica_module, replica_journal):
        monkeypatch.setattr(module, "WEIGHT_PART_BYTES", PART_BYTES)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("indexed"), max_shard_size="60KB")


def skeleton_of(source: Path, folder: Path) -> Path:
    """A replica of `source` without any tensor, in `folder`."""
    checkpoint = Checkpoint.open(source)
    heads = checkpoint.skeleton()
    check_heads(heads, "a peer")
    folder.mkdir()
    files = lay_out(folder, heads)
    for head in heads:
        whole = (source / head.name).read_bytes()
        for at, n_bytes in head.ranges:
            files.write(head.name, at, memoryview(whole[at : at + n_bytes]))
    files.close()
    begin_replica(folder, checkpoint.model_id, "a peer")
    return folder


def fill(folder: Path, source: Path, tensors: Iterable[str], *, seal: bool = True) -> None:
    """Bring tensors from `source` into a replica."""
    replica, files = Replica(folder), TensorFiles(source)
    for part in replica.parts(tensors):
        data = files.read(part.file, part.offset, part.size_bytes)
        replica.write(part, 0, memoryview(data))
        replica.record(part, hashlib.sha256(data).hexdigest())
    if seal:
        replica.seal({replica.checkpoint.stored[name].file for name in tensors})
    replica.close()
    files.close()


@pytest.mark.parametrize("name", ["single", "indexed"])
def test_a_replica_is_the_same_model_and_reads_what_it_holds(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(name)
    whole = Checkpoint.open(source)
    folder = skeleton_of(source, tmp_path / "replica")
    tensors = range_tensors(whole, LayerRange(1, 2))
    assert 0 < len(tensors) < len(whole.stored)
    fill(folder, source, tensors)
    part = Checkpoint.open(folder)
    assert part.model_id == whole.model_id
    assert part.missing(tensors) == []
    assert part.missing(whole.stored) == [n for n in whole.stored if n not in tensors]
    for tensor in whole.tensors:
        if tensor in tensors:
            assert torch.equal(part.read(tensor), whole.read(tensor))
        else:
            with pytest.raises(CheckpointError, match=f"{tensor} has not been fetched"):
                part.read(tensor)


def test_layers_are_told_with_their_sizes_and_those_that_are_here(
    single: Path, tmp_path: Path
) -> None:
    whole = Checkpoint.open(single)
    n_layers = whole.config.n_layers
    told = stored_layers(whole)
    assert told.held == (LayerRange(0, n_layers),)
    assert sum(told.size_bytes) == sum(info.size_bytes for info in whole.stored.values())
    assert told.size_bytes[0] > told.size_bytes[1], "the embedding"
    folder = skeleton_of(single, tmp_path / "replica")
    assert stored_layers(Checkpoint.open(folder)).held == ()
    for layers in (LayerRange(0, 2), LayerRange(3, n_layers)):
        fill(folder, single, range_tensors(whole, layers))
    part = stored_layers(Checkpoint.open(folder))
    assert part.held == (LayerRange(0, 2), LayerRange(3, n_layers))
    assert part.size_bytes == told.size_bytes


def test_files_are_sparse(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source", hidden_size=192, intermediate_size=4096)
    folder = skeleton_of(source, tmp_path / "replica")
    status = (folder / "model.safetensors").stat()
    assert status.st_size == (source / "model.safetensors").stat().st_size
    assert status.st_blocks * 512 < status.st_size / 4


def test_a_range_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    whole = Checkpoint.open(make_gpt2(tmp_path / "gpt2"))
    first = range_tensors(whole, LayerRange(0, 1))
    assert {"transformer.wte.weight", "transformer.h.0.ln_1.weight"} <= set(first)
    last = range_tensors(whole, LayerRange(3, 4))
    assert {"transformer.wte.weight", "transformer.ln_f.bias"} <= set(last)
    assert set(first) & set(last) == {"transformer.wte.weight"}, "the tied head, once"


def test_parts_cover_every_byte_of_a_tensor_once(single: Path) -> None:
    for info in Checkpoint.open(single).stored.values():
        at = info.offset
        for number, part in enumerate(parts_of(info)):
            assert (part.number, part.offset) == (number, at)
            assert 0 < part.size_bytes <= PART_BYTES
            at += part.size_bytes
        assert at == info.offset + info.size_bytes


@pytest.mark.parametrize(("tensor", "number"), [("lm_head.weight", 10**6), ("../etc/passwd", 0)])
def test_a_part_that_no_model_has_is_refused(single: Path, tensor: str, number: int) -> None:
    with pytest.raises(CheckpointError, match="there is no part"):
        part_of(Checkpoint.open(single), tensor, number)


def test_a_file_in_a_folder_of_the_model_comes_too(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    plain_id = Checkpoint.open(source).model_id
    (source / TOOL_TEMPLATE).parent.mkdir()
    (source / TOOL_TEMPLATE).write_text("{{ tools }}")
    assert Checkpoint.open(source).model_id != plain_id
    replica = skeleton_of(source, tmp_path / "replica")
    assert (replica / TOOL_TEMPLATE).read_text() == "{{ tools }}"
    assert Replica(replica).checkpoint.model_id == Checkpoint.open(source).model_id


class TestJournal:
    def part(self, folder: Path) -> TensorPart:
        return part_of(Checkpoint.open(folder), "lm_head.weight", 1)

    def test_outlives_a_process_killed_while_writing(self, single: Path, tmp_path: Path) -> None:
        folder = skeleton_of(single, tmp_path / "replica")
        fill(folder, single, ["lm_head.weight"])
        whole = (folder / JOURNAL_FILE).read_bytes()
        (folder / JOURNAL_FILE).write_bytes(whole + b'\n{"tensor": "lm_head.wei')
        fill(folder, single, ["model.norm.weight"])
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.missing(["lm_head.weight", "model.norm.weight"]) == []

    def test_two_processes_may_write_it(self, single: Path, tmp_path: Path) -> None:
        folder = skeleton_of(single, tmp_path / "replica")
        one, other = Replica(folder), Replica(folder)
        first, second = one.parts(["lm_head.weight"])[:2]
        one.record(first, "a" * 64)
        other.record(second, "b" * 64)
        one.close()
        other.close()
        both = Replica(folder)
        assert (both.digest(first), both.digest(second)) == ("a" * 64, "b" * 64)
        both.close()

    def test_what_was_loaded_stays_valid_until_a_held_part_is_dropped(
        self, single: Path, tmp_path: Path
    ) -> None:
        folder = skeleton_of(single, tmp_path / "replica")
        fill(folder, single, ["lm_head.weight"])
        before = stamp(folder)
        fill(folder, single, ["model.norm.weight"])
        assert stamp(folder) == before
        replica = Replica(folder)
        replica.drop(self.part(folder))
        replica.close()
        assert stamp(folder) != before
        assert Checkpoint.open(folder).missing(["lm_head.weight"]) == ["lm_head.weight"]

    @pytest.mark.parametrize("line", [b"[]", b"\xff", b'{"tensor": 1}', b'{"seal": []}', b"x" * 99])
    def test_takes_nothing_from_a_line_it_does_not_know(self, tmp_path: Path, line: bytes) -> None:
        (tmp_path / JOURNAL_FILE).write_bytes(line)
        journal = Journal(tmp_path / JOURNAL_FILE)
        assert (journal.digests, journal.seals, journal.n_dropped) == ({}, {}, 0)


class TestSoundness:
    @pytest.fixture
    def folder(self, single: Path, tmp_path: Path) -> Path:
        folder = skeleton_of(single, tmp_path / "replica")
        fill(folder, single, ["lm_head.weight", "model.norm.weight"])
        return folder

    def recheck(self, folder: Path, tensors: Iterable[str]) -> tuple[int, list[TensorPart]]:
        """How many parts were looked at, and which were wrong."""
        replica = Replica(folder)
        unverified = replica.unverified(tensors)
        wrong = [part for part in unverified if not replica.check(part)]
        if unverified:
            replica.seal({part.file for part in unverified})
        replica.close()
        return len(unverified), wrong

    def test_what_was_left_sealed_is_trusted(self, folder: Path) -> None:
        assert self.recheck(folder, ["lm_head.weight"]) == (0, [])

    def test_a_damaged_sample_makes_no_other_model_of_it(self, folder: Path, single: Path) -> None:
        """It was the right one when the replica was begun, and the part's digest tells."""
        part = part_of(Checkpoint.open(folder), "model.norm.weight", 0)
        files = TensorFiles(folder, writable=True)
        files.write(part.file, part.offset, memoryview(bytes(part.size_bytes)))
        files.close()
        assert Checkpoint.open(folder).model_id == Checkpoint.open(single).model_id
        replica = Replica(folder)
        assert not replica.check(part)
        replica.close()

    def test_what_somebody_else_wrote_to_is_looked_at(self, folder: Path) -> None:
        part = part_of(Checkpoint.open(folder), "lm_head.weight", 3)
        files = TensorFiles(folder, writable=True)
        files.write(part.file, part.offset + 5, memoryview(b"damage"))
        files.close()
        now = (folder / part.file).stat().st_mtime_ns
        os.utime(folder / part.file, ns=(now, now + 10**9))  # clocks of files tick some ms apart
        n_looked_at, wrong = self.recheck(folder, ["model.norm.weight"])
        assert n_looked_at == len(parts_of(Checkpoint.open(folder).stored["lm_head.weight"])) + 1
        assert wrong == [part]
        assert self.recheck(folder, ["lm_head.weight"]) == (0, [])

    def test_what_a_crash_left_is_looked_at(self, folder: Path, single: Path) -> None:
        fill(folder, single, ["model.layers.0.mlp.up_proj.weight"], seal=False)
        n_looked_at, wrong = self.recheck(folder, ["model.layers.0.mlp.up_proj.weight"])
        assert n_looked_at > 1
        assert wrong == []

    def test_a_truncated_file_is_named(self, folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: 5000 bytes long"):
            Replica(folder)

    def test_a_folder_without_a_journal_is_no_replica(self, single: Path) -> None:
        with pytest.raises(CheckpointError, match="no replica"):
            Replica(single)


def head(name: str, size: int = 10, head_bytes: int = 10) -> FileHead:
    return FileHead(name=name, size_bytes=size, ranges=((0, head_bytes),))


@pytest.mark.parametrize(
    "heads",
    [
        [head("../config.json")],
        [head("/etc/passwd")],
        [head("..")],
        [head("")],
        [head("a/b.safetensors")],
        [head("a\\b.safetensors")],
        [head("C:b.safetensors")],
        [head("b.safetensors:hidden.bin")],
        [head("\\\\server\\share\\b.safetensors")],
        [head("NUL.safetensors")],
        [head("com1 .bin")],
        [head("b?.safetensors")],
        [head("b.safetensors"), head("B.safetensors")],
        [head("a\0b.safetensors")],
        [head("a\nb.safetensors")],
        [head(".safetensors")],
        [head("replica.jsonl")],
        [head("model.py")],
        [head("config.json"), head("config.json")],
        [head("config.json", size=20)],
        [head("model.safetensors", size=5)],
        [FileHead(name="m.bin", size_bytes=9, ranges=((0, 5), (4, 2)))],
        [FileHead(name="m.bin", size_bytes=9, ranges=((5, 2), (0, 2)))],
        [head("model.safetensors", size=1 << 50)],
        [head(f"{n}.safetensors", size=1 << 30, head_bytes=1 << 25) for n in range(33)],
        [head("model.safetensors", size=1 << 30, head_bytes=10**8)],
        [head("tokenizer.json", size=1 << 40, head_bytes=1 << 40)],
    ],
    ids=lambda heads: repr(heads[0].name),
)
def test_a_hostile_skeleton_is_refused_and_its_sender_named(heads: list[FileHead]) -> None:
    with pytest.raises(CheckpointError, match=r"^mallory offers"):
        check_heads(heads, "mallory")


def test_a_skeleton_of_another_model_is_refused(single: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="mallory offered model aaaaaaaaaaaa and sent"):
        begin_replica(single, "a" * 64, "mallory")
    assert not (single / JOURNAL_FILE).exists()


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, CapacityError, "No space left on device; free room there"),
        (errno.EACCES, CheckpointError, "Permission denied; name a place"),
    ],
)
def test_errors_of_the_disk_say_what_to_do(number: int, kind: type[Exception], words: str) -> None:
    error = disk_error(OSError(number, os.strerror(number)), Path("/cache"))
    assert type(error) is kind
    assert words in str(error)
    assert "SHARDNET_CACHE_DIR" in str(error)
