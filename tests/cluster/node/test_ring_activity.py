"""What those who watch a ring are told of it, and what they may end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.cluster.scripted_node import ScriptedNode, client_of
from support.rings import fake_ring as rings
from support.rings.fake_ring import FakeRing, fake_ring, request_of

from shardnet.api.client import Client
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lead import Opening
from shardnet.cluster.node.reporter import RingWatch
from shardnet.cluster.peers.control_link import MessageHandlers
from shardnet.cluster.recovery.recovery import RecoveryRecord
from shardnet.errors import CancelledRequestError, LinkError, UsageError
from shardnet.runtime.engine.requests import TokenGenerated
from shardnet.types import LiveState
from shardnet.wire.messages.diagnostics import Drafted
from shardnet.wire.messages.plans import PlanReply

FOR_EVER = 900
PROMPT = [1] * 100
LOST = RecoveryRecord(at_s=5.0, why="bert was lost", n_requests=2, load_s=0.5, lost=("bert",))
MADE = Drafted(drafter="mtp", node="bert", n_drafted=4, n_accepted=3, n_steps=2, n_tokens=5)


class Watched(ScriptedNode):
    """A node that leads a ring, and answers those who watch it only."""

    def __init__(self, lead: Any) -> None:
        super().__init__()
        self.head = SimpleNamespace(latest=lead, elsewhere=lambda: None, opening=None)
        self.head.check_leads = lambda: Head.check_leads(cast(Any, self.head))
        handlers = MessageHandlers()
        RingWatch(cast(Any, self.head), [LOST], list, lambda lead: [MADE]).register(handlers)
        self.handle = handlers.handle  # type: ignore[method-assign]


def plan_reply(number: int) -> PlanReply:
    return PlanReply(
        request=number,
        model="m",
        model_id="0" * 64,
        dtype="float32",
        wire_dtype="float32",
        context=64,
        stages=[],
        why="",
    )


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeRing, Client]]:
    monkeypatch.setattr(rings, "WIDTH", 4)
    async with (
        asyncio.timeout(60),
        fake_ring(2, over="memory", chunk_rows=64, max_slots=1, room_blocks=64) as ring,
    ):
        lead = SimpleNamespace(
            ring=SimpleNamespace(name="r1", broken=None, engine=ring.engine),
            plan=SimpleNamespace(reply=plan_reply),
            stands=True,
            is_recovering=False,
        )
        async with client_of(Watched(lead)) as client:
            yield ring, client


async def until_token(events: Any, n: int) -> None:
    async for event in events:
        n -= isinstance(event, TokenGenerated)
        if not n:
            return


def test_requests_and_steps_are_told_and_steps_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with watched(monkeypatch) as (ring, client):
            running = ring.engine.generate(request_of(PROMPT, FOR_EVER))
            await until_token(running, 3)
            second = ring.engine.generate(request_of([1], 4))
            await anext(second)
            seen = await client.activity()
            assert (seen.ring, seen.is_broken) == ("r1", False)
            assert seen.drafters == [MADE]
            assert seen.plan is not None
            assert seen.plan.model == "m"
            assert seen.load is not None
            assert (seen.load.running, seen.load.waiting) == (1, 1)
            first, waiting = seen.requests
            assert first.state is LiveState.RUNNING
            assert (first.n_prompt, first.n_computed, first.n_kept) == (100, 100, 0)
            assert first.n_tokens >= 3
            assert first.max_tokens == FOR_EVER
            assert (waiting.state, waiting.n_computed, waiting.ahead) == (LiveState.QUEUED, 0, 0)
            # The prompt came in chunks; every later row sampled a token.
            assert sum(step.n_prompt_rows for step in seen.steps) == 99
            assert [step.n_tokens for step in seen.steps][-1] == 1
            assert sum(step.n_tokens for step in seen.steps) == first.n_tokens
            assert {timing.rank for step in seen.steps for timing in step.timings} == {0, 1}
            sent = [step.sent_us for step in seen.steps]
            assert sent == sorted(sent)
            assert all(step.sent_us + step.round_trip_us <= seen.age_us for step in seen.steps)

            last = seen.steps[-1].step
            await until_token(running, 2)
            later = await client.activity(known_ring="r1", after_step=last)
            assert later.plan is None
            assert [step.step for step in later.steps][:1] == [last + 1]
            assert (await client.activity(known_ring="r0", after_step=last)).plan is not None
            await second.aclose()
            await running.aclose()

    asyncio.run(main())


def test_a_request_is_cancelled_by_who_watches_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with watched(monkeypatch) as (ring, client):
            running = ring.engine.generate(request_of(PROMPT, FOR_EVER))
            await until_token(running, 1)
            [seen] = (await client.activity()).requests
            for name, number in (("r0", seen.sequence), ("r1", seen.sequence + 1)):
                with pytest.raises(UsageError, match="has ended"):
                    await client.cancel(name, number)
            await client.cancel("r1", seen.sequence)
            with pytest.raises(CancelledRequestError):
                await until_token(running, FOR_EVER)
            assert (await client.activity()).requests == []
            assert ring.engine.counters.running == 0

    asyncio.run(main())


def test_a_node_without_a_ring_says_so_and_a_member_names_the_head() -> None:
    async def main() -> None:
        node = Watched(None)
        async with client_of(node) as client:
            node.head.opening = opening = Opening(model="m", began_s=0.0)
            seen = await client.activity()
            assert (seen.ring, seen.opening) == ("", None)
            [lost] = seen.recoveries
            assert (lost.at_s, lost.why, lost.n_requests) == (5.0, "bert was lost", 2)
            assert (lost.load_s, lost.lost, lost.is_over) == (0.5, ["bert"], False)
            opening.take(0, "measuring", 1, 3)
            opening.take(1, "fetching", 10, 30)
            opening.take(0, "loading", 20, 50)
            seen = await client.activity()
            assert seen.opening is not None
            assert [one.phase for one in seen.opening.stages] == ["loading", "fetching"]
            assert [one.done_bytes for one in seen.opening.stages] == [20, 10]
            with pytest.raises(UsageError, match="has ended"):
                await client.cancel("r", 1)
            node.head.elsewhere = lambda: SimpleNamespace(address="127.0.0.1:1")
            with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
                await client.activity()

    asyncio.run(main())
