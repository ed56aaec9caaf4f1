"""Runs a stage: receives inputs, computes them in order, sends the results on.

Knows one compute thread; results are sent as they are made, and the next rows are queued to the
thread while the last ones are sent. Must not know tensors, sockets or which node is the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from shardnet.errors import (
    CapacityError,
    LostShardError,
    ShardnetError,
    WrongValuesError,
    internal_error,
    where,
    without_frames,
)
from shardnet.runtime.processors.alertness import Alertness
from shardnet.runtime.stage.compute import (
    AheadCompute,
    AnyThreadCompute,
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
from shardnet.slot_operations import CloseSequence, OpenSequence
from shardnet.threads import contained
from shardnet.types import PREFILL_CHUNK_ROWS, SequenceId, StepId
from shardnet.wire.messages.extras import StageTiming

log = logging.getLogger(__name__)

_QUEUED = 2
"""Inputs queued to the compute thread and not sent on yet: one computes, one waits."""


_QUEUED_FOR_A_PASS = 64
"""The same where one pass computes several steps."""

_SHORT_US = 1500
"""A step that takes no longer is computed where it arrives, if nothing else is to be computed: on
the compute thread it would wait for that to wake."""

_MAX_ROWS_OF_A_PASS = 2 * PREFILL_CHUNK_ROWS
"""Most rows of the steps in one pass, unless a single step has more."""


def _take_nothing(_arrived: StageInput) -> None:
    """Take no input: nothing is offered where there is never room."""


class StageSource(Protocol):
    """Where a stage's inputs come from: the previous stage, or the head's own pipeline."""

    async def receive(self) -> StageInput:
        """Return the next input in data order. Raises LinkError when the ring is broken."""

    def offer(self, has_room: Callable[[], bool], take: Callable[[StageInput], None]) -> None:
        """Give `take` each input that comes while `receive` waits, if `has_room` says so then.

        At once: another turn of the loop would cost as much as all else on the way.
        """


class StageInputs:
    """Inputs on their way to a stage of the same process (StageSource). Of the loop's thread."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[StageInput] = asyncio.Queue()
        self._is_receiving = False
        self._has_room: Callable[[], bool] = lambda: False
        self._take: Callable[[StageInput], None] = self._waiting.put_nowait

    def put(self, made: StageInput) -> None:
        """Hand an input over: at once where the stage waits for one and has room."""
        if self._is_receiving and self._waiting.empty() and self._has_room():
            self._take(made)
        else:
            self._waiting.put_nowait(made)

    async def receive(self) -> StageInput:
        """See StageSource."""
        self._is_receiving = True
        try:
            return await self._waiting.get()
        finally:
            self._is_receiving = False

    def offer(self, has_room: Callable[[], bool], take: Callable[[StageInput], None]) -> None:
        """See StageSource."""
        self._has_room, self._take = has_room, take


class StageSink(Protocol):
    """Where a stage's outputs go: the next stage, or the head."""

    def send(self, output: StageOutput) -> None:
        """Send one output at once. Raises LinkError when the ring is broken."""

    @property
    def is_full(self) -> bool:
        """Whether `drain` would wait: not where nothing is queued."""
        return False

    def send_now(self, output: StageOutput) -> bool:
        """Send one output from any thread, unless others wait before it; return whether it did.

        Raises LinkError when the ring is broken. What is the loop's alone refuses.
        """
        return False

    async def drain(self) -> None:
        """Wait until there is room for more, not at all where nothing is queued."""
        return


