"""A head whose own compute thread hangs when its ring is lost: its requests end by name."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest
from support.cluster.keyed_streams import Said, say
from support.cluster.machines import machines
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import connect
from shardnet.errors import PeerFailedError
from shardnet.runtime.stage import executor
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 60.0
SILENCE_S = 3.0
"""Longer than any job here, on a machine with other work."""


@pytest.mark.usefixtures("unmeasured")
def test_requests_end_by_name_and_the_node_serves_when_its_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "COMPUTE_SILENCE_S", SILENCE_S)
    monkeypatch.setattr("shardnet.cluster.recovery.policy.DELAYS_S", (0.0, 0.0))
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    prompts = [random_prompt(20, 300, seed=1)]
    goes_on = threading.Event()

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as client,
        ):
            nodes = [one.node.address for one in (anna, bert)]
            choice = ModelChoice(model=str(model), nodes=nodes)
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, said=said))
            await said.some.wait()
            host, went_on = anna.node.stage.host, asyncio.Event()
            hang = partial(goes_on.wait, DEADLINE_S)
            host.compute.of(0).post(hang, lambda _: went_on.set(), pytest.fail)
            await bert.unplug()
            try:
                with pytest.raises(PeerFailedError, match=r"shardnet-compute of this node hangs"):
                    await saying
                with pytest.raises(PeerFailedError, match="restart this node"):
                    await say(client, prompts, ModelChoice(model=str(model)))
                assert not host._changing.locked()
            finally:
                goes_on.set()
            await went_on.wait()
            again = await say(client, prompts, ModelChoice(model=str(model)))
            assert again.tokens[0][: len(said.tokens[0])] == said.tokens[0]

    asyncio.run(main())
