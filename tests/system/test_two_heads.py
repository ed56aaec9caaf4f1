"""Two heads that want each other's nodes at one moment do not end each other: they are served one
after the other or by one ring, and a head that dies meanwhile gives way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec import structs
from support.rings.stage_forms import FORM
from support.soak import is_soak
from support.system.nodes import Crew
from support.system.parrot import Parrots

from shardnet.api.client import connect
from shardnet.cluster.head.lead import OTHERS_S
from shardnet.cluster.node.parts import Dialer
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import BusyError
from shardnet.types import NodeId, WireDType
from shardnet.wire.messages.plans import ModelChoice, NodeProgress
from shardnet.wire.messages.stages import LoadStage, StageReady

N_TIMES = 3 if is_soak() else 1
"""Who comes first differs."""


async def ask(prompt: str, choice: ModelChoice, first: str) -> str:
    """Ask the node `first` for three tokens, or tell how it refuses."""
    async with connect(first) as client:
        try:
            [result] = await client.complete(prompt, model=choice, max_tokens=3)
        except BusyError as error:
            return str(error)
        return result.text


def free(crew: Crew) -> None:
    """Free all nodes. A head may still be at giving up the ring that another's came before."""
    for node in crew.nodes:
        until_s = time.monotonic() + OTHERS_S
        while (result := crew.machine.call("unload", "--nodes", node.address)).code:
            assert "this node is loading" in result.stderr, result
            assert time.monotonic() < until_s, result
            time.sleep(0.5)


@pytest.mark.parametrize("numbers", [[(0, 1), (1, 0)], [(0, 2, 1), (1, 2, 0)], [(0, 2), (1, 2)]])
def test_two_heads_at_one_moment_do_not_end_each_other(
    trio: Crew, parrots: Parrots, numbers: list[tuple[int, ...]]
) -> None:
    """With different models, so that no ring serves both: one waits while the other one loads.

    One that comes so late that it finds the other generating is refused, as at any time.
    """
    wanted = [("a", parrots.alphabet), ("z", parrots.signs)]

    async def ask_all() -> list[str]:
        requests = []
        for (prompt, model), ring in zip(wanted, numbers, strict=True):
            nodes = [trio.nodes[number].address for number in ring]
            requests.append(ask(prompt, ModelChoice(model=str(model), nodes=nodes), nodes[0]))
        return await asyncio.gather(*requests)

    for _ in range(N_TIMES):
        free(trio)
        said = asyncio.run(ask_all())
        assert {"bcd", "."} & set(said)
        refused = [text for text in said if text not in ("bcd", ".")]
        assert all("is generating with" in text for text in refused), refused


def test_heads_that_are_asked_for_one_model_at_one_moment_serve_it_with_one_ring(
    trio: Crew, parrots: Parrots
) -> None:
    """Each plans a ring of all nodes with itself as the head; two send their clients on."""
    choice = ModelChoice(model=str(parrots.alphabet), layers=[(0, 1), (1, 2), (2, 4)])

    async def meet() -> None:
        """Without mDNS a node knows those that it was told of."""
        addresses = [node.address for node in trio.nodes]
        for first in range(len(addresses)):
            async with connect(addresses[first]) as client:
                nodes = addresses[first:] + addresses[:first]
                await client.plan(ModelChoice(model=str(parrots.alphabet), nodes=nodes))

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask("a", choice, node.address) for node in trio.nodes))

    free(trio)
    asyncio.run(meet())
    for _ in range(N_TIMES):
        free(trio)
        assert asyncio.run(ask_all()) == ["bcd"] * 3


@asynccontextmanager
async def another_head(address: str) -> AsyncIterator[ControlLink]:
    """A head that is none of ours, and its link to a node. It is gone without a word at the end."""
    dialling = Dialer(node=NodeId("0" * 32), name="vera", identity=None, progress=lambda: (0, 0))

    async def ignore(control: ControlLink, message: Incoming) -> None:
        """What the node tells of its peers is no news."""

    control = ControlLink(await dialling.control(address), ignore)
    serving = asyncio.create_task(control.serve())
    try:
        yield control
    finally:
        control.link.abort("it dies")
        await asyncio.wait([serving])
        serving.exception()


def test_a_head_is_waited_for_while_it_builds_and_gives_way_when_it_dies(
    trio: Crew, parrots: Parrots
) -> None:
    anna, bert = trio.nodes[:2]

    async def main() -> str:
        async with connect(anna.address) as client:
            plan = await client.plan(ModelChoice(model=str(parrots.alphabet)))
        order = LoadStage(
            request=1,
            ring="r",
            epoch=1,
            rank=1,
            n_stages=2,
            form=structs.replace(FORM, model=plan.model, model_id=plan.model_id),
            layers=(2, 4),
            wire_dtype=WireDType.FLOAT32,
            received_dtype=WireDType.FLOAT32,
            threads=1,
            addresses=["127.0.0.1:1", anna.address],
        )
        waits = asyncio.Event()

        def told(report: NodeProgress) -> None:
            if report.phase == "waiting":
                assert report.rank == 1
                waits.set()

        async with AsyncExitStack() as stack:
            vera = await stack.enter_async_context(another_head(anna.address))
            await vera.ask(order, StageReady, on_progress=lambda report: None)
            client = await stack.enter_async_context(connect(bert.address))
            choice = ModelChoice(model=str(parrots.signs), nodes=[bert.address, anna.address])
            asking = asyncio.create_task(
                client.complete("z", model=choice, max_tokens=3, on_loading=told)
            )
            async with asyncio.timeout(OTHERS_S):
                await waits.wait()
                assert not asking.done()
                vera.link.abort("it dies")
                [result] = await asking
            return result.text

    free(trio)
    assert asyncio.run(main()) == "."
