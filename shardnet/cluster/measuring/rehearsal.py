"""Rehearse a ring of one stage around any steps: what a token takes beside computing.

Knows the engine, a stage's worker and what is sent to a client, all real. Must not know what the
steps compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import aclosing

from shardnet.errors import ShardnetError, internal_error
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import GenerationRequest, TokenGenerated
from shardnet.runtime.ring.pipeline import LocalSink, Pipeline
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.worker import StageWorker
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import SlotOperation
from shardnet.transport.link import Link
from shardnet.transport.loop import run
from shardnet.transport.memory import memory_pair
from shardnet.types import BLOCK_POSITIONS, Epoch, MicroBatch, WireDType
from shardnet.wire.messages.control import control_frame, read_control
from shardnet.wire.messages.generation import TextPiece
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

_CONTEXT = 2**16
"""More tokens than a measurement makes."""
_TOKEN = 1
_RING = RingLimits(
    epoch=Epoch(1),
    n_stages=1,
    room_blocks=2 * _CONTEXT // BLOCK_POSITIONS,
    context=_CONTEXT,
    max_slots=1,
)
_HELLO = Hello(
    purpose=Purpose.CONTROL, role=PeerRole.NODE, node="rehearsal", name="rehearsal", version=""
)


def rehearse(step: Callable[[], bool], *, on_any_thread: bool, set_up: Callable[[], None]) -> float:
    """Run `step` once for each token of a ring of one, until it returns False.

    Returns the seconds from one step to the next, their median. With `on_any_thread` steps may run
    on the loop's thread, where they are short; else on a thread of their own, on which `set_up`
    runs first. Blocks. Raises what `step` raises.
    """
    compute = _Rehearsed(step, on_any_thread=on_any_thread)
    run(_generate(compute, set_up))
    if compute.error is not None:
        raise compute.error
    return compute.between_s


class _Rehearsed:
    """A StageCompute that runs `step` for each token and notes the time in between."""

    used_blocks = 0

    def __init__(self, step: Callable[[], bool], *, on_any_thread: bool) -> None:
        self._step = step
        self.on_any_thread = on_any_thread
        self.error: Exception | None = None
        self.is_done = False
        self._ended_s: float | None = None
        self._between_s: list[float] = []

    @property
    def between_s(self) -> float:
        """The median of the seconds between two steps, 0 without any."""
        return statistics.median(self._between_s) if self._between_s else 0.0

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Nothing travels."""

    def operate(self, operation: SlotOperation) -> None:
        """There is no cache."""

    def reset(self) -> None:
        """There is no cache."""

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Samples:
        """Take a step, unless it was the last."""
        if not self.is_done:
            if self._ended_s is not None:
                self._between_s.append(time.perf_counter() - self._ended_s)
            try:
                self.is_done = not self._step()
            except Exception as error:  # what failed says so by its own name
                self.error, self.is_done = error, True
            self._ended_s = time.perf_counter()
        n_sampled = batch.n_sampled
        return Samples(token_ids=[_TOKEN] * n_sampled, logprobs=[None] * n_sampled)


class _Text:
    """A TextAssembler whose tokens are one word."""

    def push(self, token_id: int) -> tuple[str, bool]:
        return " word", False

    def finish(self) -> str:
        return ""


async def _generate(compute: _Rehearsed, set_up: Callable[[], None]) -> None:
    """Generate until `compute` is done, and send each token to somebody."""
    engine = Engine(
        scheduler=Scheduler(_RING),
        make_pipeline=lambda on_answered, on_failed: Pipeline(
            epoch=_RING.epoch,
            vocab_size=_TOKEN + 1,
            clock_ns=time.perf_counter_ns,
            on_answered=on_answered,
            on_failed=on_failed,
        ),
        clock_ns=time.perf_counter_ns,
    )
    executor = Executor("shardnet-rehearsal", set_up=set_up)
    worker = StageWorker(
        rank=0,
        compute=compute,
        executor=executor,
        source=engine.pipeline,
        sink=LocalSink(engine.pipeline),
        on_step_done=lambda step: None,
    )
    request = GenerationRequest(
        prompt=(_TOKEN,),
        sampling=SamplingParams(),
        max_tokens=_CONTEXT - 1,
        stop_ids=frozenset(),
        text=_Text(),
        stops_by_text=False,
    )

    def worker_ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            engine.fail(internal_error("a rehearsal", error))

    working = asyncio.create_task(worker.run())
    working.add_done_callback(worker_ended)
    here, there = await memory_pair(_HELLO, _HELLO)
    reading = asyncio.create_task(_read(there))
    try:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                if compute.is_done:
                    break
                if isinstance(event, TokenGenerated):
                    here.send(control_frame(_piece(event)))
                    await here.drain(shared=True)
    finally:
        here.abort("the rehearsal is over")
        working.cancel()
        await asyncio.wait([working, reading])
        await asyncio.gather(here.close(), there.close())
        executor.join()


async def _read(link: Link) -> None:
    """Read as a client does, until the link ends."""
    with contextlib.suppress(ShardnetError):
        while True:
            read_control(await link.receive())


def _piece(event: TokenGenerated) -> TextPiece:
    return TextPiece(
        request=1, token_ids=[event.token_id], tokens=[event.text], text=event.text, logprobs=None
    )
