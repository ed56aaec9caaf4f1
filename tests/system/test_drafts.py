"""What `--speculate auto` drafts with on real nodes, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.models.mtp_checkpoints import make_mtp
from support.system.nodes import open_machine
from support.system.weighing import shape_here

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult
from shardnet.errors import ShardnetError
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

MIB = 2**20
PROMPT = [*range(5, 40), *range(5, 30)]


async def say(client: Client, choice: ModelChoice, **more: Any) -> GenerationResult:
    """Sample, each time alike."""
    sampling = SamplingParams(temperature=0.8, seed=7, n_logprobs=2)
    [result] = await client.complete(
        PROMPT, sampling, model=choice, max_tokens=60, ignore_eos=True, **more
    )
    return result


@pytest.mark.parametrize("has_room", [True, False])
def test_auto_drafts_with_what_the_ring_has(tmp_path: Path, has_room: bool) -> None:
    """By the model's own layer where there is room for it, by look-up beside it and else."""
    folder = make_mtp(tmp_path / "model", "glm4_moe", moe_intermediate_size=4096)
    shape = shape_here(folder, 512)
    mib = shape.memory_bytes(shape.whole) // MIB + (2 if not has_room else 64)
    choice = ModelChoice(model=str(folder), context=512)

    async def main(address: str) -> None:
        async with connect(address) as client:
            drafted = await say(client, choice, speculate="auto")
            ring = (await client.activity()).ring
            plain = await say(client, choice)
            assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)
            assert not plain.timing.drafters
            names = [each.drafter for each in drafted.timing.drafters]
            assert {*names} <= ({"mtp", "ngram"} if has_room else {"ngram"})
            assert ("mtp" in names) is has_room
            told = sum(each.n_accepted for each in drafted.timing.drafters)
            assert told == drafted.timing.n_accepted
            plan = await client.plan(choice.drafting("auto"))
            assert bool(plan.mtp_bytes) is has_room
            assert [each.drafter for each in plan.drafters] == names
            assert {each.node for each in plan.drafters} <= {"anna"}
            again = await say(client, choice, speculate="auto")
            assert again.token_ids == plain.token_ids
            assert (await client.activity()).ring == ring, "no ring was made anew"
            if not has_room:
                with pytest.raises(ShardnetError):
                    await say(client, choice, speculate="mtp")

    with open_machine(tmp_path / "machine") as machine:
        [anna] = machine.start_nodes("anna", arguments=["--memory", f"{mib}MiB"])
        asyncio.run(main(anna.address))


def test_a_server_drafts_for_requests_that_do_not_say(tmp_path: Path) -> None:
    """The model has no layer of its own: text is looked up."""
    with open_machine(tmp_path / "machine") as machine:
        server = ["--http", "127.0.0.1:0", "--speculate", "auto"]
        [anna] = machine.start_nodes("anna", arguments=server)
        url = anna.ready["http"]
        body = {"prompt": "One, two, three. " * 9, "max_tokens": 40, "temperature": 0}
        texts = []
        for more in ({}, {"speculate": "off"}, {"speculate": "auto"}):
            asked = json.dumps(body | more).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", asked, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                texts.append(json.load(answer)["choices"][0]["text"])
        assert texts[1:] == texts[:1] * 2
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        assert 'shardnet_ring_drafted_tokens_total{drafter="ngram"}' in metrics
