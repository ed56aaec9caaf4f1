"""Runs a stage: receives inputs, computes them in order, sends the results on.

Knows one compute thread; results are sent as they are made, and the next rows are queued to the
thread while the last ones are sent. Must not know tensors, sockets or which node is the head.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shardnet.errors import ShardnetError, internal_error, where
from shardnet.runtime.stage.compute import (
    PassCompute,
    StageCompute,
    StageInput,
    StageOutput,
    StepArrived,
    StepComputed,
    StepFailed,
    StepResult,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.threads import contained
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    CloseSequence,
    FreeSlot,
    OpenSequence,
    SequenceId,
    StepId,
)
from shardnet.wire.messages.extras import StageTiming

log = logging.getLogger(__name__)

_QUEUED = 2
"""Inputs queued to the compute thread and not sent on yet: one computes, one waits."""


_QUEUED_FOR_A_PASS = 64
"""The same where one pass computes several steps."""

_MAX_ROWS_OF_A_PASS = 2 * PREFILL_CHUNK_ROWS
"""Most rows of the steps in one pass, unless a single step has more."""


class StageSource(Protocol):
    """Where a stage's inputs come from: the previous stage, or the head's own pipeline."""

    async def receive(self) -> StageInput:
        """Return the next input in data order. Raises LinkError when the ring is broken."""


class StageSink(Protocol):
    """Where a stage's outputs go: the next stage, or the head."""

    def send(self, output: StageOutput) -> None:
        """Send one output at once. Raises LinkError when the ring is broken."""

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
        """Sequences that own a slot on this stage, as far as its inputs have arrived."""
        self._together = compute if isinstance(compute, PassCompute) else None
        self._limit = _QUEUED if self._together is None else _QUEUED_FOR_A_PASS
        self._waiting: deque[StageInput] = deque()  # the loop appends, the compute thread takes
        self._n_queued = 0
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
                self._failure.exception()  # raised already, or not awaited
            await self._executor.run(self._compute.reset)

    async def _take_in(self) -> None:
        while True:
            arrived = await self._source.receive()
            if isinstance(arrived, OpenSequence):
                self.open_sequences.add(arrived.sequence_id)
            elif isinstance(arrived, CloseSequence):
                self.open_sequences.discard(arrived.sequence_id)
            while self._n_queued == self._limit:
                self._room.clear()
                await self._room.wait()
            self._n_queued += 1
            self._waiting.append(arrived)
            self._executor.post(self._process, self._pass_on, self._fail)
            await self._sink.drain()

    async def _watch(self) -> None:
        """Raise a failure from outside `_take_in`."""
        await self._failure

    def _pass_on(self, outputs: Sequence[StageOutput]) -> None:
        """Send the outputs of the compute thread. Called by the loop."""
        if self._failure.done():
            return  # the worker has ended
        try:
            for output in outputs:
                self._sink.send(output)
                if isinstance(output, StepComputed):
                    self._on_step_done(output.batch.step)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # no task awaits this: any error must end the worker
            self._fail(contained(error))
        self._n_queued -= len(outputs)
        self._room.set()

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # --- on the compute thread

    def _process(self) -> Sequence[StageOutput]:
        """Compute the first queued input, together with the steps behind it where a pass allows.

        Later queued calls for those steps are no-ops.
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
            if n_rows > _MAX_ROWS_OF_A_PASS:
                break
            self._waiting.popleft()
            steps.append(step)
        results = self._together.compute_pass(steps)
        return [self._output(*pair, started_ns) for pair in zip(steps, results, strict=True)]

    def _computed(self, arrived: StepArrived) -> StepResult:
        try:
            return self._compute.compute(arrived.batch, arrived.activations)
        except ShardnetError as error:
            return error
        except Exception as error:  # its sequences end, the ring goes on
            named = internal_error(f"step {arrived.batch.step} at rank {self._rank}", error)
            log.error("%s, raised in %s", named.message, where(error))
            log.debug("in full:", exc_info=error)
            return named

    def _output(
        self, arrived: StepArrived, result: StepResult, started_ns: int
    ) -> StepComputed | StepFailed:
        if isinstance(result, ShardnetError):
            return StepFailed(step=arrived.batch.step, error=result)
        timing = StageTiming(
            rank=self._rank,
            compute_us=(self._clock_ns() - started_ns) // 1000,
            queue_us=max(0, started_ns - arrived.arrived_ns) // 1000,
            arrived_us=arrived.arrived_ns // 1000,
        )
        return StepComputed(
            batch=arrived.batch,
            result=result,
            timings=(*arrived.timings, timing),
            routing=(*arrived.routing, *result.routing),
        )