@dataclass(eq=False, kw_only=True)
class StageWorker:
    """Runs one stage between its source and its sink until the ring breaks or it is cancelled."""

    rank: int
    compute: StageCompute
    executor: Executor
    source: StageSource
    sink: StageSink
    on_step_done: Callable[[StepId], None]
    alertness: Alertness | None = None
    clock_ns: Callable[[], int] = time.perf_counter_ns
    stays_off_loop: bool = False
    """Whether its own thread computes short steps, too."""

    def __post_init__(self) -> None:
        self.open_sequences: set[SequenceId] = set()
        """Sequences that own a slot on this stage, as far as its inputs have arrived."""
        self._together = self.compute if isinstance(self.compute, PassCompute) else None
        self._ahead = None
        if isinstance(self.compute, AheadCompute) and self.compute.reads_ahead:
            self._ahead = self.compute
        self._limit = _QUEUED if self._together is None else _QUEUED_FOR_A_PASS
        self._waiting: deque[StageInput] = deque()  # the loop appends, the compute thread takes
        # Counts of inputs, each with one writer: taken and passed on by the loop, sent and given
        # to the loop by the compute thread.
        self._n_taken = self._n_passed_on = 0
        self._n_sent_now = self._n_given = 0
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._waits_for_room = False
        self._anywhere = None
        if isinstance(self.compute, AnyThreadCompute) and not self.stays_off_loop:
            self._anywhere = self.compute
        self._n_short_rows = 0
        self._has_ended = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Work until cancelled. Raises the LinkError that broke the ring, in a group of one.

        What sequences hold stays as it is: the next ring may go on from there.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_in(), name=f"stage {self.rank}: take in")
                tasks.create_task(self._watch(), name=f"stage {self.rank}: watch")
        finally:
            self._has_ended = True
            if not self._failure.cancel() and not self._failure.cancelled():
                self._failure.exception()  # raised already, or not awaited

    async def _take_in(self) -> None:
        self.source.offer(self._can_take, self._take)
        try:
            while True:
                arrived = await self.source.receive()
                while not self._has_room():
                    self._room.clear()
                    self._waits_for_room = True
                    if not self._has_room():  # the compute thread has seen nobody wait
                        await self._room.wait()
                    self._waits_for_room = False
                self._take(arrived)
                await self.sink.drain()
        finally:  # who keeps the source must not keep the stage's weights
            self.source.offer(lambda: False, _take_nothing)

    def _has_room(self) -> bool:
        n_queued = self._n_taken - self._n_passed_on - self._n_sent_now
        return n_queued < self._limit

    def _can_take(self) -> bool:
        n_queued = self._n_taken - self._n_passed_on - self._n_sent_now  # every call counts here
        return n_queued < self._limit and not self.sink.is_full

    def _take(self, arrived: StageInput) -> None:
        """Queue an input to the compute thread."""
        if isinstance(arrived, OpenSequence):
            self.open_sequences.add(arrived.sequence_id)
        elif isinstance(arrived, CloseSequence):
            self.open_sequences.discard(arrived.sequence_id)
        is_for_here = self._is_for_here(arrived)
        self._n_taken += 1
        self._waiting.append(arrived)
        if not is_for_here:
            if self._ahead is not None and isinstance(arrived, StepArrived):
                self._ahead.read_ahead(arrived.batch)
            is_first = self.executor.is_idle
            self.executor.post(self._process, self._pass_on, self._fail)
            if is_first:
                self.executor.let_begin()
            return
        try:
            outputs = self._process()
        except Exception as error:  # as on the compute thread
            self._fail(contained(error))
            return
        if outputs is not None:
            self._pass_on(outputs)

    def _is_for_here(self, arrived: StageInput) -> bool:
        """Say whether to compute a step on the loop's thread: it is short, and no other waits."""
        return (
            self._anywhere is not None
            and isinstance(arrived, StepArrived)
            and len(arrived.batch.token_ids) <= self._n_short_rows
            and self._n_taken == self._n_passed_on + self._n_sent_now
            and self.executor.is_idle
            and self._anywhere.on_any_thread
        )

    async def _watch(self) -> None:
        """Raise a failure from outside `_take_in`."""
        await self._failure

    def _pass_on(self, outputs: Sequence[StageOutput]) -> None:
        """Send the outputs of the compute thread. Called by the loop."""
        if self._failure.done():
            return  # the worker has ended
        try:
            for output in outputs:
                self.sink.send(output)
                self._note_sent(output)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # no task awaits this: any error must end the worker
            self._fail(contained(error))
        self._n_passed_on += len(outputs)
        self._room.set()

    def _note_sent(self, output: StageOutput) -> None:
        if isinstance(output, StepComputed):
            self.on_step_done(output.batch.step)
            if self.alertness is not None:
                self.alertness.sent(hands_over=not self._n_short_rows)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # --- on the compute thread

    def _process(self) -> Sequence[StageOutput] | None:
        """Compute the first queued input, together with the steps behind it where a pass allows.

        Later queued calls for those steps are no-ops. Returns what the loop has to pass on.
        """
        if not self._waiting:
            return None
        arrived = self._waiting.popleft()
        outputs: Sequence[StageOutput]
        match arrived:
            case StepArrived():
                outputs = self._steps(arrived)
            case StepFailed():
                outputs = (arrived,)
            case _:
                self.compute.operate(arrived)
                outputs = (arrived,)
        if self._n_given == self._n_passed_on and not self._has_ended:
            outputs = self._unsent(outputs)
        self._n_given += len(outputs)
        return outputs or None

    def _unsent(self, outputs: Sequence[StageOutput]) -> Sequence[StageOutput]:
        """Send outputs past the loop, as none waits there; return those that it has to pass on.

        Waking the loop would cost as much as sending.
        """
        for place, output in enumerate(outputs):
            try:
                if not self.sink.send_now(output):
                    return outputs[place:]
            except ShardnetError:  # the loop meets it too, and ends the worker
                return outputs[place:]
            self._note_sent(output)
            self._n_sent_now += 1
            if self._waits_for_room:
                with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                    self._loop.call_soon_threadsafe(self._room.set)
        return ()

    def _steps(self, first: StepArrived) -> Sequence[StageOutput]:
        started_ns = self.clock_ns()
        if self._together is None:
            return (self._output(first, self._computed(first), started_ns),)
        steps, n_rows = [first], first.batch.n_rows
        while self._waiting and isinstance(step := self._waiting[0], StepArrived):
            n_rows += step.batch.n_rows
            if n_rows > _MAX_ROWS_OF_A_PASS:
                break
            self._waiting.popleft()
            steps.append(step)
        results: Sequence[StepResult]
        try:
            results = self._together.compute_pass(steps)
        except LostShardError:  # no step can be computed any more
            raise
        except Exception as error:  # as in `_computed`, for all of them
            results = [self._named(first, error)] * len(steps)
        outputs = []
        for step, result in zip(steps, results, strict=True):
            named = self._named(step, result) if isinstance(result, ShardnetError) else result
            outputs.append(self._output(step, named, started_ns))
        return outputs

    def _computed(self, arrived: StepArrived) -> StepResult:
        try:
            return self.compute.compute(arrived.batch, arrived.activations)
        except LostShardError:  # no step can be computed any more
            raise
        except Exception as error:  # its sequences end, the ring goes on
            return self._named(arrived, error)

    def _named(self, arrived: StepArrived, error: Exception) -> ShardnetError:
        """Name what a step has failed with, and the stage that made it fail."""
        if isinstance(error, WrongValuesError):
            error.rank = self.rank - error.is_received
        if isinstance(error, ShardnetError):
            return without_frames(error)
        step = f"step {arrived.batch.step} at rank {self.rank}"
        if isinstance(error, MemoryError):
            return CapacityError(
                f"no memory is left for {step}",
                remedy="start that node with less --memory, or end other programs there",
            )
        named = internal_error(step, error)
        log.error("%s, raised in %s", named.message, where(error))
        log.debug("in full:", exc_info=error)
        return named

    def _output(
        self, arrived: StepArrived, result: StepResult, started_ns: int
    ) -> StepComputed | StepFailed:
        if isinstance(result, ShardnetError):
            return StepFailed(step=arrived.batch.step, error=result)
        compute_us = (self.clock_ns() - started_ns) // 1000
        n_rows = len(arrived.batch.token_ids)
        if compute_us > _SHORT_US:
            self._n_short_rows = min(self._n_short_rows, n_rows - 1)
        elif n_rows > self._n_short_rows:
            self._n_short_rows = n_rows
        timing = StageTiming(
            rank=self.rank,
            compute_us=compute_us,
            queue_us=max(0, started_ns - arrived.arrived_ns) // 1000,
            arrived_us=arrived.arrived_ns // 1000,
        )
        return StepComputed(
            batch=arrived.batch,
            result=result,
            timings=_with(arrived.timings, timing),
            routing=(*arrived.routing, *result.routing),
            blocks=(*arrived.blocks, *result.blocks),
        )


def _with(timings: tuple[StageTiming, ...], own: StageTiming) -> tuple[StageTiming, ...]:
    """Add the times of a part of a stage: what its other parts took so far counts with it."""
    if not timings or timings[-1].rank != own.rank:
        return (*timings, own)
    last = timings[-1]
    joined = replace(
        last,
        compute_us=last.compute_us + own.compute_us,
        queue_us=last.queue_us + own.queue_us,
    )
    return (*timings[:-1], joined)
