"""Stages whose layers are cut over devices of one process: overlap, order, bits, and their end."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.models.checkpoints import make_llama
from support.rings.stage_chain import even_split, random_prompt
from support.rings.stage_forms import form_of
from support.rings.torch_rings import LoadedStages, load_stages, request, run, tokens_of

from shardnet.errors import ShardnetError, UsageError
from shardnet.runtime.loading.loaded_stage import (
    LoadedStage,
    computes_by_device,
    join,
    load_by_device,
)
from shardnet.runtime.loading.loading import load
from shardnet.runtime.stage.compute import (
    Activations,
    Samples,
    StageOutput,
    StepArrived,
    StepComputed,
    StepFailed,
)
from shardnet.runtime.stage.executor import ComputeThreads, Executor
from shardnet.runtime.stage.handover import Lane, LaneWorkers
from shardnet.runtime.stage.stage_order import StageDevice, StageOrder, StagePart
from shardnet.runtime.stage.torch_compute import HeldActivations
from shardnet.runtime.stage.worker import StageInputs
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import FreeSlot
from shardnet.types import (
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)

DEADLINE_S = 30.0
N_TOKENS = 256
GROUPS = (StageDevice(place=0, name="cpu:0"), StageDevice(place=1, name="cpu:1"))


def step(number: int) -> StepArrived:
    group = RowGroup(
        sequence_id=SequenceId(1), slot=SlotId(0), position=number, n_rows=1, n_sampled=1
    )
    batch = MicroBatch(epoch=Epoch(1), step=StepId(number), groups=(group,), token_ids=(1,))
    return StepArrived(batch=batch, activations=None, timings=(), arrived_ns=0)


class Part:
    """Computes when it may, and notes what it is given."""

    used_blocks = 0

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        self.seen: list[Any] = []
        self.begins = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Nothing."""

    def operate(self, operation: Any) -> None:
        self.seen.append(operation)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Any:
        self.begins.release()
        assert self.may_end.acquire(timeout=DEADLINE_S)
        self.seen.append(batch.step)
        if batch.step == 2 and not self.is_last:
            raise UsageError("no second step")
        if self.is_last:
            assert activations is not None
            return Samples(token_ids=[batch.step], logprobs=[None])
        return Activations(payload=b"x", dtype=WireDType.FLOAT32, width=1)

    def reset(self) -> None:
        """Nothing."""


class Sink:
    """Notes what comes out of a stage."""

    is_full = False

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[StageOutput] = asyncio.Queue()

    def send(self, output: StageOutput) -> None:
        self.outputs.put_nowait(output)

    def send_now(self, output: StageOutput) -> bool:
        return False

    async def drain(self) -> None:
        """At once."""


def test_devices_compute_at_the_same_time_and_in_order() -> None:
    """The second part computes a step while the first has the next; rank and time are one."""
    first, last = Part(is_last=False), Part(is_last=True)

    async def main() -> None:
        source, sink = StageInputs(), Sink()
        done: list[int] = []
        lanes = [Lane(part, Executor("lane")) for part in (first, last)]
        workers = LaneWorkers(lanes, rank=3, source=source, sink=sink, on_step_done=done.append)
        task = asyncio.create_task(workers.run())
        async with asyncio.timeout(DEADLINE_S):
            for arrived in (step(1), FreeSlot(slot=SlotId(7)), step(2), step(3)):
                source.put(arrived)
            for _ in range(3):
                first.may_end.release()
            begun = asyncio.to_thread
            assert await begun(last.begins.acquire)  # it has step 1 ...
            for _ in range(3):
                assert await begun(first.begins.acquire)  # ... while the others are computed
            assert done == []
            for _ in range(2):
                last.may_end.release()
            outputs = [await sink.outputs.get() for _ in range(4)]
            task.cancel()
            await asyncio.wait([task])
            for lane in lanes:
                lane.executor.join()
        assert [type(output) for output in outputs] == [
            StepComputed, FreeSlot, StepFailed, StepComputed,
        ]  # fmt: skip
        assert done == [1, 3]
        answer = outputs[0]
        assert isinstance(answer, StepComputed)
        [timing] = answer.timings
        assert timing.rank == 3
        assert timing.compute_us > 0

    asyncio.run(main())
    assert first.seen == [1, FreeSlot(slot=SlotId(7)), 2, 3]
    assert last.seen == [1, FreeSlot(slot=SlotId(7)), 3]


