"""Heads that are lost or leave while a deputy has copies: the words go on, and one node leads."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.cluster.keyed_streams import Said, say
from support.cluster.machines import Machine, machines
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt
from support.waiting import until

from shardnet.api.client import connect
from shardnet.api.events import RequestState
from shardnet.cluster.peers import peer_links
from shardnet.cluster.recovery import stand_in
from shardnet.errors import SupersededError
from shardnet.types import NodeId
from shardnet.wire.messages.diagnostics import DeputyState
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 90.0
QUESTION_S = 0.3
"""Long enough, mostly, to build a ring of one of these nodes, where that is not refused."""


@pytest.mark.usefixtures("unmeasured")
def test_a_deputy_goes_on_and_the_former_head_gives_way(tmp_path: Path) -> None:
    """Texts go on with their words; who comes back gets them whole; one that leaves hands over."""

    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    prompts = [random_prompt(n, 300, seed=n) for n in (20, 70)]

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert", "cleo", "dora") as (anna, bert, cleo, dora),
            AsyncExitStack() as stack,
        ):
            client = await stack.enter_async_context(connect(anna.node.address))
            addresses = [one.node.address for one in (anna, bert, cleo)]
            layers = [(0, 2), (2, 4), (4, 6)]  # a range for the head too, which is lost
            choice = ModelChoice(model=str(model), nodes=addresses, layers=layers)
            whole = await say(client, prompts, choice)

            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, "k1", said=said))
            await said.some.wait()
            assert "bert stands by as deputy" in anna.lines
            of_bert = bert.node.stand_in.deputy_of
            assert of_bert == [DeputyState(node="anna", n_requests=2)]
            its = anna.node.stand_in.deputy
            assert its == DeputyState(node="bert", n_requests=2)
            former = anna.node.head.latest
            assert former is not None
            old = former.ring.order(1)
            await anna.unplug()
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)
            assert RequestState.RECOVERING in said.states
            lead = bert.node.head.latest
            assert lead is not None
            assert [node.name for node in lead.plan.nodes] == ["bert", "cleo"]
            assert lead.ring.epoch > old.epoch

            for one in (bert, cleo, dora):  # also by a node that leads nothing, or is in no ring
                other = await stack.enter_async_context(connect(one.node.address))
                again = await say(other, prompts, choice, "k1", resume=True)
                assert again.tokens == whole.tokens
                assert again.logprobs == whole.logprobs
            other = await stack.enter_async_context(connect(bert.node.address))
            anew = await say(other, prompts, choice)  # which names the lost head, and layers
            assert anew.tokens == whole.tokens
            assert lead is bert.node.head.latest

            # The former head is refused, and gives way once it hears of it.
            with pytest.raises(SupersededError, match="another node leads this ring"):
                await cleo.node.stage.host.enter_ring(
                    old, owner=anna.node.node, owner_name="anna", on_broken=lambda error: None
                )
            await anna.plug_in()
            await until(lambda: "bert leads in place of this node" in anna.lines)
            await until(lambda: anna.node.head.latest is None)
            await until(lambda: anna.node.head.led.epoch >= lead.ring.epoch)

            # And the new one leaves politely.
            client = await stack.enter_async_context(connect(bert.node.address))
            choice = replace_nodes(choice, [bert, cleo])
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, "k2", said=said))
            await said.some.wait()
            await client.drain(30.0)
            assert "the deputy goes on with the requests of this node" in bert.lines
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)
            await client.complete([5], model=choice, max_tokens=1)  # it says who leads instead
            assert cleo.node.head.latest is not None

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
def test_a_question_before_the_deputy_leads_has_no_other_ring_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients may notice the end of a head first, and ask any node for what needs a ring.

    The deputy would go on with one of its own alone, which has no deputy; and a node with one of
    its own would not say that the deputy has the answers.
    """
    monkeypatch.setattr(peer_links, "AGAIN_S", DEADLINE_S)
    monkeypatch.setattr(stand_in, "ASK_S", DEADLINE_S)
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    prompts = [random_prompt(20, 300, seed=1)]

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert", "cleo") as (anna, bert, cleo),
            AsyncExitStack() as stack,
        ):
            client = await stack.enter_async_context(connect(anna.node.address))
            addresses = [one.node.address for one in (anna, bert, cleo)]
            choice = ModelChoice(model=str(model), nodes=addresses)
            anyhow = ModelChoice(model=str(model))
            whole = await say(client, prompts, choice)
            others = [
                await stack.enter_async_context(connect(one.node.address)) for one in (bert, cleo)
            ]
            noticed = delay_loss(bert, anna)
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, "k1", said=said))
            await said.some.wait()
            await anna.unplug()
            await until(lambda: all(has_lost_its_ring(one) for one in (bert, cleo)))
            asking = [
                asyncio.create_task(other.tokenize(prompts[0], model=anyhow)) for other in others
            ]
            await asyncio.wait(asking, timeout=QUESTION_S)
            assert not any(one.done() for one in asking)
            noticed.set()
            await asyncio.gather(*asking, saying)
            assert said.tokens == whole.tokens
            lead = bert.node.head.latest
            assert lead is not None
            assert [node.name for node in lead.plan.nodes] == ["bert", "cleo"]
            assert cleo.node.head.latest is None
            assert "cleo stands by as deputy" in bert.lines

    asyncio.run(main())


def has_lost_its_ring(machine: Machine) -> bool:
    membership = machine.node.stage.host.membership
    return membership is not None and membership.is_over


def delay_loss(machine: Machine, lost: Machine) -> asyncio.Event:
    """Have a machine find out only when the event is set that it cannot reach another one again."""
    noticed, links = asyncio.Event(), machine.node.links.peers.links
    dial_again = links.dial_again

    async def dial_late(node: NodeId) -> None:
        if node == lost.node.node:
            await noticed.wait()
        await dial_again(node)

    links.dial_again = dial_late
    return noticed


def replace_nodes(choice: ModelChoice, machines: list[Machine]) -> ModelChoice:
    return ModelChoice(model=choice.model, nodes=[one.node.address for one in machines])
