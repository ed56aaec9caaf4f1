"""The head while it loads a model: others are told so at once, who asked can end it, what breaks is
heard, and what can be refused is refused before anything is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import AsyncMock, Mock

import pytest

from shardnet.cluster.head.head import Head
from shardnet.cluster.head.ring_builder import RingBuilder
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.planning.planning import Elsewhere, Planner
from shardnet.errors import (
    BusyError,
    CheckpointError,
    LinkError,
    PeerFailedError,
    PlanError,
    ShardnetError,
)
from shardnet.types import NodeId
from shardnet.wire.messages.plans import ModelChoice

MODEL = "/models/large"


class Alone:
    """All that is around the head of one node that has every model, and no other ring."""

    membership = None
    table = turn_ends = None  # it is its own tokenizer

    def __init__(self, ring: type[EndlessRing]) -> None:
        self.n_freed = 0
        self.why_not: ShardnetError | None = None
        self.n_closed = 0
        self.has_tokenizer = True
        self._ring = ring

    def head(self) -> Head:
        """Make a head that plans for itself alone, and builds rings of the one kind."""
        return Head(
            node=NodeId("a"),
            host=cast(StageHost, self),
            planner=cast(Planner, self),
            builder=cast(RingBuilder, self),
        )

    async def unload(self, owner: str) -> None:
        """Count."""
        self.n_freed += 1

    async def is_provided(self, model: str) -> bool:
        """Nothing has to be downloaded."""
        return True

    async def plan_awake(self, *_: object, **__: object) -> Any:
        """Plan a ring without nodes."""
        facts = SimpleNamespace(path=MODEL)
        choice = ModelChoice(model=MODEL)
        return SimpleNamespace(
            choice=choice, nodes=(), ring_nodes=(), facts=facts, computes=choice.__eq__
        )

    async def prepare(self, plan: object) -> Any:
        """Give the ring, or raise why there is none."""
        if self.why_not is not None:
            raise self.why_not
        tokenizer = self if self.has_tokenizer else None
        return SimpleNamespace(ring=self._ring, tokenizer=tokenizer, eos_ids=(0,))

    def close(self) -> None:
        """Count the tokenizers that were closed."""
        self.n_closed += 1


class EndlessRing:
    """A ring whose weights never come to an end."""

    begun: asyncio.Event
    causes: list[str]

    name = "r"
    other_names = ()
    spec = SimpleNamespace(form=SimpleNamespace(model=MODEL), config=SimpleNamespace(vocab_size=1))

    def __init__(self, *_: object) -> None:
        pass

    def lost(self, cause: str) -> None:
        """Take note."""
        self.causes.append(cause)

    async def build(self, on_progress: Any) -> float:
        """Load until it is cancelled."""
        on_progress(0, "loading", 1, 2)
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # stages of other nodes are freed
            self.causes.append("freed")
        return 0.0


class StandingRing(EndlessRing):
    """A ring that stands at once."""

    broken = None
    is_in_use = False
    idle_s = 59.0

    async def build(self, on_progress: object) -> float:
        """Stand."""
        return 0.0

    async def wait_until_broken(self) -> None:
        """Nothing ends it."""
        await asyncio.Event().wait()

    async def unload(self, **_: object) -> None:
        """Nothing has to be freed."""

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Count nobody."""
        return contextlib.nullcontext()


@pytest.fixture
def endless() -> type[EndlessRing]:
    """A kind of ring that never stands."""
    EndlessRing.begun, EndlessRing.causes = asyncio.Event(), []
    return EndlessRing


async def ask(head: Head) -> None:
    choice = ModelChoice(model=MODEL)
    async with head.lead(choice, on_plan=lambda _: None, on_progress=lambda *_: None):
        raise AssertionError("the ring stands")


def test_unloading_is_refused_at_once_while_a_model_is_loaded(endless: type[EndlessRing]) -> None:
    async def main() -> None:
        alone = Alone(endless)
        head = alone.head()
        asking = asyncio.create_task(ask(head))
        await endless.begun.wait()
        async with asyncio.timeout(60):
            with pytest.raises(BusyError, match=f"is loading {MODEL}; stop the command"):
                await head.unload()
        assert not asking.done()
        assert head.opening is not None
        assert (head.opening.model, head.opening.progress[0]) == (MODEL, ("loading", 1, 2))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert head.opening is None
        await head.unload()
        assert alone.n_freed == 1

    asyncio.run(main())


