"""Tables that stay in their files: what is read of them, when, and in which dtypes."""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_chain import CPU, Rows, StageChain, batch_of, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import stored_layers
from shardnet.cluster.planning.placing import make_plan
from shardnet.errors import CheckpointError
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.runtime.loading.loaded_stage import JoinedCompute
from shardnet.runtime.loading.model_facts import identify
from shardnet.runtime.shards.spanning_stage import LinkGroup, SpanningCompute
from shardnet.runtime.stage.compute import AheadCompute
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.stage import file_table
from shardnet.stage.stage_model import StageModel
from shardnet.stage.streaming.buffers import FilePart
from shardnet.types import PREFILL_CHUNK_ROWS, DType, LayerRange, WireDType
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

CASE = CASES["qwen4_exp_text"]
PROMPT = [25, 6, 7, 1, 8, 9, 10, 25, 6, 11]
WAIT_S = 30.0

Read = tuple[int, int]
"""Where in a file, and how many bytes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_decoder(tmp_path / "model", "qwen4_exp_text", with_tokenizer=False, **CASE)


def load(folder: Path) -> StageChain:
    return StageChain.load(folder, [LayerRange(0, 4)], probed(CPU, DType.FLOAT32, None))


class Reads:
    """The rows that were asked for ahead, and those that steps then read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead: set[Read] = set()
        self.read: set[Read] = set()
        ask, fill = file_table._ask_for_rows, file_table._fill_rows

        def asked(part: FilePart, rows: list[int], row_bytes: int) -> None:
            ask(part, rows, row_bytes)
            self.ahead |= {(part.offset + row * row_bytes, row_bytes) for row in rows}

        def filled(part: FilePart, rows: list[int], raw: torch.Tensor, places: list[int]) -> None:
            fill(part, rows, raw, places)
            self.read |= {(part.offset + row * raw.shape[1], raw.shape[1]) for row in rows}

        patch.setattr(file_table, "_ask_for_rows", asked)
        patch.setattr(file_table, "_fill_rows", filled)


def read_ahead(stage: StageModel) -> None:
    """Have a prompt's rows read, and wait for it."""
    compute = TorchCompute(stage, None, WireDType.FLOAT32)
    assert compute.reads_ahead
    ask(compute, Rows(slot=0, position=0, ids=PROMPT, n_sampled=1))


def ask(compute: AheadCompute, *groups: Rows) -> None:
    """Have the rows of a step read, and wait for it."""
    compute.read_ahead(batch_of(groups))
    for thread in threading.enumerate():
        if thread.name.startswith("shardnet-ahead"):
            thread.join(WAIT_S)


