"""A node that computes on two groups of cores, as one member of a ring."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.node.node import Node, listening, running
from shardnet.cluster.recovery import ring_replacement
from shardnet.runtime.stage.compute import ComputePlugin
from shardnet.sampling_params import SamplingParams
from shardnet.types import DType, NodeId
from shardnet.wire.messages.diagnostics import StageState
from shardnet.wire.messages.plans import ModelChoice

SAMPLED = SamplingParams(temperature=0.8, seed=4)
PROMPT = random_prompt(20, 300, seed=1)
N_TOKENS = 40


def group(index: int | None) -> Device:
    name = "cpu" if index is None else f"cpu:{index}"
    return Device(kind="cpu", description=name, dtypes=(DType.FLOAT32,), index=index)


async def started(
    name: str, folder: Path, nodes: AsyncExitStack, *peers: str, n_groups: int = 1
) -> tuple[Node, AsyncExitStack]:
    settings = small_settings(folder / name)
    groups = [group(index if n_groups > 1 else None) for index in range(n_groups)]
    budget = MemoryBudget(device=groups[0], others=tuple(groups[1:]), asked_bytes=1 << 28)
    settings = replace(
        settings,
        node=NodeId(name[0] * 32),
        name=name,
        peers=peers,
        budget=budget,
        tensor_parallel=1,
    )
    ends = await nodes.enter_async_context(AsyncExitStack())
    return await ends.enter_async_context(listening(settings, "127.0.0.1", 0)), ends


async def said(
    client: Client, choice: ModelChoice, lose: AsyncExitStack | None = None
) -> list[int]:
    """Generate; after some tokens the node of `lose` goes without a word."""
    ending: asyncio.Task[None] | None = None
    token_ids: list[int] = []
    async for event in client.generate(
        [PROMPT], SAMPLED, model=choice, max_tokens=N_TOKENS, ignore_eos=True
    ):
        assert event.error is None
        token_ids += event.token_ids
        if lose is not None and len(token_ids) > 5:
            closing, lose = lose.pop_all(), None
            ending = asyncio.get_running_loop().create_task(closing.aclose())
    if ending is not None:  # the text may end first where much else runs
        await ending
    return token_ids


async def stage_of(client: Client) -> StageState:
    async with aclosing(client.report()) as answers:
        async for reply in answers:
            assert reply.report is not None
            assert reply.report.stage is not None
            return reply.report.stage
    raise AssertionError("no answer")


def test_to_its_ring_it_is_one_node(
    unmeasured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text as of one device, also when the other node of its ring is lost."""
    monkeypatch.setattr(ring_replacement, "LOOK_S", 0.02)
    folder = make_llama(tmp_path / "llama", num_hidden_layers=6, max_position_embeddings=512)

    async def main() -> None:
        async with AsyncExitStack() as nodes:
            anna, _ = await started("anna", tmp_path, nodes, n_groups=2)
            bert, bert_ends = await started("bert", tmp_path, nodes, anna.address)
            client = await nodes.enter_async_context(connect(anna.address))
            alone = ModelChoice(model=str(folder), nodes=[bert.address])
            expected = await said(client, alone)
            await client.unload()
            both = replace_nodes(alone, anna.address, bert.address)
            plan = await client.plan(both)
            parts = [(part.devices, part.layers) for part in plan.stages[0].parts]
            end = plan.stages[0].layers[1]
            assert [devices for devices, _ in parts] == [["cpu:0"], ["cpu:1"]]
            assert [parts[0][1][0], parts[1][1][1]] == [0, end]
            assert plan.stages[1].parts == []
            assert "layers cut over cpu:0" in plan.why
            assert await said(client, both) == expected
            status = await client.status()
            assert [device.name for device in status.node.devices] == ["cpu:0", "cpu:1"]
            state = await stage_of(client)
            assert [(part.devices, part.layers) for part in state.parts] == parts
            assert await said(client, both, lose=bert_ends) == expected
            assert await said(client, both) == expected  # where the text had ended first
            state = await stage_of(client)
            assert state.layers == (0, 6)
            assert [part.devices for part in state.parts] == [["cpu:0"], ["cpu:1"]]

    asyncio.run(asyncio.wait_for(main(), 120))


def replace_nodes(choice: ModelChoice, *addresses: str) -> ModelChoice:
    return ModelChoice(model=choice.model, nodes=list(addresses))


def test_a_draft_model_may_take_what_the_first_device_has_alone(tmp_path: Path) -> None:
    """It is loaded there: the memory of a CPU is of no use to it on a card."""
    card = ComputePlugin(
        name="card",
        description="a card",
        dtypes=(DType.FLOAT32,),
        load=lambda job: pytest.fail("nothing is loaded"),
        free_bytes=lambda: 1 << 20,
    )

    async def main() -> None:
        budget = MemoryBudget(
            device=Device.of_plugin(card), others=(group(None),), asked_bytes=None
        )
        async with running(replace(small_settings(tmp_path), budget=budget)) as node:
            assert node.info().memory_free_bytes > 1 << 20
            assert node.lent.loader.orders.free_bytes() <= 1 << 20

    asyncio.run(main())
