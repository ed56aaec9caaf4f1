"""Two nodes that keep prompts on disk: over a restart, with real links between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_decoder, make_llama
from support.models.mtp_checkpoints import make_mtp
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
async def ring(folder: Path, model: Path, **how: Any) -> AsyncIterator[tuple[Client, ModelChoice]]:
    """Start two nodes; give a client, and the choice of a stage on each, or made `how`."""
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
        how = how or {"layers": [(0, 1), (1, 2)]}
        yield client, ModelChoice(model=str(model), nodes=[head.address, other.address], **how)


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


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.usefixtures("reading_always_pays", "unmeasured")
def test_what_nodes_that_share_layers_have_kept_counts_where_all_have_it(
    tmp_path: Path, family: str
) -> None:
    """Each keeps the rows of its own heads, and states and what predicts further tokens too."""
    sizes, has_mtp = {"max_position_embeddings": 1024}, family != "llama"
    model = (make_mtp if has_mtp else make_decoder)(tmp_path / "m", family, **sizes)
    prompt = random_prompt(700, 300, seed=1)

    async def ask(**how: Any) -> GenerationResult:
        async with ring(tmp_path, model, mtp=has_mtp, **how) as (client, choice):
            if not how:
                choice = replace_struct(choice, nodes=choice.nodes[:1])
            return await said(client, choice, prompt)

    alone = asyncio.run(ask())
    found = [asyncio.run(ask(nodes_per_stage=2)) for _ in range(2)]
    assert [each.usage.n_reused for each in (alone, *found)] == [0, 0, 512]
    [of_bert] = stored_prefixes(tmp_path / "bert" / "prefixes")
    of_bert.remove()
    found.append(asyncio.run(ask(nodes_per_stage=2)))
    assert found[-1].usage.n_reused == 0
    assert [each.token_ids for each in found] == [alone.token_ids] * 3
