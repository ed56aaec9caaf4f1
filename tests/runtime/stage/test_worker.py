"""A stage between a source and a sink that the test holds in its hands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from shardnet.errors import LinkClosedError, WrongValuesError
from shardnet.runtime.stage.compute import (
    Activations,
    Samples,
    StageInput,
    StageOutput,
    StepArrived,
    StepComputed,
    StepFailed,
    StepResult,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.worker import StageWorker
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import FreeSlot
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType

DEADLINE_S = 30.0


def arrived(step: int) -> StepArrived:
    group = RowGroup(
        sequence_id=SequenceId(1), slot=SlotId(0), position=step, n_rows=1, n_sampled=1
    )
    batch = MicroBatch(epoch=Epoch(1), step=StepId(step), groups=(group,), token_ids=(1,))
    return StepArrived(batch=batch, activations=None, timings=(), arrived_ns=0)


class Compute:
    """Answers every step with its number, once it may."""

    def __init__(self) -> None:
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.computed: list[int] = []
        self.n_resets = 0

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Nothing."""

    def open_sequence(
        self, sequence_id: SequenceId, slot: SlotId, sampling: SamplingParams
    ) -> None:
        """Nothing."""

    def close_sequence(self, sequence_id: SequenceId, slot: SlotId) -> None:
        """Nothing."""

    def reset(self) -> None:
        self.n_resets += 1

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Samples:
        assert self.may_compute.wait(DEADLINE_S)
        self.computed.append(batch.step)
        return Samples(token_ids=[batch.step], logprobs=[None])


class Stage:
    """A worker that runs, and both its ends: source and sink."""

    def __init__(self, compute: Compute | None = None) -> None:
        self.compute = compute or Compute()
        self.executor = Executor("stage")
        self.inputs: asyncio.Queue[StageInput] = asyncio.Queue()
        self.sent: list[int] = []
        self.received: asyncio.Queue[None] = asyncio.Queue()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.at_drain: asyncio.Queue[None] = asyncio.Queue()
        self.failure: Exception | None = None
        self.steps_done: list[int] = []
        self.task: asyncio.Task[None]
        self.sends_now = False
        self.refused: set[int] = set()
        self.sent_by: list[str] = []
        self.worker = StageWorker(
            rank=0,
            compute=self.compute,
            executor=self.executor,
            source=self,
            sink=self,
            on_step_done=self.steps_done.append,
        )

    async def receive(self) -> StageInput:
        arrived = await self.inputs.get()
        self.received.put_nowait(None)
        return arrived

    def offer(self, has_room: Callable[[], bool], take: Callable[[StageInput], None]) -> None:
        self.has_room_now, self.take = has_room, take

    @property
    def is_full(self) -> bool:
        return not self.has_room.is_set()

    def send_now(self, output: StageOutput) -> bool:
        assert isinstance(output, StepComputed)
        if not self.sends_now or output.batch.step in self.refused:
            return False
        self.sent_by.append(threading.current_thread().name)
        self.send(output)
        return True

    def send(self, output: StageOutput) -> None:
        if self.failure is not None:
            raise self.failure
        assert isinstance(output, StepComputed)
        self.sent.append(output.batch.step)

    async def drain(self) -> None:
        self.at_drain.put_nowait(None)
        await self.has_room.wait()

    async def idle(self) -> None:
        """Wait until the compute thread has done all it was given and the loop knows."""
        await self.executor.run(lambda: None)
        await asyncio.sleep(0)


@asynccontextmanager
async def running(stage: Stage | None = None) -> AsyncIterator[Stage]:
    """A stage, its worker as a task; the way it ends is not looked at."""
    stage = stage or Stage()
    async with asyncio.timeout(DEADLINE_S):
        task = stage.task = asyncio.create_task(stage.worker.run())
        try:
            yield stage
        finally:
            stage.compute.may_compute.set()
            task.cancel()
            await asyncio.wait([task])
            stage.executor.join()


