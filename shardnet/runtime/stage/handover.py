"""A stage whose parts are computed by several devices of one process, one behind the other.

Each device has a compute thread of its own, so that one micro-batch is computed there while the
next is computed before it. What passes between them stays in memory. To the ring it is one stage.
Must not know devices, nor how layers were divided.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardnet.errors import internal_error
from shardnet.runtime.processors.alertness import Alertness
from shardnet.runtime.stage.compute import (
    Activations,
    StageCompute,
    StageOutput,
    StepArrived,
    StepComputed,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.worker import StageInputs, StageSink, StageSource, StageWorker
from shardnet.types import SequenceId, StepId


class Handover(StageInputs, StageSink):
    """Between two parts of a stage: the sink of the first, the source of the second.

    The head's credit bounds how many steps wait here.
    """

    def send(self, output: StageOutput) -> None:
        """See StageSink."""
        if not isinstance(output, StepComputed):
            self.put(output)
            return
        if not isinstance(output.result, Activations):
            raise internal_error("a stage", TypeError("only its last part can sample"))
        self.put(
            StepArrived(
                batch=output.batch,
                activations=output.result,
                timings=output.timings,
                arrived_ns=time.perf_counter_ns(),
                routing=output.routing,
                blocks=output.blocks,
            )
        )


@dataclass(frozen=True, slots=True)
class Lane:
    """Neighbouring layers of a stage on one device, and the thread that drives it."""

    compute: StageCompute
    executor: Executor


class LaneWorkers:
    """Workers for the lanes of a stage, from its source to its sink; see StageWorker."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        rank: int,
        source: StageSource,
        sink: StageSink,
        on_step_done: Callable[[StepId], None],
        alertness: Alertness | None = None,
    ) -> None:
        self._workers: list[StageWorker] = []
        for place, lane in enumerate(lanes):
            is_last = place == len(lanes) - 1
            between = Handover()
            self._workers.append(
                StageWorker(
                    rank=rank,
                    compute=lane.compute,
                    executor=lane.executor,
                    source=source,
                    sink=sink if is_last else between,
                    on_step_done=on_step_done if is_last else _not_yet,
                    alertness=alertness if is_last else None,
                    stays_off_loop=len(lanes) > 1,
                )
            )
            source = between

    @property
    def open_sequences(self) -> set[SequenceId]:
        """Sequences that own a slot on this stage, as far as its inputs have arrived."""
        return self._workers[0].open_sequences

    async def run(self) -> None:
        """Work until cancelled. Raises as StageWorker.run."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(worker.run())


def _not_yet(_step: StepId) -> None:
    """Take no notice: the step is done where the last part has computed it."""
