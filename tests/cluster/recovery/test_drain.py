"""Nodes that drain while requests run: what they hold moves, and no request fails."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_decoder
from support.rings.stage_chain import random_prompt
from support.soak import cases

from shardnet.api.client import Client, connect
from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.ring.ring_moves import RingMoves
from shardnet.errors import PeerFailedError
from shardnet.sampling_params import SamplingParams
from shardnet.types import NodeId, SequenceId
from shardnet.wire.messages.plans import ModelChoice

PENALISED = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3)
MOST_TOKENS = 3000
"""More than are made before a node has left, however slow this machine is now."""
SOME = 5


async def started(
    names: tuple[str, ...], stack: AsyncExitStack, folder: Path, lines: list[str]
) -> list[Node]:
    """Start nodes, the first of which will be head."""
    nodes = []
    for name in names:
        letter = name[0]
        settings = small_settings(folder / name)
        settings = replace(settings, node=NodeId(letter * 32), name=name, log=lines.append)
        nodes.append(await stack.enter_async_context(listening(settings, "127.0.0.1", 0)))
    return nodes


async def said(
    client: Client,
    choice: ModelChoice,
    prompts: list[list[int]],
    began: asyncio.Event,
    enough: asyncio.Event,
    least: int = 0,
) -> list[list[int]]:
    """Generate from all prompts at once until each has made some tokens after `enough`.

    Each makes `least` tokens in all. `began` is set when each has made some.
    """
    made: list[list[int]] = [[] for _ in prompts]
    since = [0] * len(prompts)
    events = client.generate(
        prompts, PENALISED, model=choice, max_tokens=MOST_TOKENS, ignore_eos=True
    )
    async with aclosing(events):
        async for event in events:
            assert event.error is None
            made[event.index] += event.token_ids
            if min(len(tokens) for tokens in made) > SOME:
                began.set()
            if enough.is_set():
                since[event.index] += len(event.token_ids)
                if min(since) > SOME and min(len(tokens) for tokens in made) >= least:
                    break
    return made


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("family", "names"),
    cases(
        [("qwen3_next", ("anna", "bert"))],
        [
            *((family, ("anna", "bert")) for family in ("falcon_h1", "llama")),
            *((family, ("anna", "bert", "carl")) for family in ("llama", "qwen3_next")),
        ],
    ),
)
def test_nodes_leave_one_after_the_other(
    family: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the head, while two requests run, one of them in many blocks.

    Once they are held, little is left to be moved, of states too. The head takes nothing new, and
    ends with its requests, or when its time is over.
    """

    hybrid = {"layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"]}
    model = make_decoder(
        tmp_path / "model",
        family,
        max_position_embeddings=8192,
        num_hidden_layers=6,
        **(hybrid if family == "qwen3_next" else {}),
    )
    prompts = [random_prompt(n, 300, seed=n) for n in (20, 3000)]
    n_bytes: dict[bool, int] = defaultdict(int)
    bring = RingMoves.bring

    async def counted(moves: RingMoves, *how: Any, is_last: bool) -> dict[SequenceId, int]:
        n_before = moves.n_bytes
        moved = await bring(moves, *how, is_last=is_last)
        n_bytes[is_last] += moves.n_bytes - n_before
        return moved

    monkeypatch.setattr(RingMoves, "bring", counted)

    async def main() -> None:
        lines: list[str] = []
        async with AsyncExitStack() as stack:
            nodes = await started(names, stack, tmp_path, lines)
            anna = nodes[0]
            client = await stack.enter_async_context(connect(anna.address))
            choice = ModelChoice(model=str(model), nodes=[node.address for node in nodes])
            texts = []
            for leaving in nodes[1:]:
                began, left = asyncio.Event(), asyncio.Event()
                saying = asyncio.create_task(said(client, choice, prompts, began, left))
                await began.wait()
                other = await stack.enter_async_context(connect(leaving.address))
                await other.drain(60.0)
                assert leaving.info().is_draining
                assert leaving.info().stage is None
                left.set()
                texts.append(await saying)
            records = [each for each in anna.planned.records if each.why.startswith("node ")]
            assert len(records) == len(nodes) - 1
            for record in records:
                assert (record.n_requests, record.n_moved) == (2, 2), lines
            assert 0 < 4 * n_bytes[True] < n_bytes[False]
            began, ended = asyncio.Event(), asyncio.Event()
            least = max(len(one) for made in texts for one in made)
            saying = asyncio.create_task(said(client, choice, prompts, began, ended, least))
            await began.wait()
            await client.drain(0.01)
            await anna.drain.is_over.wait()
            with pytest.raises(PeerFailedError, match="this node is draining, and ends soon"):
                await client.complete([5], model=choice, max_tokens=1)
            ended.set()
            undisturbed = await saying
            assert "the node ends before it is empty: 0.01 s are over" in lines
            for made in texts:
                for one, whole in zip(made, undisturbed, strict=True):
                    assert one == whole[: len(one)]

    asyncio.run(main())
