"""A ring that stands needs no disk: it serves while its own or another checkpoint hangs."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs
from support.cluster.town import make_sleepers
from support.rings.stage_forms import FORM

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.measuring.measurement import NOTHING_MEASURED
from shardnet.cluster.planning import planning
from shardnet.cluster.planning.planning import Planner
from shardnet.errors import BusyError, CheckpointError, DiskSilentError, PlanError
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.types import DType, NodeId
from shardnet.wire.messages.plans import ModelChoice

HERE, HANGING, ELSEWHERE = "/models/here", "/mnt/hangs", "/models/elsewhere"
FACTS = cast(ModelFacts, SimpleNamespace(model_id="a", stamp=(("f", 1, 1),), adapters=()))


class Disk:
    """What the planner asks of sharing. `answer` is whether nothing has changed, None for never."""

    def __init__(self, answer: bool | None, now: object = FACTS) -> None:
        self.answer, self.now = answer, now

    async def is_unchanged(self, facts: object, model: str) -> bool:
        if self.answer is None:
            await asyncio.Event().wait()
        return bool(self.answer)

    async def identify(self, model: str) -> object:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


@pytest.mark.parametrize(
    ("disk", "has_changed"),
    [
        (Disk(True, now=CheckpointError("it is not read")), False),
        (Disk(None), False),
        (Disk(False, now=DiskSilentError("silent")), False),
        (Disk(False), False),
        (Disk(False, now=SimpleNamespace(model_id="b", stamp=FACTS.stamp)), True),
        (Disk(False, now=SimpleNamespace(model_id="a", stamp=())), True),
    ],
)
def test_a_disk_that_does_not_answer_has_changed_nothing(
    disk: Disk, has_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "CHECK_S", 0.02)
    planner = Planner(
        sleepers=make_sleepers(),
        node=NodeId("a"),
        directory=cast(Any, None),
        sharing=cast(Any, disk),
        measuring=cast(Any, None),
        threads=cast(Any, None),
        log=pytest.fail,
    )
    assert asyncio.run(planner.has_changed(FACTS, HERE)) is has_changed


class StandingRing:
    """A ring that is built."""

    broken = None
    name = "r"
    spec = SimpleNamespace(form=structs.replace(FORM, model=HERE))
    n_users = 0

    @property
    def is_in_use(self) -> bool:
        return self.n_users > 0

    @contextlib.contextmanager
    def in_use(self) -> Any:
        self.n_users += 1
        try:
            yield
        finally:
            self.n_users -= 1


class Around:
    """All that is around a head; downloading HANGING waits for `answers`."""

    membership = None

    def __init__(self) -> None:
        self.answers, self.asked = asyncio.Event(), asyncio.Event()

    async def has_changed(self, facts: object, model: str) -> bool:
        return False

    async def is_provided(self, model: str) -> bool:
        return model != HANGING

    async def provide(self, *_: object) -> None:
        self.asked.set()
        await self.answers.wait()

    async def plan_awake(self, choice: ModelChoice, *_: object, divides: bool) -> Any:
        assert not divides, "several rings are the router's"
        if choice.model == ELSEWHERE:
            raise PlanError("no node has memory for it")
        return SimpleNamespace(choice=choice, nodes=(), ring_nodes=())

    async def prepare(self, plan: object) -> Any:
        return SimpleNamespace(tokenizer=None)


def test_a_ring_that_stands_serves_while_another_model_is_downloaded() -> None:
    """And may change; who wanted the other one does not take it from who came meanwhile."""

    async def main() -> None:
        around, ring = Around(), StandingRing()
        head = Head(
            node=NodeId("a"),
            host=cast(Any, around),
            planner=cast(Any, around),
            builder=cast(Any, around),
        )
        plan = SimpleNamespace(
            choice=ModelChoice(model=HERE),
            facts=FACTS,
            nodes=(),
            ring_nodes=(),
            measured=NOTHING_MEASURED,
            computes=lambda choice: choice.model == HERE,
            dtype=DType.FLOAT32,
            wires=(),
            gather_dtype=None,
        )
        standing = Lead(plan=cast(Any, plan), ring=cast(Any, ring), tokenizer=None, eos_ids=())
        head.led.lead = standing

        async def lead(model: str) -> None:
            choice = ModelChoice(model=model)
            async with head.lead(choice, on_plan=lambda _: None, on_progress=lambda *_: None):
                assert ring.n_users == 1
                around.answers.set()
                with pytest.raises(BusyError, match=f"generating with {HERE}"):
                    await other

        other = asyncio.create_task(lead(HANGING))
        await around.asked.wait()
        async with asyncio.timeout(30), head.led.changing(standing):
            assert head.opening is not None
            assert head.opening.model == HANGING
        async with asyncio.timeout(30):
            await lead(HERE)
        assert ring.n_users == 0

    asyncio.run(main())


def test_a_model_that_is_there_does_not_wait_for_the_download_of_another() -> None:
    async def main() -> None:
        around: Any = Around()
        head = Head(node=NodeId("a"), host=around, planner=around, builder=around)

        async def lead(model: str) -> None:
            choice = ModelChoice(model=model)
            async with head.lead(choice, on_plan=lambda _: None, on_progress=lambda *_: None):
                pytest.fail("there is no ring")

        downloading = asyncio.create_task(lead(HANGING))
        await around.asked.wait()
        with pytest.raises(PlanError):
            async with asyncio.timeout(10):
                await lead(ELSEWHERE)
        downloading.cancel()
        await asyncio.wait([downloading])

    asyncio.run(main())
