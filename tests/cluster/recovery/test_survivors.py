"""Nodes that are left and cannot hold the model: layers from disk if allowed, else named errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.cluster.machine.profile import MemoryBudget
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.recovery import ring_replacement
from shardnet.errors import CapacityError, PeerUnreachableError, PlanError, ShardnetError
from shardnet.sampling_params import SamplingParams
from shardnet.types import NodeId
from shardnet.wire.messages.plans import ModelChoice

MEMORY_BYTES = 42 << 20
"""Of each node: two hold the model, one does not."""
NAMES = ["bert", "cleo", "dora"]
"""Nodes beside anna."""
SAMPLED = SamplingParams(temperature=0.8, seed=4)
N_TOKENS = 60
PROMPTS = [random_prompt(n, 300, seed=n) for n in (20, 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 20 MiB in float32, which takes 46 MiB in one stage and 36 in each of two."""
    return make_llama(
        tmp_path_factory.mktemp("wide"),
        max_position_embeddings=512,
        num_hidden_layers=6,
        intermediate_size=6144,
    )


@pytest.fixture(autouse=True)
def quick(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that come are used at once, and nothing is measured."""
    monkeypatch.setattr("shardnet.cluster.recovery.policy.SETTLE_S", 0.05)
    monkeypatch.setattr(ring_replacement, "LOOK_S", 0.02)


async def started(
    name: str, folder: Path, lines: list[str], all_of_them: AsyncExitStack, *peers: str
) -> tuple[Node, AsyncExitStack]:
    """Start a node of MEMORY_BYTES; return it, and what ends it before `all_of_them` end."""
    settings = small_settings(folder / name)
    settings = replace(
        settings,
        node=NodeId(name[0] * 32),
        name=name,
        peers=peers,
        budget=MemoryBudget(device=settings.budget.device, asked_bytes=MEMORY_BYTES),
        log=lines.append,
    )
    ends = await all_of_them.enter_async_context(AsyncExitStack())
    return await ends.enter_async_context(listening(settings, "127.0.0.1", 0)), ends


async def all_started(
    folder: Path, all_of_them: AsyncExitStack
) -> tuple[Node, list[tuple[Node, AsyncExitStack]], Client]:
    """Start anna and the nodes of NAMES; return them, and a client of anna once she sees all."""
    anna, _ = await started("anna", folder, [], all_of_them)
    peers = [await started(name, folder, [], all_of_them, anna.address) for name in NAMES]
    client = await all_of_them.enter_async_context(connect(anna.address))

    async def has_all() -> bool:
        return len((await client.status(with_peers=True)).peers) == len(NAMES)

    await until(has_all)
    return anna, peers, client


async def said(
    client: Client, choice: ModelChoice, at_token: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Generate from all prompts; each gives its tokens, or its error. `at_token` is called once."""
    made: list[list[int]] = [[] for _ in PROMPTS]
    errors: list[ShardnetError | None] = [None] * len(PROMPTS)
    called = False
    events = client.generate(PROMPTS, SAMPLED, model=choice, max_tokens=N_TOKENS, ignore_eos=True)
    async for event in events:
        made[event.index] += event.token_ids
        errors[event.index] = errors[event.index] or event.error
        if min(len(tokens) for tokens in made) > 5 and not called:
            called = True
            at_token()
    return [error or tokens for error, tokens in zip(errors, made, strict=True)]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream_layers", [0, "auto"])
def test_what_survivors_cannot_hold_is_streamed_or_fails_by_name_until_a_node_comes(
    stream_layers: int, model: Path, tmp_path: Path
) -> None:
    choice = ModelChoice(model=str(model), context=256, stream_layers=stream_layers)

    async def main() -> None:
        lines: list[str] = []
        async with AsyncExitStack() as nodes:
            anna, _ = await started("anna", tmp_path, lines, nodes)
            _, bert = await started("bert", tmp_path, [], nodes, anna.address)
            client = await nodes.enter_async_context(connect(anna.address))

            async def has_two() -> bool:
                return len((await client.status(with_peers=True)).peers) == 1

            async def serves_again() -> bool:
                return any("is served again" in line for line in lines)

            await until(has_two)
            wanted = await said(client, choice)
            leaving: list[asyncio.Task[None]] = []

            def leave() -> None:
                leaving.append(asyncio.create_task(bert.aclose()))

            got = await said(client, choice, leave)
            await leaving[0]
            if stream_layers:
                assert got == wanted
                assert anna.head.latest is not None
                [stage] = anna.head.latest.plan.placement.stages
                assert stage.n_streamed > 0
                return
            for error in got:
                assert isinstance(error, PlanError)
                assert "does not fit" in str(error)
            with pytest.raises(PlanError, match="does not fit"):
                await client.complete([5], model=choice, max_tokens=1)
            await started("cleo", tmp_path, [], nodes, anna.address)
            await until(serves_again)
            assert anna.head.latest is not None
            assert [node.name for node in anna.head.latest.plan.nodes] == ["anna", "cleo"]
            assert await said(client, choice) == wanted

    asyncio.run(main())


@pytest.mark.parametrize("n_failures", [1, 1000])
def test_a_head_that_cannot_load_leads_again_or_its_error_ends_the_requests(
    n_failures: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardnet.cluster.recovery.policy.DELAYS_S", (0.0, 0.0, 0.0))
    choice = ModelChoice(model=str(model), context=256)

    async def main() -> None:
        async with AsyncExitStack() as nodes:
            anna, peers, client = await all_started(tmp_path, nodes)
            wanted = await said(client, choice)
            leaving: list[asyncio.Task[None]] = []
            full, load = repeat(CapacityError("no room"), n_failures), anna.stage.host.load

            async def fails_first(*args: Any, **named: Any) -> Any:
                for error in full:
                    raise error
                return await load(*args, **named)

            def leave() -> None:
                assert anna.head.latest is not None
                second = anna.head.latest.plan.nodes[1].name
                anna.stage.host.load = fails_first  # type: ignore[assignment, method-assign]
                leaving.append(asyncio.create_task(peers[NAMES.index(second)][1].aclose()))

            async with asyncio.timeout(60):
                got = await said(client, choice, leave)
            await leaving[0]
            if n_failures > 1:
                assert all("no room" in str(error) for error in got)
                return
            assert got == wanted
            assert anna.head.latest is not None
            assert anna.head.latest.plan.nodes[0].name == "anna"

    asyncio.run(main())


def test_a_node_that_a_ring_was_tried_with_in_vain_is_free_for_others(
    model: Path, tmp_path: Path
) -> None:
    choice = ModelChoice(model=str(model), context=256)

    async def main() -> None:
        async with AsyncExitStack() as nodes:
            anna, peers, client = await all_started(tmp_path, nodes)
            wanted = await said(client, choice)
            leaving: list[asyncio.Task[None]] = []
            unreached: list[StageHost] = []

            async def join(host: StageHost, joins: Any, *args: Any) -> None:
                if host in (unreached or [host]):
                    unreached[:] = [host]
                    raise PeerUnreachableError("no route")
                await joins(*args)

            def leave() -> None:
                assert anna.head.latest is not None
                second = anna.head.latest.plan.nodes[1].name
                for peer, _ in peers:
                    host = peer.stage.host
                    host.join = partial(join, host, host.join)  # type: ignore[method-assign]
                leaving.append(asyncio.create_task(peers[NAMES.index(second)][1].aclose()))

            assert await said(client, choice, leave) == wanted
            await leaving[0]

            async def is_free() -> bool:
                return unreached[0].membership is None and unreached[0].loaded is None

            await until(is_free)

    asyncio.run(main())
