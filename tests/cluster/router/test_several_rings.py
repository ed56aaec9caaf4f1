"""Two rings behind one head, on nodes in this process: texts go on when one is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.cluster import keyed_streams
from support.cluster.keyed_streams import SAMPLED, Said, say
from support.cluster.machines import Machine, machines
from support.models.checkpoints import make_llama
from support.needs import needs_library
from support.rings.stage_chain import random_prompt
from support.waiting import until

from shardnet.api.client import connect
from shardnet.api.events import RequestState
from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.cluster.placement.figures import StageSpeed
from shardnet.cluster.router import router
from shardnet.errors import BusyError
from shardnet.output_params import OutputParams
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

N_STREAMS = 8
DEADLINE_S = 60.0
LAST = OutputParams(logit_rows=1)


pytestmark = [needs_library, pytest.mark.usefixtures("alike", "unhurried")]
"""The library gives a replayed row its bits."""


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rings in no hurry none is done too early."""
    monkeypatch.setattr(keyed_streams, "N_TOKENS", 40)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every node be as fast as the others."""
    speed = StageSpeed(layer_s=0.001, layer_256_s=0.1, embed_s=0, head_s=0)

    async def measured(self: object, nodes: list[NodeInfo], *_: object, **__: object) -> Measured:
        return Measured(speeds={NodeId(node.node): speed for node in nodes})

    monkeypatch.setattr(MeasurementService, "measured", measured)


def loads(machine: Machine) -> list[tuple[str, int, bool]]:
    """The rings behind a head: whose, with how many requests, and whether they take more."""
    rings = machine.node.router.rings
    return [(ring.names[0], ring.n_requests, not ring.why) for ring in rings]


def test_rings_that_are_lost_are_the_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the other one's, then, once that is back, the one of the head itself.

    Which ring a request gets does not depend on when the rings were looked at last.
    """
    monkeypatch.setattr(router, "LOOK_S", 0.003)
    model = make_llama(tmp_path / "model", max_position_embeddings=1024)
    prompts = [random_prompt(10 + n, 300, seed=n) for n in range(N_STREAMS)]
    many = ModelChoice(model=str(model), optimise="throughput")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            AsyncExitStack() as stack,
        ):
            client = await stack.enter_async_context(connect(anna.node.address))
            whole = await say(client, prompts, ModelChoice(model=str(model)))
            assert not loads(anna)
            await client.unload()

            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, many, said=said))
            await said.some.wait()
            assert loads(anna) == [("anna", 4, True), ("bert", 4, True)]
            await bert.unplug()
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)
            assert RequestState.RECOVERING in said.states
            assert [ring.n_taken_over for ring in anna.node.router.rings] == [4, 0]
            assert loads(anna) == [("anna", 0, True), ("bert", 0, False)]

            await bert.plug_in()
            await until(lambda: loads(anna)[1][2])
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, many, "k", said=said))
            await said.some.wait()
            assert loads(anna) == [("anna", 4, True), ("bert", 4, True)]
            await anna.unplug()
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)

    asyncio.run(main())


def test_whoever_is_asked_several_rings_have_one_head(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", max_position_embeddings=1024)
    [prompt] = prompts = [random_prompt(400, 300, seed=1)]
    many = ModelChoice(model=str(model), optimise="throughput")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            AsyncExitStack() as stack,
        ):
            at_anna, at_bert = [
                await stack.enter_async_context(connect(one.node.address)) for one in (anna, bert)
            ]
            reply = await at_anna.plan(many)
            assert [ring.stages[0].name for ring in reply.rings] == ["anna", "bert"]
            asked = await at_anna.tokenize(prompt, model=many)
            assert asked.token_ids == prompt
            assert [ring[2] for ring in loads(anna)] == [True, True]

            # What a ring has computed before is asked of it again, also by way of another node.
            whole = await say(at_anna, prompts, many)
            [result] = await at_bert.complete(prompts, SAMPLED, model=str(model), max_tokens=2)
            assert result.usage.n_reused >= 256
            assert list(result.token_ids) == whole.tokens[0][:2]
            assert not loads(bert)
            seen = (await at_anna.activity()).rings
            assert [ring.names for ring in seen] == [["anna"], ["bert"]]

            scored = await at_anna.complete([prompt], model=many, max_tokens=1, outputs=LAST)
            assert scored[0].logits is not None
            wrong = ModelChoice(model=str(model), context=512)
            said = Said.of(prompts)
            saying = asyncio.create_task(say(at_anna, prompts, many, said=said))
            await said.some.wait()
            with pytest.raises(BusyError, match="generating"):
                await at_anna.complete([prompt], model=wrong, max_tokens=1)
            with pytest.raises(BusyError, match="generating"):
                await at_bert.unload()
            await saying
            await at_bert.unload()
            assert (anna.node.head.latest, bert.node.head.latest) == (None, None)

            # A head that leaves hands its ring's work over as well.
            both = [prompt, prompt[::-1]]
            whole = await say(at_anna, both, many)
            said = Said.of(both)
            saying = asyncio.create_task(say(at_anna, both, many, said=said))
            await said.some.wait()
            assert loads(anna) == [("anna", 1, True), ("bert", 1, True)]
            await at_bert.drain(20.0)
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)
            assert loads(anna) == [("anna", 0, True), ("bert", 0, False)]
            assert "draining" in anna.node.router.rings[1].why

    asyncio.run(main())


def test_rings_behind_a_head_make_way_for_what_they_are_not(tmp_path: Path) -> None:
    """Whichever of their nodes is asked, and unless requests run on them."""
    model = make_llama(tmp_path / "model", max_position_embeddings=1024)
    other = ModelChoice(model=str(make_llama(tmp_path / "other", vocab_size=300)))
    [prompt] = prompts = [random_prompt(40, 300, seed=1)]
    many = ModelChoice(model=str(model), optimise="throughput")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as at_anna,
            connect(bert.node.address) as at_bert,
        ):
            said = Said.of(prompts)
            saying = asyncio.create_task(say(at_anna, prompts, many, said=said))
            await said.some.wait()
            with pytest.raises(BusyError, match="generating"):
                await at_bert.complete([prompt], model=other, max_tokens=1)
            await saying
            both = ModelChoice(model=str(model), nodes=[anna.node.address, bert.node.address])
            await at_anna.complete([prompt], model=both, max_tokens=1)
            assert not loads(anna)
            await at_anna.unload()

            await say(at_anna, prompts, many)
            assert [ring[2] for ring in loads(anna)] == [True, True]
            await at_bert.complete([prompt], model=other, max_tokens=1)
            assert not loads(anna)

    asyncio.run(main())


def test_a_ring_that_comes_back_with_other_files_gets_no_requests(tmp_path: Path) -> None:
    """Answers that began on the others would go on with other weights."""
    model = make_llama(tmp_path / "model", max_position_embeddings=1024)
    other = make_llama(tmp_path / "other", seed=1, max_position_embeddings=1024)
    prompts = [random_prompt(10 + n, 300, seed=n) for n in range(2)]
    many = ModelChoice(model=str(model), optimise="throughput")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as client,
        ):
            whole = await say(client, prompts, many)
            for file in other.glob("*.safetensors"):
                file.rename(model / file.name)
            await bert.unplug()
            await bert.plug_in()
            await until(lambda: "holds model" in anna.node.router.rings[1].why)
            assert loads(anna) == [("anna", 0, True), ("bert", 0, False)]
            said = await say(client, prompts, many)  # over rings of the new files
            assert said.tokens != whole.tokens
            assert loads(anna) == [("anna", 0, True), ("bert", 0, True)]

    asyncio.run(main())
