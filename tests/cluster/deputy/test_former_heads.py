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
from shardnet.cluster.peers import node_directory
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.recovery import ring_replacement, stand_in
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
    membership = machine.node.stage.host.membership
    return membership is not None and membership.owner == head.node.node


def is_linked(machine: Machine, other: Machine) -> bool:
    return machine.node.links.peers.links.link_of(other.node.node) is not None


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
    monkeypatch.setattr(ring_replacement, "LOOK_S", 0.02)
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
    monkeypatch.setattr(ring_replacement, "LOOK_S", 0.02)
    monkeypatch.setattr(ring_replacement, "AGAIN_S", 0.1)
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    n_refused = n_unheard = 0

    async def break_off(*arguments: object) -> None:
        nonlocal n_unheard
        n_unheard += 1
        raise LinkError("of two links between the same nodes one is given up")

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
            orders = bert.node.stage.orders
            with monkeypatch.context() as asked:
                asked.setattr(node_directory, "_ask", break_off)
                await bert.plug_in()
                await until(lambda: n_unheard > 2)
            with monkeypatch.context() as used:
                used.setattr(orders, "load", refuse)
                await until(lambda: n_refused > 1)
            await until(lambda: is_member_of(bert, anna) and leads(anna))
            again = await say(client, prompts, choice)
            assert said.tokens == again.tokens == whole.tokens
            assert sum("stays without the nodes that came" in line for line in anna.lines) == 1

    asyncio.run(main())


def delay_telling(former: Machine, successor: Machine) -> asyncio.Event:
    """Have a former head hear of its successor only once nodes refuse it: then the event is set."""
    refused, head, stand_in = asyncio.Event(), former.node.head, successor.node.stand_in
    links, wait, tell = stand_in.links, head.successor, stand_in._tell_former

    async def wait_for_it() -> str:
        refused.set()
        if (control := links.link_of(former.node.node)) is not None:
            tell(control)
        return await wait()

    def tell_it(control: ControlLink) -> None:
        if refused.is_set():
            tell(control)

    head.successor = wait_for_it  # type: ignore[method-assign]
    stand_in._tell_former = links.on_up = tell_it  # type: ignore[method-assign]
    return refused


@pytest.mark.usefixtures("unmeasured")
def test_a_former_head_is_told_over_each_link_and_nobody_looks_for_it_meanwhile(
    tmp_path: Path,
) -> None:
    """It gives way once, however often its links are lost after that."""
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    prompts = [random_prompt(20, 300, seed=1)]

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert", "cleo") as (anna, bert, cleo),
            connect(anna.node.address) as client,
        ):
            nodes = [one.node.address for one in (anna, bert, cleo)]
            choice = ModelChoice(model=str(model), nodes=nodes)
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, "k", said=said))
            await said.some.wait()
            await anna.unplug()
            await saying
            stand_in = bert.node.stand_in
            await until(lambda: not stand_in._jobs._running)
            told = []
            links = bert.node.links.peers.links
            tell = links.on_up
            links.on_up = lambda control: (told.append(control.link.peer.name), tell(control))[1]
            for n_times in (1, 2):
                await anna.plug_in()
                await until(lambda: is_linked(anna, bert))
                await until(lambda: "bert leads in place of this node" in anna.lines)
                assert told.count("anna") >= n_times
                await anna.unplug()
                await until(lambda: not is_linked(bert, anna))
            assert anna.lines.count("bert leads in place of this node") == 1

    asyncio.run(main())


def test_of_the_heads_whose_place_a_node_took_the_last_are_remembered() -> None:
    sent: list[TakenOver] = []
    former = {NodeId(f"{number:032x}"): number for number in range(stand_in.MAX_FORMER)}
    here = cast(Any, SimpleNamespace(_former=former, links=Mock(link_of=lambda node: None)))
    StandIn._succeed(here, NodeId("a" * 32), 70)
    StandIn._succeed(here, NodeId(f"{1:032x}"), 71)
    assert len(former) == stand_in.MAX_FORMER
    for node in (f"{0:032x}", f"{1:032x}", "a" * 32):
        link = SimpleNamespace(peer=SimpleNamespace(node=node), closed=False)
        StandIn._tell_former(here, cast(Any, SimpleNamespace(link=link, send=sent.append)))
    assert [one.epoch for one in sent] == [71, 70]
