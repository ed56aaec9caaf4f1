"""Rings in one process: real workers, links, pipeline and engine around any stages' computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from shardnet.errors import ShardnetError, first_error
from shardnet.output_params import RoutingShape
from shardnet.runtime.engine.encoding import FirstStage
from shardnet.runtime.engine.engine import Engine, MakePipeline
from shardnet.runtime.engine.prefixes import Prefixes
from shardnet.runtime.processors.alertness import Alertness
from shardnet.runtime.ring.links import LinkSink, LinkSource, TailLink, TailSink
from shardnet.runtime.ring.pipeline import LocalSink, Pipeline
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.stage.compute import StageCompute
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.handover import Lane, LaneWorkers
from shardnet.runtime.stage.worker import StageSink, StageSource
from shardnet.transport import tcp
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.memory import memory_pair
from shardnet.types import Epoch
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

SMALLEST = LinkOptions(receive_frames=1, socket_buffer_bytes=2048)


class NoText:
    """A TextAssembler for tokens that mean nothing."""

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


@asynccontextmanager
async def running_ring(
    computes: Sequence[StageCompute | Sequence[StageCompute]],
    scheduler: Scheduler,
    *,
    vocab_size: int,
    routing: RoutingShape | None = None,
    over: str = "memory",
    options: LinkOptions = SMALLEST,
    prefixes: Prefixes | None = None,
    stage: FirstStage | None = None,
    is_alert: bool = False,
) -> AsyncIterator[tuple[Engine, list[Link]]]:
    """Run a ring over "memory" or "tcp" links, by default with the smallest queues and buffers.

    Stages are awake when steps are about to come if it `is_alert`.
    """
    epoch = scheduler.ring.epoch
    engine = Engine(
        scheduler=scheduler,
        make_pipeline=pipeline_maker(epoch, vocab_size, routing),
        clock_ns=time.perf_counter_ns,
        prefixes=prefixes,
        stage=stage,
    )
    async with running_stages(
        computes,
        engine.pipeline,
        epoch,
        engine.fail,
        over=over,
        options=options,
        is_alert=is_alert,
    ) as links:
        yield engine, links


def pipeline_maker(
    epoch: Epoch, vocab_size: int, routing: RoutingShape | None = None
) -> MakePipeline:
    return lambda on_answered, on_failed: Pipeline(
        epoch=epoch,
        vocab_size=vocab_size,
        clock_ns=time.perf_counter_ns,
        on_answered=on_answered,
        on_failed=on_failed,
        routing=routing,
    )


@asynccontextmanager
async def running_stages(
    computes: Sequence[StageCompute | Sequence[StageCompute]],
    pipeline: Pipeline,
    epoch: Epoch,
    on_broken: Callable[[ShardnetError], None],
    *,
    over: str = "memory",
    options: LinkOptions = SMALLEST,
    executors: list[Executor] | None = None,
    is_alert: bool = False,
) -> AsyncIterator[list[Link]]:
    """Run stages that work for `pipeline`; yields the links between them.

    A stage of several parts has a thread for each, which `executors` lists.
    """
    n_stages = len(computes)
    pairs = [await _pair(over, options) for _ in range(n_stages if n_stages > 1 else 0)]
    executors = [] if executors is None else executors
    awake = [Alertness() for _ in computes if is_alert]
    arrivals = [each.arrived for each in awake] or [lambda: None] * n_stages
    async with asyncio.TaskGroup() as tasks:
        running = []
        for rank, compute in enumerate(computes):
            source: StageSource = pipeline
            sink: StageSink = LocalSink(pipeline)
            if n_stages > 1:
                if rank:
                    source = LinkSource(pairs[rank - 1][1], epoch, arrivals[rank])
                is_tail = rank == n_stages - 1
                sink = (TailSink if is_tail else LinkSink)(pairs[rank][0], epoch)
            parts = compute if isinstance(compute, Sequence) else [compute]
            lanes = [Lane(part, Executor(f"stage-{rank}")) for part in parts]
            executors += [lane.executor for lane in lanes]
            worker = LaneWorkers(
                lanes,
                rank=rank,
                source=source,
                sink=sink,
                on_step_done=lambda step: None,
                alertness=awake[rank] if awake else None,
            )
            running.append(tasks.create_task(_until_broken(worker, on_broken)))
        if n_stages > 1:
            tail = TailLink(pairs[-1][1], epoch, arrivals[0])
            running.append(tasks.create_task(_answers(tail, pipeline)))
        links = [link for pair in pairs for link in pair]
        try:
            yield links
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            for each in awake:
                each.close()
            for link in links:
                link.abort("the test is over")
            await asyncio.gather(*(link.close() for link in links))
            for executor in executors:
                executor.join()


async def _until_broken(worker: LaneWorkers, on_broken: Callable[[ShardnetError], None]) -> None:
    try:
        await worker.run()
    except* ShardnetError as group:
        on_broken(ShardnetError(f"broken: {first_error(group)}"))


async def _answers(tail: TailLink, pipeline: Pipeline) -> None:
    tail.offer(lambda: True, pipeline.answer)
    try:
        while True:
            pipeline.answer(await tail.receive())
    except ShardnetError:
        return


async def _pair(over: str, options: LinkOptions) -> tuple[Link, Link]:
    hello = Hello(
        purpose=Purpose.DATA,
        role=PeerRole.NODE,
        node="n",
        name="n",
        version="0",
        ring="r",
        epoch=Epoch(1),
    )
    if over == "memory":
        return await memory_pair(hello, hello, options=options)
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def accept(link: Link) -> None:
        accepted.set_result(link)

    listener = await tcp.listen("127.0.0.1", 0, hello, accept, options=options)
    near = await tcp.connect("127.0.0.1", listener.port, hello, options=options)
    far = await accepted
    await listener.close()
    return near, far