def test_a_head_that_leaves_waits_until_what_it_was_building_is_freed(
    endless: type[EndlessRing],
) -> None:
    async def main() -> None:
        alone = Alone(endless)
        head = alone.head()
        asking = asyncio.create_task(ask(head))
        await endless.begun.wait()
        asking.cancel()  # the client is told, and hangs up
        await head.close()
        assert endless.causes == ["freed"]
        assert alone.n_closed == 1
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())


def test_what_breaks_a_ring_that_is_being_built_is_heard(endless: type[EndlessRing]) -> None:
    async def main() -> None:
        head = Alone(endless).head()
        asking = asyncio.create_task(ask(head))
        await endless.begun.wait()
        head.ring_broken("another", CheckpointError("x"))
        head.ring_broken("r", CheckpointError("its place was given away"))
        assert endless.causes == ["the ring broke: its place was given away"]
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())


class Losing(Alone):
    """Plans over nodes a, b and c, of which those that the ring blames are left out."""

    def __init__(self, *losses: tuple[str, ShardnetError]) -> None:
        super().__init__(cast(Any, self.ring))
        self._losses = [*losses]
        self.planned: list[str] = []

    async def plan_awake(self, *_: object, **__: object) -> Any:
        """Plan for all three."""
        return self._over("abc")

    async def replan(self, opened: Any, now: Any, without: dict[NodeId, str]) -> Any:
        """Plan for those that are left, if these are two at least."""
        left = "".join(node.node for node in opened.nodes if node.node not in without)
        if len(left) < 2:
            raise PlanError("too few")
        return self._over(left)

    def _over(self, nodes: str) -> Any:
        self.planned.append(nodes)
        facts = SimpleNamespace(path=MODEL)
        names = [SimpleNamespace(node=NodeId(node), name=node) for node in nodes]
        choice = ModelChoice(model=MODEL)
        return SimpleNamespace(
            choice=choice, nodes=names, ring_nodes=names, facts=facts, computes=choice.__eq__
        )

    def ring(self, *_: object) -> Any:
        """Make a ring that is lost while it is built, as long as there are losses."""
        ring: Any = StandingRing()
        ring.blamed, ring.unreached = {}, {}
        if self._losses:
            node, error = self._losses.pop(0)
            where = ring.unreached if isinstance(error, LinkError) else ring.blamed
            where[NodeId(node)] = error

            async def build(on_progress: object) -> float:
                raise error

            ring.build = build
        return ring


async def led(head: Head, told: list[Any]) -> None:
    async with head.lead(
        ModelChoice(model=MODEL), on_plan=told.append, on_progress=lambda *_: None
    ):
        pass


def test_nodes_that_are_lost_while_a_ring_is_first_built_are_done_without() -> None:
    """What was asked for stays known, so that they are used again when they are back."""

    async def main() -> None:
        cut, told = LinkError("b to c is cut"), list[Any]()
        cluster = Losing(("c", cut))
        head = cluster.head()
        await led(head, told)
        assert cluster.planned == ["abc", "ab"]
        assert [len(plan.nodes) for plan in told] == [3, 2]
        assert head.latest is not None
        assert len(head.latest.opened.nodes) == 3
        assert head.latest.avoided == {"c": cut}
        assert cluster.n_closed == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "losses",
    [
        [("b", PeerFailedError("b was lost")), ("c", PeerFailedError("c was lost too"))],
        [("a", PeerFailedError("this node is leaving"))],
        [("b", CheckpointError("b has another model"))],
        [("x", PeerFailedError("the ring broke"))] * 4,
    ],
)
def test_what_was_lost_is_told_when_those_that_are_left_cannot_do_it(
    losses: list[tuple[str, ShardnetError]],
) -> None:
    async def main() -> None:
        with pytest.raises(type(losses[-1][1]), match=str(losses[-1][1])):
            await led(Losing(*losses).head(), [])

    asyncio.run(main())


