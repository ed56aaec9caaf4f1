"""Two nodes that keep prompts on disk: over a restart, with real links between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult
from shardnet.cluster.node.node import listening
from shardnet.sampling_params import SamplingParams
from shardnet.stage.prefixes.prefix_store import stored_prefixes
from shardnet.types import NodeId
from shardnet.wire.messages.diagnostics import PrefixState
from shardnet.wire.messages.plans import ModelChoice

LIMIT_BYTES = 1 << 28


@asynccontextmanager
async def ring(folder: Path, model: Path) -> AsyncIterator[tuple[Client, ModelChoice]]:
    anna = replace(small_settings(folder / "anna"), prefix_cache_bytes=LIMIT_BYTES)
    bert = replace(
        small_settings(folder / "bert"),
        node=NodeId("b" * 32),
        name="bert",
        prefix_cache_bytes=LIMIT_BYTES,
    )
    async with (
        listening(anna, "127.0.0.1", 0) as head,
        listening(bert, "127.0.0.1", 0) as other,
        connect(head.address) as client,
    ):
        choice = ModelChoice(
            model=str(model), nodes=[head.address, other.address], layers=[(0, 1), (1, 2)]
        )
        yield client, choice


async def said(client: Client, choice: ModelChoice, prompt: list[int]) -> GenerationResult:
    [result] = await client.complete(
        prompt, SamplingParams(temperature=1.0, seed=3), model=choice, max_tokens=8
    )
    return result


async def reused(client: Client) -> dict[str, int] | None:
    async with aclosing(client.report()) as replies:
        async for reply in replies:
            if reply.report is not None and reply.report.ring is not None:
                return reply.report.ring.reused
    return None


async def kept(client: Client) -> PrefixState | None:
    async with aclosing(client.report()) as replies:
        async for reply in replies:
            assert reply.report is not None
            assert reply.report.stage is not None
            return reply.report.stage.prefixes
    raise AssertionError("no report")


@pytest.mark.usefixtures("reading_always_pays", "unmeasured")
def test_a_long_prompt_is_read_after_a_restart(tmp_path: Path) -> None:
    """The nodes end at once after the answer: what is left to write is written before."""
    model = make_llama(tmp_path / "m", num_hidden_layers=2, max_position_embeddings=1024)
    prompt = random_prompt(700, 300, seed=1)

    async def first() -> tuple[GenerationResult, GenerationResult]:
        async with ring(tmp_path, model) as (client, choice):
            answer = await said(client, choice, prompt)
            return answer, await said(client, choice, [1, 2, 3])

    async def again() -> tuple[GenerationResult, PrefixState | None, int]:
        async with ring(tmp_path, model) as (client, choice):
            answer = await said(client, choice, prompt)
            state = await kept(client)
            assert await reused(client) == {"memory": 0, "disk": 512}
            next_one = await said(client, choice, prompt)
            assert await reused(client) == {"memory": next_one.usage.n_reused, "disk": 512}
            load = (await client.status()).load
            return answer, state, load.restored_positions if load else 0

    expected, short = asyncio.run(first())
    found, state, n_restored = asyncio.run(again())
    assert found.token_ids == expected.token_ids
    assert [each.usage.n_reused for each in (expected, short, found)] == [0, 0, 512]
    assert (n_restored, state and state.restored_positions) == (512, 512)
    for name, layers in (("anna", "layer 0"), ("bert", "layer 1")):
        [stored] = stored_prefixes(tmp_path / name / "prefixes")
        assert (stored.model, stored.form) == (str(model), layers)
