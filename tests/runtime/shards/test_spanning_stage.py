"""Gathers between the nodes of a stage, and shard 0 that the others follow."""

from __future__ import annotations

import ctypes
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.needs import needs_library
from support.rings.stage_chain import CPU, Rows, StageChain, probed, random_prompt
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, LostShardError, NumericalError, ShardnetError
from shardnet.model.kernels.codec import pack_rows, torch_dtype, unpack_rows
from shardnet.model.kernels.linear import Kernel
from shardnet.model.shards import cut
from shardnet.model.shards.group import _Join
from shardnet.runtime.shards.spanning_stage import (
    _MOST_FREE_BYTES,
    LinkGroup,
    SpanningCompute,
)
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.slot_operations import FreeSlot, SlotOperation
from shardnet.types import (
    Arith,
    DType,
    Epoch,
    LayerRange,
    MicroBatch,
    SlotId,
    StepId,
    WireDType,
)
from shardnet.wire.framing.frames import Buffer
from shardnet.wire.payloads.rows import RowBlock

ENDS = (0, 96, 112, 200)
BATCH = MicroBatch(epoch=Epoch(1), step=StepId(4), groups=(), token_ids=())
DONE = Samples(token_ids=(), logprobs=())

Sent = dict[int, bytes] | ShardnetError


class Town:
    """The exchanges of all shards of a stage, in one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes = {(a, b): queue.SimpleQueue[object]() for a in range(size) for b in range(size)}
        self.calls: list[list[object]] = [[] for _ in range(size)]

    def exchange(self, index: int) -> _Exchange:
        return _Exchange(self, index)


class _Exchange:
    def __init__(self, town: Town, index: int) -> None:
        self.town, self.index = town, index
        self.open: deque[Mapping[int, memoryview]] = deque()

    def operate(self, operation: SlotOperation) -> None:
        self.town.calls[self.index].append(operation)

    def step(
        self, batch: MicroBatch, activations: Activations | None, deep: Sequence[RowBlock] = ()
    ) -> None:
        self.town.calls[self.index].append(batch)

    def begin(self, step: StepId) -> None:
        self.town.calls[self.index].append(step)

    def send_part(
        self,
        dtype: WireDType,
        n_rows: int,
        widths: Sequence[int],
        payload: Buffer,
        received: Mapping[int, memoryview],
    ) -> None:
        self._send(bytes(payload))
        for shard, into in received.items():
            assert len(into) == n_rows * dtype.row_bytes(widths[shard])
        self.open.append(received)

    def await_parts(self, n_left: int) -> None:
        while len(self.open) > n_left:
            for other, into in self.open.popleft().items():
                part = self.town.boxes[other, self.index].get(timeout=10)
                if isinstance(part, ShardnetError):
                    raise part
                assert isinstance(part, bytes)
                into[:] = part

    def fail_step(self, error: ShardnetError) -> None:
        self.town.calls[self.index].append(error)
        self._send(error)

    def _send(self, what: object) -> None:
        for other in range(self.town.size):
            self.town.boxes[self.index, other].put(what)


def on_all(size: int, job: Callable[[int], object]) -> list[object]:
    """What `job` returns on every shard, each on a thread of its own."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(job, range(size)))


def joined(rows: Tensor, wire: WireDType | None) -> list[Tensor]:
    """What each shard has of `rows` after a gather, in torch and again by the library's way."""
    size = len(ENDS) - 1
    town = Town(size)

    def job(index: int) -> Tensor:
        group = LinkGroup(index, size, wire)
        group.connect(town.exchange(index))
        part = rows[:, ENDS[index] : ENDS[index + 1]].contiguous()
        whole = group.gather(part, ENDS)
        if rows.dtype is not torch.float16:  # which the library does not know
            again, ends = torch.zeros_like(whole), (ctypes.c_int64 * len(ENDS))(*ENDS)
            for _ in range(2):
                again.zero_()
                _Join(group.struct.join)(
                    *(None, part.data_ptr(), again.data_ptr(), len(rows)),
                    *(ctypes.addressof(ends), rows.itemsize),
                )
                assert torch.equal(again, whole)
        group.check()
        return whole

    return [found for found in on_all(size, job) if isinstance(found, Tensor)]


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_of_unequal_width_are_joined_bit_by_bit(dtype: torch.dtype, n_rows: int) -> None:
    rows = torch.randn(n_rows, ENDS[-1]).to(dtype)
    for whole in joined(rows, None):
        assert whole.dtype == dtype
        assert torch.equal(whole, rows)
    if dtype is torch.bfloat16:  # rounded to it anyway: the wire changes nothing
        assert all(torch.equal(whole, rows) for whole in joined(rows, WireDType.BFLOAT16))


