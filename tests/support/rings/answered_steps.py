"""A scheduler whose steps are answered at once, and what it asked of slots meanwhile."""

from __future__ import annotations

from typing import Any

from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    EncodePictures,
    Instruction,
    OperateSlot,
    SendStep,
)
from shardnet.runtime.scheduling.step_cost import RingLimits
from shardnet.types import Epoch


def ring_scheduler(**limits: Any) -> Scheduler:
    """Return the scheduler of a ring of one stage that keeps prefixes on disk."""
    defaults: dict[str, Any] = {"epoch": Epoch(1), "n_stages": 1, "prefix_seed": b"ring"}
    defaults |= {"room_blocks": 64, "context": 2048, "max_slots": 4}
    return Scheduler(RingLimits(**defaults | limits))


def run(scheduler: Scheduler) -> list[Instruction]:
    """Answer every step at once with token 7 until there is nothing to send.

    Pictures are encoded as soon as that is asked for.
    """
    done: list[Instruction] = []
    while instructions := scheduler.next_instructions():
        done += instructions
        for instruction in instructions:
            if isinstance(instruction, SendStep):
                batch = instruction.batch
                scheduler.on_tokens(batch.step, [7] * batch.n_sampled)
            elif isinstance(instruction, EncodePictures):
                scheduler.queue.encoded(instruction.sequence_id)
    return done


def operations(instructions: list[Instruction], kind: type[Any]) -> list[Any]:
    return [
        each.operation
        for each in instructions
        if isinstance(each, OperateSlot) and isinstance(each.operation, kind)
    ]
