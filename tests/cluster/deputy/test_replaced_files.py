"""Files that are replaced under a running ring: no answer goes on with other weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs
from support.cluster.keyed_streams import Said, say
from support.cluster.machines import machines
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import connect
from shardnet.errors import CheckpointError
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 60.0


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("has_other_ring", [False, True])
def test_a_deputy_does_not_go_on_with_another_checkpoint(
    has_other_ring: bool, tmp_path: Path
) -> None:
    """Neither where it takes over, nor where a client comes back to a ring with the new files."""
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=6)
    other = make_llama(
        tmp_path / "other", seed=1, max_position_embeddings=1024, num_hidden_layers=6
    )
    prompts = [random_prompt(20, 300, seed=1)]

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert", "cleo") as (anna, bert, cleo),
            connect(anna.node.address) as client,
            connect(bert.node.address) as at_bert,
        ):
            nodes = [one.node.address for one in (anna, bert, cleo)]
            choice = ModelChoice(model=str(model), nodes=nodes)
            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, "k", said=said))
            await said.some.wait()
            replace(model, other)
            await anna.unplug()
            with pytest.raises(CheckpointError, match="is another checkpoint by now"):
                await saying
            assert any("cannot take over" in line for line in bert.lines)
            if has_other_ring:
                await say(at_bert, prompts, ModelChoice(model=str(model)))
                with pytest.raises(CheckpointError, match="put its files back"):
                    await say(at_bert, prompts, choice, "k", resume=True)

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
def test_a_standby_does_not_load_another_checkpoint(tmp_path: Path) -> None:
    """Its order says which one the ring has."""
    model = make_llama(tmp_path / "model", num_hidden_layers=6)
    other = make_llama(tmp_path / "other", seed=1, num_hidden_layers=6)

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as client,
        ):
            nodes = [one.node.address for one in (anna, bert)]
            await client.complete([[5]], model=ModelChoice(model=str(model), nodes=nodes))
            lead = anna.node.head.latest
            assert lead is not None
            order = structs.replace(lead.ring.order(1), beside=True, stands_for="anna", ring="next")
            replace(model, other)
            with pytest.raises(CheckpointError, match="the plan was made for"):
                await bert.node.stage.orders.load(
                    order,
                    owner=anna.node.node,
                    owner_name="anna",
                    progress=lambda *_: None,
                    broken=lambda *_: None,
                )

    asyncio.run(main())


def replace(model: Path, other: Path) -> None:
    """Put the weights of another checkpoint in the place of a model's, as a download does."""
    for file in other.glob("*.safetensors"):
        file.rename(model / file.name)
