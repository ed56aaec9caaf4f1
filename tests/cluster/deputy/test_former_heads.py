"""Heads that stood still while their deputy took over: they give way, and serve beside it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from support.cluster.keyed_streams import Said, say
from support.cluster.machines import Machine, machines
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt
from support.soak import cases
from support.waiting import until

from shardnet.api.client import connect
from shardnet.cluster.recovery import node_watch, stand_in
from shardnet.cluster.recovery.stand_in import StandIn
from shardnet.errors import BusyError, LinkError, ShardnetError
from shardnet.types import NodeId
from shardnet.wire.messages.deputies import TakenOver
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 90.0
BACK_S = 40.0
"""Three times the seconds within which a former head is a member."""


def leads(machine: Machine) -> bool:
    lead = machine.node.head.latest
    return lead is not None and lead.stands and not lead.is_recovering


def is_member_of(machine: Machine, head: Machine) -> bool:
    membership = machine.node._stage.host.membership
    return membership is not None and membership.owner == head.node.node


def is_linked(machine: Machine, other: Machine) -> bool:
    return machine.node._links.peers.links.link_of(other.node.node) is not None


@pytest.mark.parametrize("leads_again", [True, False])
@pytest.mark.usefixtures("unmeasured")
def test_a_head_that_stood_still_gives_way_and_joins_whoever_leads(
    leads_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests go on at the other head, with a key or without, and nothing ends them later.

    Either it leads a ring again before it hears of the other, with a node that the other does
    without, and with that as deputy; or nodes refuse it first.
    """
    monkeypatch.setattr("shardnet.cluster.recovery.policy.SETTLE_S", 0.05)
    monkeypatch.setattr(node_watch, "LOOK_S", 0.02)
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    prompts = [random_prompt(20, 300, seed=1)]

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert", "cleo", "dora") as (anna, bert, cleo, dora),
            AsyncExitStack() as stack,
        ):
            nodes = [one.node.address for one in (anna, bert, cleo, dora)]
            choice = ModelChoice(model=str(model), nodes=nodes)
            client = await stack.enter_async_context(connect(anna.node.address))
            whole = await say(client, prompts, choice)

            with_key, without = Said.of(prompts), Said.of(prompts)
            saying = [
                asyncio.create_task(say(client, prompts, choice, "k1", said=with_key)),
                asyncio.create_task(say(client, prompts, choice, said=without)),
            ]
            await asyncio.gather(with_key.some.wait(), without.some.wait())
            refused = asyncio.Event() if leads_again else delay_telling(anna, bert)
            async with anna.node.head.led.lock:  # it stands still
                await anna.unplug(with_clients=False)
                await dora.unplug()
                await until(lambda: leads(bert))
                await dora.plug_in()
                others = [dora] if leads_again else [bert, cleo, dora]
                anna.out_of_reach = {*nodes} - {one.node.address for one in others}
                for one in (bert, cleo):
                    one.out_of_reach = {anna.node.address} if leads_again else set()
                await anna.plug_in()
                await until(lambda: all(is_linked(anna, one) for one in others))
            if leads_again:
                await until(lambda: "dora stands by as deputy" in anna.lines)
                lead = anna.node.head.latest
                assert lead is not None
                await lead.ring.engine.hold()  # until bert can say that it leads: none may end here
                assert not any(one.done() for one in saying)
                for one in (anna, bert, cleo):
                    one.out_of_reach = set()
            else:
                await refused.wait()
            await asyncio.gather(*saying)
            assert with_key.tokens == without.tokens == whole.tokens
            assert with_key.logprobs == without.logprobs == whole.logprobs
            assert "bert leads in place of this node" in anna.lines
            async with asyncio.timeout(BACK_S):
                await until(lambda: is_member_of(anna, bert))

            said = Said.of(prompts)
            anyhow = ModelChoice(model=str(model))
            again = asyncio.create_task(say(client, prompts, anyhow, said=said))
            await said.some.wait()
            await cleo.unplug()
            await again
            assert said.tokens == whole.tokens
            assert is_member_of(anna, bert)

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "error",
    cases([BusyError("this node is generating")], [LinkError("the node with the weights is gone")]),
)
def test_a_node_joins_again_once_what_kept_it_from_that_is_over(
    error: ShardnetError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardnet.cluster.recovery.policy.SETTLE_S", 0.05)
    monkeypatch.setattr(node_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(node_watch, "AGAIN_S", 0.1)
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    n_refused = 0

    async def refuse(*arguments: object, **named: object) -> None:
        nonlocal n_refused
        n_refused += 1
        raise error

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as client,
        ):
            nodes = [one.node.address for one in (anna, bert)]
            choice = ModelChoice(model=str(model), nodes=nodes)
            prompts = [random_prompt(20, 300, seed=1)]
            whole = await say(client, prompts, choice)
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, said=said))
            await said.some.wait()
            await bert.unplug()
            await saying
            orders = bert.node._stage.orders
            with monkeypatch.context() as used:
                used.setattr(orders, "load", refuse)
                await bert.plug_in()
                await until(lambda: n_refused > 1)
            await until(lambda: is_member_of(bert, anna) and leads(anna))
            again = await say(client, prompts, choice)
            assert said.tokens == again.tokens == whole.tokens
            assert sum("stays without the nodes that came" in line for line in anna.lines) == 1

    asyncio.run(main())


def delay_telling(former: Machine, successor: Machine) -> asyncio.Event:
    """Have a former head hear of its successor only once nodes refuse it: then the event is set."""
    refused, head, stand_in = asyncio.Event(), former.node.head, successor.node._services.stand_in
    wait, tell = head.successor, stand_in._tell_former

    async def wait_for_it() -> str:
        refused.set()
        return await wait()

    async def tell_it(node: NodeId, epoch: int) -> None:
        await refused.wait()
        await tell(node, epoch)

    head.successor = wait_for_it  # type: ignore[method-assign]
    stand_in._tell_former = tell_it  # type: ignore[method-assign]
    return refused


def test_a_former_head_that_stays_away_is_looked_for_once_a_second_and_told_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, looked_at = 0.0, []
    back = Mock()
    back.link.closed = False

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def link_of(node: NodeId) -> Mock | None:
        looked_at.append(now_s)
        return back if now_s > 600 else None

    monkeypatch.setattr(stand_in, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(stand_in, "asyncio", SimpleNamespace(sleep=sleep))
    here = cast(Any, SimpleNamespace(links=SimpleNamespace(link_of=link_of)))
    asyncio.run(StandIn._tell_former(here, NodeId("a" * 32), 7))
    assert looked_at[1] - looked_at[0] <= 0.1
    assert sum(at <= 600 for at in looked_at) < 620
    back.send.assert_called_once_with(TakenOver(epoch=7))
    assert now_s < 601 + stand_in.TOLD_S + 1
