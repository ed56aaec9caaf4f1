"""A stage at work: takes what arrives, computes it in order, passes the result on.

Knows the order of things: one compute thread, results leave as they are made, the next rows are
handed to the thread while the last ones are sent. Must not know tensors, sockets or who is head.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shardnet.errors import ShardnetError
from shardnet.runtime.stage.compute import (
    StageCompute,
    StageInput,
    StageOutput,
    StepArrived,
    StepComputed,
    StepFailed,
    StepResult,
    TogetherCompute,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    CloseSequence,
    FreeSlot,
    OpenSequence,
    SequenceId,
    StepId,
)
from shardnet.wire.messages.extras import StageTiming

_HANDED_OVER = 2
"""Inputs given to the compute thread and not sent on yet: one computes, one waits at its side."""


_TOGETHER = 64
"""The same where steps are computed together."""

_MAX_ROWS_TOGETHER = 2 * PREFILL_CHUNK_ROWS
"""Rows of steps that are computed together, unless one step alone has more."""


class StageSource(Protocol):
    """Where a stage's inputs come from: the previous stage, or the head's own pipeline."""

    async def receive(self) -> StageInput:
        """Return the next input in data order. Raises LinkError when the ring is broken."""


class StageSink(Protocol):
    """Where a stage's outputs go: the next stage, or the head."""

    def send(self, output: StageOutput) -> None:
        """Pass one output on at once. Raises LinkError when the ring is broken."""

    async def drain(self) -> None:
        """Wait until there is room for more."""


class StageWorker:
    """Runs one stage between its source and its sink until the ring breaks or it is cancelled."""

    def __init__(
        self,
        *,
        rank: int,
        compute: StageCompute,
        executor: Executor,
        source: StageSource,
        sink: StageSink,
        on_step_done: Callable[[StepId], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._rank = rank
        self._compute = compute
        self._executor = executor
        self._source = source
        self._sink = sink
        self._on_step_done = on_step_done
        self._clock_ns = clock_ns
        self.open_sequences: set[SequenceId] = set()
        """Sequences that own a slot here, as far as this stage has taken them in."""
        self._together = compute if isinstance(compute, TogetherCompute) else None
        self._limit = _HANDED_OVER if self._together is None else _TOGETHER
        self._waiting: deque[StageInput] = deque()  # the loop appends, the compute thread takes
        self._n_handed_over = 0
        self._room = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Work until cancelled. Raises the LinkError that broke the ring, in a group of one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_in(), name=f"stage {self._rank}: take in")
                tasks.create_task(self._watch(), name=f"stage {self._rank}: watch")
        finally:
            if not self._failure.cancel() and not self._failure.cancelled():
                self._failure.exception()  # raised by now, or nobody's
            await self._executor.run(self._compute.reset)

    async def _take_in(self) -> None:
        while True:
            arrived = await self._source.receive()
            if isinstance(arrived, OpenSequence):
                self.open_sequences.add(arrived.sequence_id)
            elif isinstance(arrived, CloseSequence):
                self.open_sequences.discard(arrived.sequence_id)
            while self._n_handed_over == self._limit:
                self._room.clear()
                await self._room.wait()
            self._n_handed_over += 1
            self._waiting.append(arrived)
            self._executor.post(self._process, self._pass_on, self._fail)
            await self._sink.drain()

    async def _watch(self) -> None:
        """Raise what went wrong outside of `_take_in`."""
        await self._failure

    def _pass_on(self, outputs: Sequence[StageOutput]) -> None:
        """Send on what the compute thread has made. Called by the loop."""
        if self._failure.done():
            return  # what comes after the end is for nobody
        try:
            for output in outputs:
                self._sink.send(output)
                if isinstance(output, StepComputed):
                    self._on_step_done(output.batch.step)
        except Exception as error:  # no task calls this: whatever it is must end the worker
            self._fail(error)
        self._n_handed_over -= len(outputs)
        self._room.set()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # --- on the compute thread

    def _process(self) -> Sequence[StageOutput]:
        """Take what waits first; with it, where that is how it is done here, steps behind it.

        Whoever was posted for those finds nothing left to do.
        """
        if not self._waiting:
            return ()
        arrived = self._waiting.popleft()
        match arrived:
            case StepArrived():
                return self._steps(arrived)
            case OpenSequence() | CloseSequence() | FreeSlot():
                self._compute.operate(arrived)
            case StepFailed():
                pass
        return (arrived,)

    def _steps(self, first: StepArrived) -> Sequence[StageOutput]:
        started_ns = self._clock_ns()
        if self._together is None:
            return (self._output(first, self._computed(first), started_ns),)
        steps, n_rows = [first], first.batch.n_rows
        while self._waiting and isinstance(step := self._waiting[0], StepArrived):
            n_rows += step.batch.n_rows
            if n_rows > _MAX_ROWS_TOGETHER:
                break
            self._waiting.popleft()
            steps.append(step)
        results = self._together.compute_together(steps)
        return [self._output(*pair, started_ns) for pair in zip(steps, results, strict=True)]

    def _computed(self, arrived: StepArrived) -> StepResult:
        try:
            return self._compute.compute(arrived.batch, arrived.activations)
        except ShardnetError as error:
            return error

    def _output(
        self, arrived: StepArrived, result: StepResult, started_ns: int
    ) -> StepComputed | StepFailed:
        if isinstance(result, ShardnetError):
            return StepFailed(step=arrived.batch.step, error=result)
        timing = StageTiming(
            rank=self._rank,
            compute_us=(self._clock_ns() - started_ns) // 1000,
            queue_us=max(0, started_ns - arrived.arrived_ns) // 1000,
        )
        return StepComputed(
            batch=arrived.batch,
            result=result,
            timings=(*arrived.timings, timing),
            routing=(*arrived.routing, *result.routing),
        )
