"""A scripted node that tells what its cluster and its ring do, as a test sets it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from support.cluster.checkup_facts import reply, view
from support.cluster.scripted_node import ScriptedNode

from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import UsageError
from shardnet.types import LiveState
from shardnet.wire.messages.activity import (
    CancelSequence,
    GetActivity,
    RequestProgress,
    RingActivity,
    StepRecord,
)
from shardnet.wire.messages.control import ControlMessage, Done
from shardnet.wire.messages.diagnostics import RingLoad, StageState
from shardnet.wire.messages.extras import StageTiming
from shardnet.wire.messages.generation import Unload
from shardnet.wire.messages.membership import ReportReply, ReportRequest
from shardnet.wire.messages.plans import LeftOut, PlannedStage, PlanReply, PlanRequest

MS = 1000
"""Microseconds in a millisecond."""


def two_nodes() -> list[ReportReply]:
    """Anna is asked, Bert is her peer."""
    return [reply("anna", view("bert")), reply("bert", view("anna"))]


def stage_state(**changes: Any) -> StageState:
    values: dict[str, Any] = {
        "model": "/m",
        "layers": (0, 2),
        "dtype": "float32",
        "kernel": "int8",
        "weight_bytes": 7,
        "room_blocks": 4,
        "used_blocks": 1,
        "n_stages": 2,
        "head": "anna-id",
    }
    return StageState(**values | changes)


def plan(number: int = 0) -> PlanReply:
    """Anna has the first two layers, Bert the last two."""

    def stage(rank: int, name: str) -> PlannedStage:
        return PlannedStage(
            rank=rank,
            node=f"{name}-id",
            name=name,
            address=f"{name}:1",
            layers=(2 * rank, 2 * rank + 2),
            weight_bytes=10,
            kv_bytes=20,
            compute_ms=1.5,
        )

    return PlanReply(
        request=number,
        model="org/Tiny-Llama",
        model_id="0" * 64,
        dtype="float32",
        wire_dtype="float32",
        context=64,
        stages=[stage(0, "anna"), stage(1, "bert")],
        left_out=[LeftOut(node="cleo-id", name="cleo", why="too slow")],
        why="it is the fastest",
    )


def step(number: int, sent_ms: float, *, tokens: int = 1, prompt_rows: int = 0) -> StepRecord:
    """A step of 10 ms: 3 and 4 in the stages, 1 in a queue, the rest on two hops."""
    return StepRecord(
        step=number,
        sent_us=int(sent_ms * MS),
        round_trip_us=10 * MS,
        n_rows=tokens + prompt_rows,
        n_prompt_rows=prompt_rows,
        n_tokens=tokens,
        timings=[
            StageTiming(rank=0, compute_us=3 * MS, queue_us=0, arrived_us=0),
            StageTiming(rank=1, compute_us=4 * MS, queue_us=1 * MS, arrived_us=0),
        ],
    )


def activity(*steps: StepRecord, age_ms: float = 10_000.0, **changes: Any) -> RingActivity:
    """What a ring does that has one request."""
    values: dict[str, Any] = {
        "request": 0,
        "ring": "r1",
        "age_us": int(age_ms * MS),
        "load": RingLoad(
            running=1,
            waiting=0,
            paused=0,
            warm_slots=0,
            warm_blocks=0,
            used_blocks=1,
            room_blocks=4,
        ),
        "plan": plan(),
        "steps": list(steps),
        "requests": [
            RequestProgress(
                sequence=7,
                state=LiveState.RUNNING,
                n_prompt=100,
                n_computed=64,
                n_kept=32,
                n_tokens=0,
                max_tokens=9,
                age_s=1.0,
            )
        ],
    }
    return RingActivity(**values | changes)


class WatchedNode(ScriptedNode):
    """Reports `replies`, and that its ring does `activity`."""

    def __init__(self) -> None:
        super().__init__()
        self.replies = two_nodes()
        self.activity = activity()
        self.asked_for: list[GetActivity] = []
        self.plans: list[PlanRequest] = []
        self.cancelled: list[int] = []

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        """Answer."""
        match message:
            case ReportRequest(request=number):
                for one in self.replies:
                    control.send(replace(one, request=number))
                control.send(Done(request=number))
            case _:
                answer = self._answer_of(message)
                await self._tell()
                if answer is None:
                    await super().handle(control, message)
                else:
                    control.send(answer)

    async def until_looked(self, n: int) -> None:
        """Wait until the ring was asked about so many times in all."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.asked_for) >= n)

    def _answer_of(self, message: Incoming) -> ControlMessage | None:
        match message:
            case GetActivity(request=number):
                self.asked_for.append(message)
                return replace(self.activity, request=number)
            case CancelSequence(request=number, ring=ring, sequence=sequence):
                if (ring, sequence) != ("r1", 7):
                    raise UsageError("it has ended")
                self.cancelled.append(sequence)
                return Done(request=number)
            case PlanRequest(request=number):
                self.plans.append(message)
                return plan(number)
            case Unload(request=number):
                return Done(request=number)
            case _:
                return None
