"""A node that is lost while the head encodes a picture: the same words come all the same."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.cluster.machines import machines
from support.models.pictured_model import make_pictured, png
from support.waiting import until

from shardnet.api.client import Client, connect
from shardnet.api.events import RequestState
from shardnet.model.vision.picture import EncoderWalk
from shardnet.model.vision.tower import TowerEncoder
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 90.0
N_PIECES, PIECE_S = 100, 0.01
SAID: Any = [{"role": "user", "content": [{"type": "image", "image": png(37, 53)}]}]


async def say(client: Client, choice: ModelChoice) -> tuple[list[int], list[RequestState]]:
    """Generate greedily; return the tokens and the states that the request went through."""
    tokens: list[int] = []
    states: list[RequestState] = []
    events = client.generate(SAID, SamplingParams(), model=choice, max_tokens=20, ignore_eos=True)
    async for event in events:
        if event.error is not None:
            raise event.error
        tokens += event.token_ids
        states.append(event.state)
    return tokens, states


@pytest.mark.usefixtures("unmeasured")
def test_the_same_words_come_where_the_tail_is_lost_while_a_picture_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, encode = threading.Event(), TowerEncoder.encode

    def slowly(encoder: TowerEncoder, pictures: Any) -> EncoderWalk:
        begun.set()
        for _ in range(N_PIECES):
            time.sleep(PIECE_S)
            yield None
        yield from encode(encoder, pictures)

    async def main() -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as client,
        ):
            nodes = [one.node.address for one in (anna, bert)]
            choice = ModelChoice(model=str(make_pictured(folder)), nodes=nodes, dtype="float32")
            wanted, _ = await say(client, choice)
            await client.unload()
            monkeypatch.setattr(TowerEncoder, "encode", slowly)
            saying = asyncio.create_task(say(client, choice))
            await until(begun.is_set)
            assert not saying.done()
            await bert.unplug()
            tokens, states = await saying
            assert tokens == wanted
            assert RequestState.RECOVERING in states

    asyncio.run(main())
