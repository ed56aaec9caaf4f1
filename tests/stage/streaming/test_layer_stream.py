"""Layers streamed from disk: the bits of resident ones, what is fetched, what cannot be had."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cluster.bulk_peers import empty_replica
from support.models.checkpoints import make_decoder, make_gpt2, make_llama
from support.needs import needs_library, needs_vectors
from support.own_process import figures_of, make_large
from support.rings.stage_chain import Rows, batch_of, random_prompt
from support.rings.streamed_stage import WHOLE, choice_of, load, said, same
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import Replica, TensorFiles, TensorPart, range_tensors
from shardnet.errors import CapacityError, CheckpointError, ShardnetError, UsageError
from shardnet.files import CacheFolder
from shardnet.model.config.panel_form import BFLOAT16, Quantization
from shardnet.model.families.registry import FAMILIES
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear, PanelPacking, float_linear
from shardnet.model.kernels.panels import Panels
from shardnet.stage.estimate.memory_estimate import WeightForm, stage_weight_bytes, streamed_layers
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache, packed_models
from shardnet.stage.runs import Run
from shardnet.stage.streaming import buffers, layer_stream, streamed_linear
from shardnet.stage.streaming.buffers import FilePart
from shardnet.stage.streaming.layer_stream import LayerStream
from shardnet.stage.streaming.streamed_linear import ExpertPool
from shardnet.types import DType, LayerRange, MicroBatch


def make(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    if family == "gpt2":
        return make_gpt2(folder, dtype=dtype, with_tokenizer=False)
    return make_decoder(folder, family, dtype=dtype, with_tokenizer=False)


TURNED = ("gpt_oss", "llama4_text")
"""Families whose experts are stored with inputs before outputs."""


UNLIKE = (
    *("llama", "phi3", "gemma3_text", "starcoder2", "mixtral", "qwen2_moe", "qwen3_next"),
    *("deepseek_v3", "gpt2"),
)
"""Families with all kinds of linears, tables, experts and states that there are to be read."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    cases(
        [
            *((family, DType.FLOAT32) for family in UNLIKE),
            *((family, DType.BFLOAT16) for family in ("llama", "gpt2", "qwen3_moe")),
        ],
        [(family, DType.FLOAT32) for family in FAMILIES if family not in {*TURNED, *UNLIKE}],
    ),
)
def test_streamed_layers_give_the_bits_of_resident_ones(
    family: str, dtype: DType, tmp_path: Path
) -> None:
    choice = choice_of(dtype)
    if choice.dtype is not dtype:
        pytest.skip(f"this machine computes {dtype.value} in {choice.dtype.value}")
    folder = make(tmp_path, family, torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16)
    streamed = load(folder, 3, choice)
    assert same(said(streamed), said(load(folder, 0, choice)))
    assert streamed.n_fetched == 2 + 5 * 3
    """Five passes fetch three layers each; two lie ready for the next one."""


def test_of_experts_only_those_that_rows_visit_are_read(tmp_path: Path) -> None:
    """There is room for those of two layers: the ones of the last token are there for the next."""
    folder = make_decoder(tmp_path, "qwen3_moe", with_tokenizer=False, num_experts=12)
    resident, streamed = load(folder, 0), load(folder, 4)
    pool, tokens, config = streamed.experts, [5, 6, 7, 8], Checkpoint.open(folder).config.experts
    assert pool is not None
    assert config is not None
    for position, token in enumerate(tokens):
        step = batch((0, position, [token]))
        assert torch.equal(streamed.forward(step, None), resident.forward(step, None))
        assert pool.n_used == 4 * config.top_k * (position + 1)
        assert pool.n_read <= pool.n_used
    assert pool.n_read < 4 * 12
    n_read = pool.n_read
    streamed.forward(batch((1, 0, tokens[-1:])), None)
    assert pool.n_read - n_read < 4 * config.top_k, "what the last token read is used again"


