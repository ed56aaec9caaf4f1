"""Nodes that drain while requests run: what they hold moves, and no request fails."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.cluster.node.node import Node, listening
from shardnet.types import NodeId, SamplingParams
from shardnet.wire.messages.plans import ModelChoice

PENALISED = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3)
N_TOKENS = 160


async def three(stack: AsyncExitStack, folder: Path, lines: list[str]) -> list[Node]:
    """Start anna, who will be head, bert and carl."""
    nodes = []
    for letter, name in zip("abc", ("anna", "bert", "carl"), strict=True):
        settings = small_settings(folder / name)
        settings = replace(settings, node=NodeId(letter * 32), name=name, log=lines.append)
        nodes.append(await stack.enter_async_context(listening(settings, "127.0.0.1", 0)))
    return nodes


async def said(
    client: Client,
    choice: ModelChoice,
    prompts: list[list[int]],
    began: asyncio.Event | None = None,
) -> list[tuple[int, ...]]:
    """Generate from all prompts at once; set `began` when each has made some tokens."""
    made = [0] * len(prompts)
    results: list[tuple[int, ...]] = [()] * len(prompts)
    events = client.generate(prompts, PENALISED, model=choice, max_tokens=N_TOKENS, ignore_eos=True)
    async with aclosing(events):
        async for event in events:
            assert event.error is None
            made[event.index] += len(event.token_ids)
            if began is not None and min(made) > 10:
                began.set()
            if event.result is not None:
                results[event.index] = tuple(event.result.token_ids)
    return results


def test_a_node_in_the_middle_and_the_tail_leave(tmp_path: Path) -> None:
    """One after the other, while three requests run, one of them in several blocks."""
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    prompts = [random_prompt(n, 300, seed=n) for n in (20, 300, 90)]

    async def main() -> None:
        lines: list[str] = []
        async with AsyncExitStack() as stack:
            anna, bert, carl = await three(stack, tmp_path, lines)
            client = await stack.enter_async_context(connect(anna.address))
            choice = ModelChoice(
                model=str(model), nodes=[node.address for node in (anna, bert, carl)]
            )
            expected = await said(client, choice, prompts)
            for leaving in (bert, carl):
                began = asyncio.Event()
                saying = asyncio.create_task(said(client, choice, prompts, began))
                await began.wait()
                other = await stack.enter_async_context(connect(leaving.address))
                await other.drain(60.0)
                assert leaving.info().is_draining
                assert leaving.info().stage is None
                assert await saying == expected
            for record in anna.planned.records:
                assert (record.n_requests, record.n_moved) == (3, 3), lines
                assert record.n_bytes > 0
            assert len(anna.planned.records) == 2
        print("\n".join(lines))

    asyncio.run(main())
