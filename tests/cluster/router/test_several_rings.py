"""Two rings behind one head, on nodes in this process: texts go on when one is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.cluster.machines import Machine, machines
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.api.events import RequestState
from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.cluster.placement.figures import StageSpeed
from shardnet.sampling_params import SamplingParams
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

N_STREAMS = 16
N_TOKENS = 60
DEADLINE_S = 60.0
SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, n_logprobs=2)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every node be as fast as the others."""
    speed = StageSpeed(layer_s=0.001, layer_256_s=0.1, embed_s=0, head_s=0)

    async def measured(self: object, nodes: list[NodeInfo], *_: object, **__: object) -> Measured:
        return Measured(speeds={NodeId(node.node): speed for node in nodes})

    monkeypatch.setattr(MeasurementService, "measured", measured)


@dataclass
class Said:
    """What a client has got of its requests, and in which states these were."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    states: set[RequestState] = field(default_factory=set)
    some: asyncio.Event = field(default_factory=asyncio.Event)


async def say(
    client: Client, prompts: list[list[int]], choice: ModelChoice, said: Said | None = None
) -> Said:
    """Generate from all prompts at once."""
    said = said or Said([[] for _ in prompts], [[] for _ in prompts])
    events = client.generate(prompts, SAMPLED, model=choice, max_tokens=N_TOKENS, ignore_eos=True)
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            said.tokens[event.index] += event.token_ids
            said.logprobs[event.index] += [one.logprob for one in event.logprobs or ()]
            said.states.add(event.state)
            if min(map(len, said.tokens)) >= 4:
                said.some.set()
    return said


def loads(machine: Machine) -> list[tuple[str, int, str]]:
    """The rings behind a head: whose, with how many requests, and why they take none."""
    return [(ring.names[0], ring.n_requests, ring.why) for ring in machine.node.router.rings]


@pytest.mark.usefixtures("alike")
def test_one_ring_is_lost_and_the_other_goes_on_with_every_text(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", max_position_embeddings=1024)
    prompts = [random_prompt(10 + n, 300, seed=n) for n in range(N_STREAMS)]
    alone = ModelChoice(model=str(model))
    many = ModelChoice(model=str(model), optimise="throughput")

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            AsyncExitStack() as stack,
        ):
            client = await stack.enter_async_context(connect(anna.node.address))
            whole = await say(client, prompts, alone)
            assert not loads(anna)
            await client.unload()

            said = Said([[] for _ in prompts], [[] for _ in prompts])
            saying = asyncio.create_task(say(client, prompts, many, said))
            await said.some.wait()
            assert loads(anna) == [("anna", 8, ""), ("bert", 8, "")]
            await bert.unplug()
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)
            assert RequestState.RECOVERING in said.states
            [first, second] = anna.node.router.rings
            assert first.n_taken_over == 8
            assert second.why

    asyncio.run(main())