@pytest.mark.parametrize("wire", [WireDType.BFLOAT16, WireDType.INT8])
def test_on_a_narrower_wire_all_shards_have_the_same_bits(wire: WireDType) -> None:
    rows = torch.randn(3, ENDS[-1])
    first, *others = joined(rows, wire)
    assert others
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, rows)
    for begin, end in pairwise(ENDS):
        part = rows[:, begin:end]
        there_and_back = unpack_rows(
            bytes(pack_rows(part, wire)), wire, 3, end - begin, torch.device("cpu")
        )
        assert torch.equal(first[:, begin:end], there_and_back.float())


def test_prompts_of_many_lengths_leave_little_memory_behind() -> None:
    """The library's places in memory are remembered, what was received there is not."""
    town = Town(2)

    def job(index: int) -> tuple[int, int]:
        group, width = LinkGroup(index, 2), 4096
        group.connect(town.exchange(index))
        ends = (ctypes.c_int64 * 3)(0, width, 2 * width)
        for n_rows in range(2, 300, 4):
            part, whole = torch.ones(n_rows, width), torch.zeros(n_rows, 2 * width)
            _Join(group.struct.join)(
                *(None, part.data_ptr(), whole.data_ptr(), n_rows, ctypes.addressof(ends), 4)
            )
            assert bool(whole.all())
        group.check()
        free = sum(len(each) for some in group._buffers._free.values() for each in some)
        held = sum(len(each) for join in group._open for each in join.received.values())
        return free, held

    for free, held in on_all(2, job):
        assert 0 < free <= _MOST_FREE_BYTES
        assert held == 0


