"""Rings whose requests have pictures: other splits, lost nodes, the deputy of a head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models.pictured_model import make_pictured, png
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.api.events import RequestState
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

N_TOKENS = 40
SAID: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a "},
            {"type": "image", "image": png(37, 53)},
            {"type": "text", "text": " and "},
            {"type": "image", "image": png(60, 60, seed=1)},
        ],
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(tmp_path_factory.mktemp("pictured"))


async def say(
    client: Client,
    choice: ModelChoice,
    at_token: Callable[[int], None] = lambda n: None,
    **how: Any,
) -> tuple[list[int], list[str]]:
    """Generate greedily; return the tokens and the states that the request went through."""
    tokens: list[int] = []
    states: list[str] = []
    events = client.generate(
        SAID, SamplingParams(), model=choice, max_tokens=N_TOKENS, ignore_eos=True, **how
    )
    async for event in events:
        if event.error is not None:
            raise event.error
        if event.state.value not in states[-1:]:
            states.append(event.state.value)
        tokens += event.token_ids
        if event.token_ids:
            at_token(len(tokens))
    return tokens, states


@pytest.mark.parametrize("lost", ["tail", "head"])
def test_the_same_words_go_on_where_a_node_is_lost(
    machine: Machine, folder: Path, lost: str
) -> None:
    nodes = machine.start_nodes("anna", "bert")
    addresses = [node.address for node in nodes]
    pair = ModelChoice(model=str(folder), nodes=addresses, context=512, dtype="float32")
    victim: NodeProcess = nodes[lost == "tail"]

    def kill(n_tokens: int) -> None:
        if n_tokens == 12:
            victim.process.kill()

    async def main() -> None:
        key = {"key": "pictures"} if lost == "head" else {}
        async with connect(addresses[0]) as client:
            alone, _ = await say(
                client, ModelChoice(model=str(folder), nodes=addresses[:1], dtype="float32")
            )
            assert len(alone) == N_TOKENS
            undisturbed, _ = await say(client, pair)
            assert undisturbed == alone
            disturbed, states = await say(client, pair, kill, **key)
            assert disturbed == alone
            assert RequestState.RECOVERING.value in states

    asyncio.run(main())
    victim.kill()