def test_results_leave_in_order_and_are_counted_when_sent() -> None:
    async def main() -> None:
        async with running() as stage:
            for step in range(1, 9):
                stage.inputs.put_nowait(arrived(step))
            while len(stage.sent) < 8:
                await stage.at_drain.get()
                await stage.idle()
            assert stage.sent == stage.steps_done == list(range(1, 9))

    asyncio.run(main())


def test_a_sink_without_room_stops_the_stage_soon() -> None:
    """What was handed over is computed and waits in the sink; nothing more is taken in."""

    async def main() -> None:
        async with running() as stage:
            stage.has_room.clear()
            for step in range(1, 20):
                stage.inputs.put_nowait(arrived(step))
            await stage.at_drain.get()
            await stage.idle()
            assert stage.sent == [1]
            assert stage.inputs.qsize() == 18
            stage.has_room.set()
            while len(stage.sent) < 19:
                await stage.at_drain.get()
                await stage.idle()
            assert stage.sent == list(range(1, 20))

    asyncio.run(main())


def test_two_inputs_are_handed_to_the_thread_and_no_more() -> None:
    async def main() -> None:
        async with running() as stage:
            stage.compute.may_compute.clear()
            for step in range(1, 6):
                stage.inputs.put_nowait(arrived(step))
            for _ in range(3):
                await stage.received.get()
            for _ in range(2):
                await stage.at_drain.get()
            await asyncio.sleep(0)
            assert stage.at_drain.empty()  # the third is in hand, and waits for room
            assert stage.inputs.qsize() == 2
            stage.compute.may_compute.set()
            for _ in range(3):
                await stage.at_drain.get()
            await stage.idle()
            assert stage.sent == [1, 2, 3, 4, 5]

    asyncio.run(main())


def test_results_leave_by_the_compute_thread_unless_others_wait_for_the_loop() -> None:
    """In order, whichever way they go; what is offered while the worker waits is taken at once."""

    async def main() -> None:
        async with running() as stage:
            stage.compute.may_compute.clear()
            for step in (1, 2):
                stage.inputs.put_nowait(arrived(step))
                await stage.at_drain.get()
            assert not stage.has_room_now()
            stage.sends_now, stage.refused = True, {1}
            stage.compute.may_compute.set()
            done = threading.Event()
            stage.executor.post(done.set, pytest.fail, pytest.fail)
            assert done.wait(DEADLINE_S)  # without a turn of the loop
            assert stage.sent == []
            await stage.idle()
            assert stage.has_room_now()
            assert stage.sent_by == []
            stage.take(arrived(3))
            await stage.executor.run(lambda: None)
            assert stage.sent == stage.steps_done == [1, 2, 3]
            assert stage.sent_by == ["stage_0"]
            stage.failure = LinkClosedError("gone")
            stage.take(arrived(4))
            with pytest.raises(ExceptionGroup):
                await stage.task

    asyncio.run(main())


@pytest.mark.parametrize("failure", [LinkClosedError("gone"), ZeroDivisionError("a bug of ours")])
def test_what_sending_raises_ends_the_worker(failure: Exception) -> None:
    """Steps that were handed over before are computed, and their results go nowhere."""

    async def main() -> None:
        stage = Stage()
        stage.failure = failure
        for step in (1, 2):
            stage.inputs.put_nowait(arrived(step))
        with pytest.raises(ExceptionGroup) as ended:
            async with asyncio.timeout(DEADLINE_S):
                await stage.worker.run()
        assert ended.value.exceptions == (failure,)
        assert stage.steps_done == []
        assert stage.compute.n_resets == 0, "the next ring may go on from what sequences hold"
        stage.executor.join()

    asyncio.run(main())


def test_a_result_that_comes_after_the_end_is_not_sent() -> None:
    async def main() -> None:
        stage = Stage()
        stage.compute.may_compute.clear()
        task = asyncio.create_task(stage.worker.run())
        stage.inputs.put_nowait(arrived(1))
        await stage.at_drain.get()
        task.cancel()
        await asyncio.sleep(0)
        stage.compute.may_compute.set()
        await asyncio.wait([task])
        await stage.idle()
        assert stage.compute.computed == [1]
        assert stage.sent == []
        assert stage.compute.n_resets == 0, "the next ring may go on from what sequences hold"
        stage.executor.join()

    asyncio.run(main())