def test_two_groups_of_cores_give_the_tokens_of_one(tmp_path: Path) -> None:
    """In a ring of one node and in one of two; sampled and greedy; hidden states stay tensors."""
    folder = make_llama(tmp_path, num_hidden_layers=4)
    requests = [
        request(random_prompt(n, N_TOKENS, seed=n), 8, SamplingParams(temperature=t, seed=5))
        for n, t in ((5, 0.0), (37, 0.8))
    ]
    form = form_of(folder)
    kinds: set[type] = set()

    def ordered(layers: LayerRange, middle: int) -> StageOrder:
        return StageOrder(
            form=form,
            folder=folder,
            layers=layers,
            is_tail=layers.end == 4,
            parts=(
                StagePart(layers=LayerRange(layers.start, middle), devices=GROUPS[:1]),
                StagePart(layers=LayerRange(middle, layers.end), devices=GROUPS[1:]),
            ),
        )

    def loaded_stage(layers: LayerRange, middle: int) -> LoadedStage:
        order = ordered(layers, middle)
        told: list[tuple[int, int]] = []
        stage = load_by_device(
            order,
            [1 << 28, 1 << 27],
            lambda part, n_bytes, progress, _: load(part, n_bytes, progress),
            lambda *progress: told.append(progress),
        )
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1]
        assert stage.fits(order)
        # Each device has the room that it would have alone: the second one half of the first's.
        assert stage.room_blocks == stage.parts[1].room_blocks < stage.parts[0].room_blocks
        return stage

    def loaded(layers: LayerRange) -> list[Any]:
        stage = loaded_stage(layers, (layers.start + layers.end) // 2)
        stage.compute.use_wire(WireDType.FLOAT32, WireDType.FLOAT32)
        lanes = computes_by_device(stage)
        assert [place for place, _ in lanes] == [0, 1]
        first: Any = lanes[0][1]
        finish = first._finish

        def noting(*arguments: Any) -> Any:
            kinds.add(type(result := finish(*arguments)))
            return result

        first._finish = noting
        return [compute for _, compute in lanes]

    def grown() -> list[Any]:
        """A stage of two parts that stands by for the one behind it."""
        own = loaded_stage(LayerRange(0, 2), 1)
        order = ordered(LayerRange(0, 4), 1)
        [lacking] = own.lacks(order)
        assert (lacking.layers, lacking.device.place, lacking.is_tail) == (
            LayerRange(2, 4),
            1,
            True,
        )
        stage = join(order, [own, load(lacking, 1 << 28, lambda *_: None)])
        assert own.part(own.order) is own
        assert [part.order.device.place for part in stage.parts] == [0, 1, 1]
        stage.compute.use_wire(WireDType.FLOAT32, WireDType.FLOAT32)
        lanes = computes_by_device(stage)
        assert [place for place, _ in lanes] == [0, 1]
        return [compute for _, compute in lanes]

    whole = load_stages(folder, even_split(4, 1))
    expected = [tokens_of(events) for events in run(whole, *requests)]
    for computes in (
        [loaded(LayerRange(0, 4))],
        [loaded(each) for each in even_split(4, 2)],
        [grown()],
    ):
        cut = LoadedStages(computes=computes, vocab_size=whole.vocab_size)
        assert [tokens_of(events) for events in run(cut, *requests)] == expected
    assert kinds == {HeldActivations}


def test_a_lost_shard_of_a_part_is_the_loss_of_the_stage(tmp_path: Path) -> None:
    """It is loaded again, not kept nor joined; and what shards hold counts on each device."""
    folder = make_llama(tmp_path, num_hidden_layers=4)
    order = StageOrder(
        form=form_of(folder),
        folder=folder,
        layers=LayerRange(0, 2),
        is_tail=False,
    )
    part = load(order, 1 << 28, lambda *_: None)
    stage = replace(part, parts=(replace(part, order=replace(order, devices=GROUPS)), part))
    assert stage.fits(order)
    assert stage.lacks(replace(order, layers=LayerRange(0, 4), is_tail=True))
    half = part.weight_bytes // 2
    assert stage.weight_bytes_by_place == {0: part.weight_bytes + half, 1: half}
    lost = replace(part, compute=cast(Any, SimpleNamespace(is_lost=True)))
    stage = replace(part, parts=(part, lost))
    assert not stage.fits(order)
    assert not stage.lacks(replace(order, layers=LayerRange(0, 4), is_tail=True))


def test_a_job_for_the_whole_node_has_all_devices_for_itself() -> None:
    """Also with more than one such job at a time, and with threads of unlike groups."""
    groups = tuple(replace(each, cores=(0,)) for each in GROUPS)

    async def main() -> None:
        threads = ComputeThreads(groups)
        counts: list[int] = []
        threads.share_cores(8, counts.append)
        is_computing = threading.Event()
        may_end = threading.Event()

        def compute() -> None:
            is_computing.set()
            assert may_end.wait(DEADLINE_S)
            is_computing.clear()

        running = threads.submit(compute, 1)
        jobs = [asyncio.ensure_future(threads.run(is_computing.is_set)) for _ in range(2)]
        assert await asyncio.to_thread(is_computing.wait, DEADLINE_S)
        may_end.set()
        assert await asyncio.gather(*jobs) == [False, False]
        await running

        def fail() -> None:
            raise ShardnetError("no")

        with pytest.raises(ShardnetError, match="no"):
            await threads.run(fail)
        assert await threads.submit(lambda: 5, 1) == 5  # it does not wait for ever
        assert counts == [1, 1]  # none has more threads than cores
        threads.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