class _Compute:
    """A stage of one gather, which fails on one shard."""

    used_blocks = 3

    def __init__(self, group: LinkGroup, fails: ShardnetError | None = None) -> None:
        self.group, self.fails = group, fails
        self.operations: list[SlotOperation] = []

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Take any."""

    def operate(self, operation: SlotOperation) -> None:
        self.operations.append(operation)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Samples:
        if self.fails is not None:
            raise self.fails
        ends = range(self.group.size + 1)
        whole = self.group.gather(torch.ones(1, 1), ends)
        if not bool(whole.all()):
            raise NumericalError("computed from zeros")
        return DONE

    def reset(self) -> None:
        """Forget nothing."""


def spanning(town: Town, index: int, fails: ShardnetError | None = None) -> SpanningCompute:
    group = LinkGroup(index, town.size)
    compute = SpanningCompute(_Compute(group, fails), group)
    compute.connect(town.exchange(index))
    return compute


def computed(compute: SpanningCompute) -> object:
    try:
        return compute.compute(BATCH, None)
    except ShardnetError as error:
        return error


def test_shard_0_has_the_others_do_what_it_does() -> None:
    town = Town(3)

    def job(index: int) -> object:
        compute = spanning(town, index)
        compute.operate(FreeSlot(slot=SlotId(1)))
        return computed(compute)

    assert on_all(3, job) == [DONE] * 3
    assert town.calls == [[FreeSlot(slot=SlotId(1)), BATCH, 4], [4], [4]]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_step_that_fails_on_one_shard_fails_on_all_by_the_same_name(failing: int) -> None:
    town, full = Town(3), CapacityError("full")
    found = on_all(3, lambda i: computed(spanning(town, i, full if i == failing else None)))
    assert found == [full] * 3


def test_a_part_that_cannot_travel_fails_the_step_on_all_shards() -> None:
    town = Town(2)

    def job(index: int) -> object:
        group = LinkGroup(index, 2, WireDType.FLOAT16)
        large = _Compute(group)
        compute = SpanningCompute(large, group)
        compute.connect(town.exchange(index))
        if index == 1:
            rows = torch.full((1, 1), 1e6)
            gather = group.gather
            group.gather = lambda part, ends: gather(rows, ends)  # type: ignore[method-assign]
        return computed(compute)

    for error in on_all(2, job):
        assert isinstance(error, NumericalError)
        assert "does not fit a float16 wire" in error.message


def test_a_bug_in_a_gather_of_the_library_fails_the_step_on_all_shards() -> None:
    """Of a function that C calls nothing is raised: what it did not join is not computed on."""
    town = Town(2)

    def job(index: int) -> object:
        group = LinkGroup(index, 2)
        compute = SpanningCompute(_NativeCompute(group), group)
        exchange = town.exchange(index)
        compute.connect(exchange)
        if index == 1:
            exchange.send_part = lambda *_: 1 // 0  # type: ignore[method-assign]
        first = computed(compute)
        vars(exchange).pop("send_part", None)
        return first, computed(compute)

    for first, second in on_all(2, job):
        assert isinstance(first, ShardnetError)
        assert "internal error in a gather" in first.message
        assert second == DONE


def test_after_a_gather_has_failed_the_library_gathers_no_more() -> None:
    """The other shards still wait for the parts of the one that failed."""
    town, group = Town(2), LinkGroup(0, 2, WireDType.FLOAT16)
    group.connect(town.exchange(0))
    group.gather(torch.full((1, 1), 1e6), (0, 1, 2))
    part, whole, ends = torch.ones(1, 1), torch.zeros(1, 2), (ctypes.c_int64 * 3)(0, 1, 2)
    town.boxes[1, 0].put(bytes(2))
    _Join(group.struct.join)(None, part.data_ptr(), whole.data_ptr(), 1, ctypes.addressof(ends), 4)
    assert town.boxes[0, 1].empty()
    with pytest.raises(NumericalError, match="does not fit a float16 wire"):
        group.check()


class _NativeCompute(_Compute):
    """The same, joined by the library."""

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Samples:
        part, whole = torch.ones(1, 1), torch.zeros(1, self.group.size)
        ends = (ctypes.c_int64 * 3)(0, 1, 2)
        _Join(self.group.struct.join)(
            None, part.data_ptr(), whole.data_ptr(), 1, ctypes.addressof(ends), 4
        )
        return DONE


def test_without_the_other_shards_nothing_is_computed() -> None:
    group = LinkGroup(1, 2)
    compute = SpanningCompute(_Compute(group), group)
    with pytest.raises(LostShardError, match="not connected"):
        compute.compute(BATCH, None)
    group.gather(torch.ones(1, 1), (0, 1, 2))
    with pytest.raises(LostShardError, match="not connected"):
        group.check()
    group.connect(Town(2).exchange(1))
    group.check()
    assert compute.used_blocks == 3


@needs_library
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_prompts_that_travel_in_pieces_have_the_bits_of_the_whole_stage(
    family: str, dtype: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "WHOLE_WEIGHTS", 0)
    folder = make_decoder(tmp_path, family, dtype=torch_dtype(dtype))
    choice = probed(CPU, dtype, dtype, None, Arith.FAST)
    layers = [LayerRange(0, Checkpoint.open(folder).config.n_layers)]

    def logits(group: LinkGroup | None) -> Tensor:
        chain, found = StageChain.load(folder, layers, choice, group=group), []
        for position, n_rows in ((0, 140), (140, 300), (440, 1)):
            if group is not None:
                group.begin()
            ids = random_prompt(n_rows, 290, seed=n_rows)
            found.append(chain.step(Rows(slot=0, position=position, ids=ids, n_sampled=n_rows)))
        return torch.cat(found)

    whole, n_shards = logits(None), 3
    town = Town(n_shards)
    most_open = [0] * n_shards

    def job(index: int) -> Tensor:
        group, exchange = LinkGroup(index, n_shards), town.exchange(index)
        group.connect(exchange)
        awaits = exchange.await_parts

        def await_parts(n_left: int) -> None:
            most_open[index] = max(most_open[index], len(exchange.open))
            awaits(n_left)

        exchange.await_parts = await_parts  # type: ignore[method-assign]
        return logits(group)

    for own in on_all(n_shards, job):
        assert isinstance(own, Tensor)
        assert torch.equal(own, whole)
    if choice.kernel is Kernel.NATIVE and family != "deepseek_v3":
        assert min(most_open) > 1  # parts were under way while others were multiplied