class TogetherStage(Compute):
    """Computes what waits together, and notes what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[int]] = []
        self.has_begun = threading.Event()

    def operate(self, operation: FreeSlot) -> None:
        self.passes.append([])

    def compute_pass(self, steps: Sequence[StepArrived]) -> list[StepResult]:
        self.has_begun.set()
        assert self.may_compute.wait(DEADLINE_S)
        self.passes.append([step.batch.step for step in steps])
        return [
            WrongValuesError.received("no")
            if step.batch.step == 4
            else Samples(token_ids=[], logprobs=[])
            for step in steps
        ]


def test_steps_that_wait_are_computed_together_in_order() -> None:
    """What waits behind the first pass is one pass; operations keep their place between steps."""

    async def main() -> None:
        compute = TogetherStage()
        outputs: list[StageOutput] = []
        inputs: asyncio.Queue[StageInput] = asyncio.Queue()
        everything_out = asyncio.Event()
        taken: asyncio.Queue[None] = asyncio.Queue()

        class Ends:
            is_full = False

            async def receive(self) -> StageInput:
                return await inputs.get()

            def offer(
                self, has_room: Callable[[], bool], take: Callable[[StageInput], None]
            ) -> None:
                """Nothing comes while `receive` waits."""

            def send_now(self, output: StageOutput) -> bool:
                return False

            def send(self, output: StageOutput) -> None:
                outputs.append(output)
                if len(outputs) == 9:
                    everything_out.set()

            async def drain(self) -> None:
                taken.put_nowait(None)

        ends, executor = Ends(), Executor("stage")
        worker = StageWorker(
            rank=2,
            compute=compute,
            executor=executor,
            source=ends,
            sink=ends,
            on_step_done=lambda step: None,
        )
        compute.may_compute.clear()
        task = asyncio.create_task(worker.run())
        try:
            inputs.put_nowait(arrived(1))
            await asyncio.to_thread(compute.has_begun.wait, DEADLINE_S)
            for step in (2, 3, 4, 5):
                inputs.put_nowait(arrived(step))
            inputs.put_nowait(FreeSlot(slot=SlotId(3)))
            for step in (6, 7):
                inputs.put_nowait(arrived(step))
            inputs.put_nowait(arrived(8))
            for _ in range(9):
                await taken.get()
            compute.may_compute.set()
            await everything_out.wait()
        finally:
            compute.may_compute.set()
            task.cancel()
            await asyncio.wait([task])
            executor.join()
        assert compute.passes == [[1], [2, 3, 4, 5], [], [6, 7, 8]]
        kinds = [type(output) for output in outputs]
        assert kinds == [
            *([StepComputed] * 3),
            StepFailed,
            StepComputed,
            FreeSlot,
            *([StepComputed] * 3),
        ]
        failed = outputs[3]
        assert isinstance(failed, StepFailed)
        assert isinstance(failed.error, WrongValuesError)
        assert failed.error.rank == 1, "the stage before gave these values"

    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main()

    asyncio.run(within_deadline())


class AheadCompute(Compute):
    """Computes the first step only once the files of the next one were read ahead."""

    reads_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.read: list[MicroBatch] = []
        self.may_compute.clear()

    def read_ahead(self, batch: MicroBatch) -> None:
        self.read.append(batch)
        if len(self.read) == 2:
            assert not self.computed
            self.may_compute.set()


def test_files_are_read_for_a_step_that_waits_while_another_is_computed() -> None:
    async def main() -> None:
        stage = Stage(compute := AheadCompute())
        async with running(stage):
            for step in (1, 2):
                stage.inputs.put_nowait(arrived(step))
            while len(stage.sent) < 2:
                await stage.at_drain.get()
                await stage.idle()
            assert (stage.sent, [batch.step for batch in compute.read]) == ([1, 2], [1, 2])

    asyncio.run(main())