@pytest.mark.parametrize("system", [sys.platform, "win32", "darwin"])
def test_what_a_prompt_needs_is_asked_for_before_and_nothing_else(
    system: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system's own call where there is one, else by reading."""
    chain, reads = load(folder), Reads(monkeypatch)
    monkeypatch.setattr(sys, "platform", system)
    read_ahead(chain.stages[0])
    assert reads.ahead
    assert not reads.read
    chain.step(Rows(slot=0, position=0, ids=PROMPT, n_sampled=1))
    assert reads.read == reads.ahead


LONG = random_prompt(500, 90, seed=2)


@pytest.mark.parametrize(
    "within",
    [
        lambda stage: JoinedCompute([stage], WireDType.FLOAT32),
        lambda stage: SpanningCompute(stage, LinkGroup(1, 2)),
    ],
    ids=["joined", "spanning"],
)
def test_what_stands_before_a_step_decides_what_is_asked_for(
    within: Callable[[TorchCompute], AheadCompute],
    long_table: StageChain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks, tokens alone, over rejected drafts, beside another sequence."""
    reads = Reads(monkeypatch)
    compute = within(TorchCompute(long_table.stages[0], None, WireDType.FLOAT32))
    assert isinstance(compute, AheadCompute)
    assert compute.reads_ahead

    def rows(slot: int, begin: int, end: int, n_drafts: int = 0) -> Rows:
        ids = LONG[begin + slot : end + slot]
        return Rows(slot=slot, position=begin, ids=ids, n_sampled=1, n_drafts=n_drafts)

    wrong = Rows(slot=0, position=41, ids=[5, 6, 7], n_sampled=3, n_drafts=3)
    for groups in (
        [rows(0, 0, 1)],
        [rows(0, 1, 20)],
        [rows(0, 20, 40), rows(1, 0, 30)],
        [rows(1, 30, 31), rows(0, 40, 41)],
        [wrong],
        [rows(0, 42, 43, 1)],
    ):
        ask(compute, *groups)
        long_table.step(*groups)
        assert reads.read == reads.ahead
        reads.ahead.clear()
        reads.read.clear()


def test_what_is_not_known_to_be_needed_is_not_asked_for(
    long_table: StageChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence that came from elsewhere, or goes on where another one was."""
    reads, compute = Reads(monkeypatch), TorchCompute(long_table.stages[0], None, WireDType.FLOAT32)
    ask(compute, Rows(slot=0, position=20, ids=LONG[20:21], n_sampled=1))
    assert not reads.ahead
    ask(compute, Rows(slot=0, position=24, ids=LONG[24:40], n_sampled=1))
    long_table.step(Rows(slot=0, position=0, ids=LONG[:40], n_sampled=1))
    assert reads.ahead
    assert reads.ahead < reads.read


@pytest.fixture
def long_table(tmp_path: Path) -> StageChain:
    """A model with more rows than a prompt needs."""
    sizes = CASE | {"ngram_vocab_size_base": 3000}
    folder = make_decoder(tmp_path / "long", "qwen4_exp_text", with_tokenizer=False, **sizes)
    return load(folder)


def rows_that_steps_read(chain: StageChain, reads: Reads, end: int) -> set[Read]:
    """Compute the first positions of LONG, a chunk a step."""
    for begin in range(0, end, PREFILL_CHUNK_ROWS):
        ids = LONG[begin : min(end, begin + PREFILL_CHUNK_ROWS)]
        chain.step(Rows(slot=0, position=begin, ids=ids, n_sampled=1))
    return reads.read


def recorded(patch: pytest.MonkeyPatch) -> list[Read]:
    """What the system is asked for from now on, in place of asking it."""
    asked: list[Read] = []

    def ask(_: int, offset: int, n_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((offset, n_bytes))

    patch.setattr(os, "posix_fadvise", ask)
    return asked


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere rows are read")
def test_a_whole_prompt_is_asked_for_chunk_by_chunk_and_each_row_once(
    long_table: StageChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, reads = recorded(monkeypatch), Reads(monkeypatch)
    tables = long_table.stages[0].tables
    turns = [[*table.asking(LONG)] for table in tables]
    assert [len(each) for each in turns] == [2, 2]
    assert len(asked) == len({*asked})
    assert {*asked} == rows_that_steps_read(long_table, reads, len(LONG))
    asked.clear()
    for table in tables:
        next(table.asking(LONG))
    reads.read.clear()
    assert {*asked} == rows_that_steps_read(long_table, reads, PREFILL_CHUNK_ROWS)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere rows are read")
def test_no_more_is_asked_for_than_there_is_memory_for(
    long_table: StageChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of the text are, so that what is computed first does not wait."""
    asked, reads = recorded(monkeypatch), Reads(monkeypatch)
    [table, _] = long_table.stages[0].tables
    first = len({*table.rows_of(torch.tensor(LONG[:PREFILL_CHUNK_ROWS])).flatten().tolist()})
    assert len([*table.asking(LONG, (first + 5) * (mmap.PAGESIZE + table.row_bytes))]) == 2
    assert len(asked) == first + 5
    assert {*asked[:first]} < rows_that_steps_read(long_table, reads, PREFILL_CHUNK_ROWS)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux says what is in the page cache")
def test_what_was_asked_for_is_in_the_page_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, reads = load(folder), Reads(monkeypatch)
    [path] = {part.path for table in chain.stages[0].tables for part in table.parts}
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_ahead(chain.stages[0])
    assert all(is_cached(path, read) for read in sorted(reads.ahead))


def is_cached(path: Path, read: Read) -> bool:
    """Say whether bytes are read without waiting for a disk, which may be about to have them."""
    offset, n_bytes = read
    for _ in range(1000):
        with path.open("rb") as file, memoryview(bytearray(n_bytes)) as buffer:
            try:
                return os.preadv(file.fileno(), [buffer], offset, os.RWF_NOWAIT) == n_bytes
            except BlockingIOError:
                os.sched_yield()
            except OSError as error:
                pytest.skip(f"this file system does not say ({error.strerror})")
    return False


def test_a_file_that_has_changed_is_told_by_the_step_that_reads_it(folder: Path) -> None:
    chain = load(folder)
    [path] = {part.path for table in chain.stages[0].tables for part in table.parts}
    path.write_bytes(path.read_bytes()[:-1])
    read_ahead(chain.stages[0])
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        chain.step(Rows(slot=0, position=0, ids=PROMPT, n_sampled=1))


Scales = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Makes the scales of a table as they are stored, and of each of its weights."""


def each_row(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each row, in float32."""
    scales = 0.01 + 0.1 * torch.rand(len(table), generator=torch.Generator().manual_seed(3))
    return scales, scales[:, None].expand_as(table)


def each_part(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A power of two for 32 columns of each row, as in DeepSeek-V4.1."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-9, 4, (len(table), table.shape[1] // 32), generator=generator)
    scales = torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)
    return scales, scales.float().repeat_interleave(32, 1)


def in_fp8(folder: Path, target: Path, made: Scales | None = None) -> tuple[Path, Path]:
    """Store tables in FP8 with one scale for each, as Qwen does, and the same values plainly.

    Or with the scales that are `made`.
    """
    [file] = folder.glob("*.safetensors")
    stored = load_file(file)
    coded, plain = dict(stored), dict(stored)
    for name, number in tables_of(stored):
        scale = torch.tensor([0.03 + number / 100], dtype=torch.bfloat16)
        stem = name.partition(".shard_")[0]
        if made is not None:
            stem = name.removesuffix(".weight")
        kept, each = (scale, scale.float()) if made is None else made(stored[name])
        coded[name] = (stored[name] / each).to(torch.float8_e4m3fn)
        coded[f"{stem}.weight_scale"] = kept
        plain[name] = coded[name].float() * each
    for path, tensors in ((target / "fp8", coded), (target / "plain", plain)):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        if path.name == "fp8":
            raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
        (path / "config.json").write_text(json.dumps(raw))
    return target / "fp8", target / "plain"


def tables_of(stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, int]]:
    """List the parts of tables, with the number of their layer."""
    for name in stored:
        if ".ngram_embedding.shard_" in name and name.endswith(".weight"):
            yield name, int(name.partition("layers.")[2].partition(".")[0])


def test_rows_in_fp8_with_a_scale_are_what_they_stand_for(folder: Path, tmp_path: Path) -> None:
    coded, plain = in_fp8(folder, tmp_path)
    batch = batch_of([Rows(slot=0, position=0, ids=PROMPT, n_sampled=1)])
    answers = [load(path).stages[0].forward(batch, None) for path in (coded, plain)]
    assert torch.equal(*answers)
    sizes = [sum(stored_layers(Checkpoint.open(path)).looked_up) for path in (coded, plain)]
    assert sizes[1] == 4 * sizes[0] > 0


@pytest.mark.parametrize("made", [each_row, each_part])
def test_rows_in_fp8_with_scales_of_their_own_are_what_they_stand_for(
    made: Scales, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales lie in two tensors, and rows of both are read ahead and looked up."""
    wide = CASE | {"ple_embed_dim": 4 * 64}
    folder = make_decoder(tmp_path / "wide", "qwen4_exp_text", with_tokenizer=False, **wide)
    coded, plain = in_fp8(folder, tmp_path, made)
    chain, other, reads = load(coded), load(plain), Reads(monkeypatch)
    read_ahead(chain.stages[0])
    batch = batch_of([Rows(slot=0, position=0, ids=PROMPT, n_sampled=1)])
    answer = chain.stages[0].forward(batch, None)
    assert reads.read == reads.ahead
    row_bytes = 4 if made is each_row else 2
    assert {n_bytes for _, n_bytes in reads.read} == {64, row_bytes}
    assert torch.equal(answer, other.stages[0].forward(batch, None))
    sizes = [sum(stored_layers(Checkpoint.open(path)).looked_up) for path in (coded, plain)]
    assert sizes[1] // 256 == sizes[0] // (64 + row_bytes) > 0


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_in_fp8_with_scales_of_blocks_or_of_the_other_kind_are_refused(
    kind: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    coded, _ = in_fp8(folder, tmp_path, each_row)
    file = coded / "model.safetensors"
    stored = load_file(file)
    for name, _ in list(tables_of(stored)):
        n_rows = stored[name].shape[0]
        n_scales = -(-n_rows // 32) if kind is torch.float8_e4m3fn else n_rows
        stored[name] = stored[name].to(kind)
        stored[f"{name.removesuffix('.weight')}.weight_scale"] = torch.ones(n_scales, 1)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="is not stored as rows, which are looked up there"):
        load(coded)


def node(name: str, memory_bytes: int = 1 << 30) -> NodeInfo:
    return NodeInfo(
        node=f"id-{name}",
        name=name,
        address=f"{name}:1",
        version="0",
        device="cpu",
        memory_bytes=memory_bytes,
        memory_free_bytes=1 << 30,
        cores=2,
        threads=1,
        dtypes=["bfloat16", "float32"],
        host_id="h",
    )


def test_a_plan_says_which_stages_look_up_and_counts_no_memory_for_it(folder: Path) -> None:
    facts, nodes = identify(folder), [node("anna"), node("bert")]
    choice = ModelChoice(model=str(folder), nodes=["anna:1", "bert:1"], layers=[(0, 1), (1, 4)])
    stages = make_plan(choice, facts, nodes).reply(1).stages
    tables = [stage_tensors(facts.config, LayerRange(*stage.layers)).looked_up for stage in stages]
    sizes = [sum(4 * n * width for n, width in table.values()) for table in tables]
    assert [stage.looked_up_bytes for stage in stages] == sizes
    assert min(sizes) > 0
    [path] = folder.glob("*.safetensors")
    assert sum(stage.weight_bytes for stage in stages) < path.stat().st_size - sum(sizes)


def test_tables_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    """DeepSeek-V4.1's Engram, should it stand in a checkpoint that says it is DeepSeek-V4."""
    folder = make_decoder(tmp_path, "deepseek_v4", with_tokenizer=False)
    [file] = folder.glob("*.safetensors")
    stored = load_file(file)
    stored["layers.1.engram.embed.weight"] = torch.zeros(10, 4)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"tensor layers\.1\.engram\.embed\.weight .* no place"
    ):
        load(folder)