def test_the_tokenizer_of_a_ring_is_closed_with_it() -> None:
    """When another ring takes its place, when it is unloaded, and when the node leaves."""

    async def main() -> None:
        alone = Alone(StandingRing)
        head = alone.head()

        async def lead() -> None:
            choice = ModelChoice(model=MODEL, quant="int8")
            async with head.lead(choice, on_plan=lambda _: None, on_progress=lambda *_: None):
                pass

        await lead()
        assert alone.n_closed == 0
        await lead()  # what was asked for differs from what stands: another is built
        assert alone.n_closed == 1
        await head.unload("another")  # which the ring has not got
        assert alone.n_closed == 1
        with pytest.raises(BusyError, match="was used 59 s ago, and is freed after 60 s"):
            await head.unload(MODEL, idle_s=60.0)
        await head.unload(MODEL, idle_s=59.0)
        assert alone.n_closed == 2
        await lead()
        await head.close()
        assert alone.n_closed == 3

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_read_is_refused_before_anything_is_loaded(
    endless: type[EndlessRing],
) -> None:
    async def main() -> None:
        alone = Alone(endless)
        alone.why_not = CheckpointError("/x/tokenizer.json is damaged")
        with pytest.raises(CheckpointError, match="is damaged"):
            async with asyncio.timeout(60):
                await ask(alone.head())
        assert not endless.begun.is_set()

    asyncio.run(main())


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_loaded_or_freed() -> None:
    """Unless the request needs none; a ring that stands stays."""

    async def main() -> None:
        alone = Alone(StandingRing)
        head = alone.head()

        async def lead(quant: Literal["", "int4", "int8"], tokenizer_for: str) -> None:
            choice = ModelChoice(model=MODEL, quant=quant)
            ring = head.lead(
                choice,
                tokenizer_for=tokenizer_for,
                on_plan=lambda _: None,
                on_progress=lambda *_: None,
            )
            async with ring:
                pass

        await lead("int8", "text")
        alone.has_tokenizer = False
        with pytest.raises(CheckpointError, match=f"{MODEL} has no tokenizer .*, which text needs"):
            await lead("int4", "text")
        assert (alone.n_closed, head.model) == (0, MODEL)
        await lead("int4", "")
        assert (alone.n_closed, head.model) == (1, MODEL)

    asyncio.run(main())


def test_a_ring_that_could_not_replace_another_is_freed_with_that() -> None:
    """Nodes keep its stages for the next attempt, which an idle ring that was lost has none of."""

    async def main() -> None:
        led = Alone(EndlessRing).head().led
        ring: Any = Mock(build=AsyncMock(side_effect=LinkError("cut")), release=AsyncMock())
        led.lead = lead = cast(Any, Mock(tokenizer=None, grammars=None))
        lead.ring.unload = AsyncMock()
        with pytest.raises(LinkError):
            await led.put_instead(lead, Mock(choice=ModelChoice(model=MODEL)), ring)
        await led.unload({"b:1"})
        lead.ring.unload.assert_awaited_once_with(keep={"b:1"})
        ring.release.assert_awaited_once_with({"b:1"})
        assert led.take_vain() == []

    asyncio.run(main())


@pytest.mark.parametrize("is_used", [True, False])
def test_a_ring_that_is_lost_is_not_kept_from_recovery_by_who_plans_another_one(
    is_used: bool,
) -> None:
    """A node that is measured for another model says nothing; a ring that nobody uses may wait."""

    async def main() -> None:
        planning, measured, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()

        class Silent(Alone):
            async def plan_awake(self, *_: object, **__: object) -> Any:
                planning.set()
                await measured.wait()
                raise PlanError("no node has answered")

        head = Silent(EndlessRing).head()
        ring = Mock(broken=None, is_in_use=False, wait_until_broken=lost.wait)
        lead = Mock(ring=ring, stands=True, suits=lambda choice: False)
        lead.plan.choice.model = "/models/small"
        head.led.lead = lead
        asking = asyncio.create_task(ask(head))
        await planning.wait()
        assert head.led.lock.locked()
        ring.is_in_use = is_used  # since then
        lost.set()
        if is_used:
            async with asyncio.timeout(30), head.led.changing(lead):
                pass
            with pytest.raises(BusyError, match="small"):
                await asking
        else:
            await asyncio.sleep(0)
            measured.set()
            with pytest.raises(PlanError, match="no node has answered"):
                await asking

    asyncio.run(main())


@pytest.mark.parametrize("led", [MODEL, "another", ""])
def test_a_node_that_was_led_by_another_sends_requests_there_before_it_is_back(led: str) -> None:
    """Its process is another one than before: it is in no ring as yet, and the other one leads."""

    async def main() -> None:
        around = Alone(StandingRing)
        head, asked = around.head(), []

        async def model_led_at(address: str) -> str:
            asked.append(address)
            return led if address == "10.0.0.3:7433" else ""

        head.model_led_at = model_led_at
        head.was_succeeded("10.0.0.2:7433")  # which was succeeded by another one since
        choice = ModelChoice(model=MODEL, nodes=[f"10.0.0.{n}:7433" for n in (1, 2, 3)])
        async with head.lead(choice, on_plan=lambda plan: None, on_progress=lambda *_: None) as got:
            is_there = isinstance(got, Elsewhere) and got.address == "10.0.0.3:7433"
            assert is_there == (led == MODEL)
        assert asked == ["10.0.0.2:7433", "10.0.0.3:7433"]

    asyncio.run(main())