def test_the_expert_used_last_stays_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Places for two layers of three; one whose file was away comes once it is back."""
    file, away = tmp_path / "file", tmp_path / "away"
    file.write_bytes(bytes(range(240)))
    pool = ExpertPool()
    experts = [pool.expert(layer, number) for layer in range(3) for number in range(2)]
    for number, expert in enumerate(experts):
        assert expert.reserve(0, [FilePart.of(file, 40 * number, 3)]) == 0
        assert expert.reserve(0, [FilePart.of(file, 40 * number + 9, 2)]) == 64
    pool.start()

    def held(number: int) -> list[int]:
        expert = experts[number]
        expert.fetch()
        place = expert.buffer_of(0)
        return [*expert.weights(0, 3, place).tolist(), *expert.weights(64, 2, place).tolist()]

    for number in (0, 1, 2, 3, 0, 4, 5, 0):
        at = 40 * number
        assert held(number) == [at, at + 1, at + 2, at + 9, at + 10]
    assert pool.n_read == 6, "0 was not read again, 1 and 2 made room"
    file.rename(away)
    held(0)
    for number in (1, 1, 2):
        with pytest.raises(CheckpointError, match="shardnet unload"):
            held(number)
    away.rename(file)
    assert held(1) == [40, 41, 42, 49, 50]


@pytest.mark.parametrize(
    ("family", "quant"),
    cases([("gpt_oss", "int4"), ("gpt2", "int8")], [("llama", "int4"), ("deepseek_v3", "int8")]),
)
def test_streamed_rounded_layers_give_the_bits_of_resident_ones(
    family: str, quant: str, tmp_path: Path
) -> None:
    folder, packs = make(tmp_path / "model", family), tmp_path / "packs"
    choice = choice_of(DType.FLOAT32, quant)
    streamed = load(folder, 4, choice, packs)
    assert same(said(streamed), said(load(folder, 0, choice)))
    again = load(folder, 4, choice, packs)
    assert same(said(again), said(streamed))


def batch(*groups: tuple[int, int, Sequence[int]]) -> MicroBatch:
    """Rows by (slot, position, token ids)."""
    return batch_of(
        [Rows(slot=slot, position=at, ids=ids, n_sampled=1) for slot, at, ids in groups]
    )


PROMPT = random_prompt(400, 300)
STEPS = [
    batch((0, 0, PROMPT[:256])),
    batch((0, 256, PROMPT[256:]), (1, 0, PROMPT[:3])),
    batch((0, 512, [5])),  # beyond the context: this one fails
    batch((2, 0, [7]), (1, 3, [8])),
    batch((3, 0, [300000])),
    batch((1, 3, [9, 10])),  # again from 3 on: a draft was rejected
]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_micro_batches_together_get_what_they_get_alone(family: str, tmp_path: Path) -> None:
    windows = {"sliding_window": 20} if family == "gemma3_text" else {}
    folder = make_decoder(tmp_path, family, with_tokenizer=False, **windows)
    one_by_one, together = load(folder, 4), load(folder, 4)
    alone: list[torch.Tensor | ShardnetError] = []
    for step in STEPS:
        try:
            alone.append(one_by_one.run(step, None))
        except ShardnetError as error:
            alone.append(error.with_traceback(None))
    results = together.run_together([Run(batch=step, hidden=None) for step in STEPS])
    assert len(results) == len(STEPS)
    for mine, theirs in zip(results, alone, strict=True):
        if isinstance(theirs, ShardnetError):
            assert (type(mine), str(mine)) == (type(theirs), str(theirs))
        else:
            assert isinstance(mine, torch.Tensor)
            assert torch.equal(mine, theirs)
    assert isinstance(results[2], CapacityError)
    assert isinstance(results[4], UsageError)
    n_passes = 1 if family == "llama" else 4
    """Of a slot with windows one step after the other."""
    assert together.n_fetched == 2 + 4 * n_passes
    assert one_by_one.n_fetched == 2 + 4 * 4


DAMAGES: dict[str, Callable[[Path], None]] = {
    "gone": lambda file: file.unlink(),
    "shorter": lambda file: os.truncate(file, file.stat().st_size - 1),
    "written": lambda file: os.utime(file, ns=(1, 1)),
    "another": lambda file: file.with_suffix(".new").rename(file),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_stay_is_named(damage: str, tmp_path: Path) -> None:
    folder = make_llama(tmp_path, with_tokenizer=False)
    file = folder / "model.safetensors"
    file.with_suffix(".new").write_bytes(file.read_bytes())
    model = load(folder, 4)
    said(model)
    DAMAGES[damage](file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* stream"):
        said(model)
    with pytest.raises(CheckpointError, match="shardnet unload"):
        said(model)


def test_a_replica_may_get_other_tensors_but_none_anew(tmp_path: Path) -> None:
    """As while layers for another stage come from other nodes."""
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=5)
    replica = Replica(empty_replica(source, tmp_path / "replica"))
    files = TensorFiles(source)

    def take(parts: Sequence[TensorPart]) -> None:
        for part in parts:
            replica.write(part, 0, memoryview(files.read(part.file, part.offset, part.size_bytes)))
            replica.record(part, files.digest(part))

    held = replica.parts(range_tensors(replica.checkpoint, WHOLE))
    take(held)
    resident, streamed = load(source, 0), load(replica.folder, 4)
    take(replica.parts(range_tensors(replica.checkpoint, LayerRange(4, 5))))
    for sequence in range(2):
        step = batch((sequence, 0, [5, 6, 7]))
        assert torch.equal(streamed.forward(step, None), resident.forward(step, None))
    replica.drop(held[0])
    take(held[:1])
    os.utime(replica.folder / held[0].file, ns=(1, 1))  # also where its clock stood still
    with pytest.raises(CheckpointError, match="it has changed while layers were streamed"):
        streamed.forward(batch((2, 0, [5, 6, 7])), None)
    for opened in (replica, files):
        opened.close()


def test_after_an_error_the_same_layers_serve_again(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, with_tokenizer=False)
    file, away = folder / "model.safetensors", tmp_path / "away"
    model = load(folder, 3)
    want = said(model)
    file.rename(away)
    with pytest.raises(CheckpointError):
        said(model)
    away.rename(file)
    model.kv.clear()
    assert same(said(model), want)


def cut(packed: CacheFolder) -> None:
    for file in packed.folder.rglob("*.packed"):
        os.truncate(file, 100)


@pytest.mark.parametrize("damage", [CacheFolder.remove, cut])
def test_rounded_weights_that_do_not_stay_are_named(
    damage: Callable[[CacheFolder], object], tmp_path: Path
) -> None:
    folder, packs = make(tmp_path / "model", "llama"), tmp_path / "packs"
    model = load(folder, 4, choice_of(DType.FLOAT32, "int8"), packs)
    [packed] = packed_models(packs)
    if sys.platform == "linux":
        assert str(packs) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    damage(packed)
    said_or_not = [Run(batch=STEPS[0], hidden=None)] * 3
    results = [model.run_together([run])[0] for run in said_or_not]
    assert isinstance(results[-1], CheckpointError)
    assert ".packed" in str(results[-1])


def test_a_disk_without_room_for_rounded_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "model", "llama")
    monkeypatch.setattr(PackCache, "put", lambda *arguments: None)
    with pytest.raises(CapacityError, match="could not be stored"):
        load(folder, 4, choice_of(DType.FLOAT32, "int8"), tmp_path / "packs")


def test_another_device_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, with_tokenizer=False)
    with pytest.raises(UsageError, match="meta cannot stream layers"):
        load_stage(
            Checkpoint.open(folder),
            WHOLE,
            choice=choice_of(DType.FLOAT32),
            device=torch.device("meta"),
            room_blocks=1,
            progress=lambda done, total: None,
            n_streamed=1,
        )


def test_weights_that_have_to_be_made_are_refused_by_name(tmp_path: Path) -> None:
    half = make_llama(tmp_path / "half", dtype=torch.float16, with_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"stored in float16 .* float32; use --quant"):
        load(half, 4)
    brain = make_llama(tmp_path / "brain", dtype=torch.bfloat16, with_tokenizer=False)
    with pytest.raises(CheckpointError, match="use --dtype bfloat16 or --quant"):
        load(brain, 4)
    stacked = make(tmp_path / "stacked", "gpt_oss")
    with pytest.raises(CheckpointError, match="have to be converted when they are read"):
        load(stacked, 4)
    with pytest.raises(UsageError, match="not cached on disk"):
        load(brain, 4, choice_of(DType.FLOAT32, "int8"))


@given(st.integers(1, 80), st.integers(0, 90), st.integers(0, 9))
def test_streamed_layers_are_so_many_and_spread(n_layers: int, n: int, start: int) -> None:
    found = streamed_layers(LayerRange(start, start + n_layers), n)
    assert len(set(found)) == len(found) == min(n, n_layers)
    assert all(start <= layer < start + n_layers for layer in found)
    gaps = [b - a for a, b in pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_layers_come_in_turn_and_each_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)))
    stream = LayerStream()
    places = {
        layer: stream.reserve(
            layer, [FilePart.of(file, 10 * layer, 5), FilePart.of(file, 10 * layer + 7, 3)]
        )
        for layer in (0, 2, 3, 5, 6)
    }
    assert stream.reserve(2, [FilePart.of(file, 0, 4)]) == 64
    stream.start()
    for _ in range(3):
        for layer, begin in places.items():
            stream.need(layer)
            held = stream.weights(begin, 8, stream.buffer_of(layer)).tolist()
            first = 10 * layer
            assert held == [*range(first, first + 5), *range(first + 7, first + 10)]
            stream.need(1)  # not streamed
            stream.done(1)
            stream.done(layer)
    assert stream.n_fetched == 3 * 5 + 2
    stream.need(5)  # a pass that was given up
    assert stream.weights(places[5], 1, stream.buffer_of(5)).tolist() == [50]


@needs_library
@pytest.mark.parametrize("n_in", [64, 33])
@pytest.mark.parametrize("shared_bytes", [1, 1 << 20])
@pytest.mark.parametrize("n_outs", [(16,), (32, 16, 5)], ids=str)
def test_what_is_packed_on_its_way_is_what_is_packed_at_once(
    n_outs: tuple[int, ...],
    shared_bytes: int,
    n_in: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Piece by piece, by two threads, and a last panel that is not full."""
    monkeypatch.setattr(layer_stream, "PIECE_BYTES", shared_bytes)
    monkeypatch.setattr(buffers, "_PACKED_AT_A_TIME", shared_bytes // 2)
    native = native_kernels()
    assert native is not None
    packing = PanelPacking(native=native, n_in=n_in, dtype=torch.bfloat16, form=BFLOAT16)
    weights = [torch.randn(n_out, n_in).bfloat16() for n_out in n_outs]
    file, parts, whole = tmp_path / "file", list[tuple[int, int]](), b"..."
    for weight in weights:
        parts.append((len(whole), 2 * weight.numel()))
        whole += weight.view(torch.uint8).numpy().tobytes()
    file.write_bytes(whole)
    stream = LayerStream()
    named = [FilePart.of(file, offset, size_bytes) for offset, size_bytes in parts]
    assert stream.reserve(1, named[:1]) == 0
    begin = stream.reserve(1, named, packing)
    end = stream.reserve(1, named[:1])
    stream.start()
    stream.need(1)
    shape, rows = (sum(n_outs), n_in), torch.eye(n_in)
    packed = stream.weights(begin, packing.packed_bytes(2 * shape[0] * n_in), 0)
    assert begin + packed.numel() <= end
    assert torch.equal(
        PanelLinear([Panels(packed=packed, form=BFLOAT16, shape=shape)], None, native)(rows),
        float_linear(weights, None, native)(rows),
    )
    first = weights[0].view(torch.uint8).flatten()
    for plain in (0, end):
        assert torch.equal(stream.weights(plain, first.numel(), 0), first)


MEASURE = """
import ctypes, json, sys, torch
from pathlib import Path
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.kernels.linear import probe
from shardnet.files import CacheFolder
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.model.config.panel_form import Quantization
from shardnet.stage.load import load_stage
from shardnet.types import *

def resident_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

def load(layers, n_streamed):
    return load_stage(checkpoint, layers, choice=choice, device=cpu, room_blocks=8, packs=packs,
                      progress=lambda done, total: None, n_streamed=n_streamed)

def step(stage, position):
    group = RowGroup(sequence_id=SequenceId(0), slot=SlotId(0), position=position, n_rows=1,
                     n_sampled=1)
    stage.forward(MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=[5]), None)

torch.set_num_threads(1)
cpu = torch.device("cpu")
checkpoint = Checkpoint.open(sys.argv[1])
kind = Quantization.named(sys.argv[2])
packs = PackCache(Path(sys.argv[1]) / "packs", "x", "x", kind) if kind else None
choice = probe(cpu, "auto", checkpoint.config.checkpoint_dtype, kind)
if kind:  # rounding is for the first start
    load(LayerRange(0, 8), 8)
warm = load(LayerRange(0, 8), 8)
step(warm, 0)
del warm
ctypes.CDLL(None).malloc_trim(0)
idle = resident_bytes()
stage = load(LayerRange(0, 8), 8)
ctypes.CDLL(None).malloc_trim(0)  # as loading does in the end
most = 0
for position in range(3):
    step(stage, position)
    most = max(most, resident_bytes() - idle)
print(json.dumps({"dtype": choice.dtype.value, "most": most, "fetched": stage.n_fetched}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers weigh far more than a step takes."""
    return make_large(tmp_path_factory.mktemp("large"))


@needs_vectors  # else what is stored in bfloat16 is computed in float32, and cannot be streamed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quant", cases(["none"], ["int8", "experts"]))
def test_resident_memory_is_what_was_predicted(quant: str, large: Path, tmp_path: Path) -> None:
    """Pages of files included: no more than the planner says, far less than the layers weigh."""
    folder = large
    if quant == "experts":
        shape = {
            "hidden_size": 512,
            "moe_intermediate_size": 512,
            "num_experts": 32,
            "head_dim": 64,
        }
        more = {"num_hidden_layers": 8, "with_tokenizer": False, "dtype": torch.bfloat16}
        folder, quant = make_decoder(tmp_path, "qwen3_moe", **shape, **more), "none"
    figures = figures_of(MEASURE, str(folder), quant)
    config, kind = Checkpoint.open(folder).config, Quantization.named(quant)
    dtype = DType(figures["dtype"])
    form = WeightForm(dtype=dtype, quant=kind)
    predicted = stage_weight_bytes(config, LayerRange(0, 8), form, 8)
    resident = stage_weight_bytes(config, LayerRange(0, 8), form)
    slack = 6 << 20
    """The KV cache's block, and what a step takes."""
    assert figures["most"] <= 1.05 * predicted + slack
    assert predicted < 0.6 * resident
    assert figures["fetched"] == 2 + 3 * 8


def test_a_disk_that_does_not_answer_fails_what_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once while it hangs, and not any more when it answers."""
    answers = threading.Event()
    path = tmp_path / "layer"
    path.write_bytes(b"weights!")
    usual: Any = layer_stream.bring

    def bring(*piece: Any) -> None:
        assert answers.wait(60)
        usual(*piece)

    monkeypatch.setattr(layer_stream, "bring", bring)
    stream = LayerStream(silence_s=0.05)
    for layer in range(3):
        stream.reserve(layer, [FilePart.of(path, 0, 8)])
    stream.start()
    try:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=rf"{path}: the disk does not answer"):
                stream.need(0)
        with pytest.raises(CheckpointError, match=rf"{path}: the disk does not answer"):
            stream.need(1)  # as a pass that starts elsewhere
    finally:
        answers.set()
    for layer in range(3):
        wait_until_read(stream, layer)
        stream.done(layer)


def test_experts_that_come_slowly_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each time that a disk may be silent for, it brings one piece."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(40)))
    begun, may_come = threading.Semaphore(0), threading.Semaphore(0)

    def bring(buffer: torch.Tensor, piece: Any) -> None:
        begun.release()
        may_come.acquire()
        buffers.bring(buffer, piece)

    def wait_once(reads: Sequence[Future[None]], silence_s: float) -> Any:
        may_come.release()
        while not begun.acquire(timeout=0.01) and not reads[0].done():
            pass
        return wait(reads, 0)

    monkeypatch.setattr(layer_stream, "bring", bring)
    monkeypatch.setattr(layer_stream, "wait", wait_once)
    monkeypatch.setattr(streamed_linear, "PIECE_BYTES", 10)
    pool = ExpertPool()
    expert = pool.expert(0, 0)
    expert.reserve(0, [FilePart.of(path, 0, 40)])
    pool.start()
    expert.fetch()
    begun.acquire()
    assert expert.weights(0, 40, expert.buffer_of(0)).tolist() == [*range(40)]


@pytest.mark.parametrize("kind", ["layer", "expert"])
def test_a_read_that_failed_once_is_tried_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there was no memory to pack in."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(8)))
    failures: list[Exception] = [MemoryError("once")]

    def bring(buffer: torch.Tensor, piece: Any) -> None:
        if failures:
            raise failures.pop()
        buffers.bring(buffer, piece)

    monkeypatch.setattr(layer_stream, "bring", bring)
    stream, pool = LayerStream(), ExpertPool()
    stream.reserve(0, [FilePart.of(path, 0, 8)])
    expert = pool.expert(0, 0)
    expert.reserve(0, [FilePart.of(path, 0, 8)])

    def read() -> torch.Tensor:
        if kind == "expert":
            return expert.weights(0, 8, expert.buffer_of(0))
        stream.need(0)
        return stream.weights(0, 8, stream.buffer_of(0))

    (pool if kind == "expert" else stream).start()
    with pytest.raises(MemoryError):
        read()
    assert read().tolist() == [*range(8)]


def wait_until_read(stream: LayerStream, layer: int) -> None:
    """Need a layer of a disk that has begun to answer."""
    for _ in range(1000):
        try:
            return stream.need(layer)
        except CheckpointError:
            time.sleep(0.001)
    raise AssertionError("it never answers")
