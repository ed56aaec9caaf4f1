"""A household: several models at one address, over nodes that share their memory between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from support.soak import is_soak
from support.system.nodes import Machine, NodeProcess, open_machine
from support.system.parrot import Parrots

from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.household import HouseholdModel, HouseholdModelState
from shardnet.wire.messages.plans import ModelChoice

N_REQUESTS = 90 if is_soak() else 30
N_TOKENS = 40
PROMPTS = ("Once upon a time", "A story about a dog", "The cat and the")
NAMES = ("anna", "bert", "cleo", "dora")
FILE = """
[models.large]
model = "{large}"
context = 512
priority = 10
keep = true
parallel = 4

[models.titles]
model = "{small}"
context = 512
parallel = 4

[models.signs]
model = "{signs}"
context = 64
idle-unload = "10m"
"""


@dataclass(kw_only=True)
class Home:
    """Four nodes, of which the first leads and serves."""

    machine: Machine
    nodes: list[NodeProcess]
    choices: dict[str, ModelChoice]

    @property
    def url(self) -> str:
        """Where the models are asked for."""
        return str(self.nodes[0].ready["http"])

    def connect(self, place: int = 0) -> AbstractAsyncContextManager[Client]:
        """Connect to a node as a member."""
        key = self.machine.config_path.parent / "cluster.key"
        return connect(self.nodes[place].address, load_identity(str(key)))


async def state_of(client: Client, name: str) -> HouseholdModelState:
    [found] = [one for one in await client.household() if one.model.name == name]
    return found


@pytest.fixture
def home(tmp_path: Path, parrots: Parrots) -> Iterator[Home]:
    """The laptop has little memory; what is large has to be cut over others."""
    models = {"large": DEFAULT_MODEL_NAME, "small": parrots.alphabet, "signs": parrots.signs}
    (tmp_path / "household.toml").write_text(FILE.format(**models))
    with open_machine(tmp_path / "machine") as machine:
        assert machine.call("key", "new").code == 0
        more = ["--http", "127.0.0.1:0", "--deputy", "auto", "--household", str(tmp_path / "household.toml")]
        nodes = machine.start_nodes("anna", arguments=["--memory", "24MiB", *more])
        peer = ["--memory", "24MiB", "--peer", nodes[0].address]
        nodes += machine.start_nodes(*NAMES[1:], arguments=peer)
        machine.nodes_with(*NAMES, arguments=["--peer", nodes[0].address])
        choices = {
            "large": ModelChoice(model=DEFAULT_MODEL_NAME, context=512),
            "titles": ModelChoice(model=str(parrots.alphabet), context=512),
            "signs": ModelChoice(model=str(parrots.signs), context=64),
        }
        yield Home(machine=machine, nodes=nodes, choices=choices)


async def alone(home: Home) -> dict[tuple[str, str], str]:
    """What each model says where there is no other one."""
    found = {}
    with open_machine(home.machine.folder / "alone") as machine:
        [node] = machine.start_nodes("solo")
        async with connect(node.address) as client:
            for name, choice in home.choices.items():
                for prompt in PROMPTS:
                    [result] = await client.complete(
                        prompt, SamplingParams(), model=choice, max_tokens=N_TOKENS
                    )
                    found[name, prompt] = result.text
                await client.unload()
    return found


def test_three_models_answer_side_by_side_and_outlive_a_node(home: Home) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int, texts: dict[tuple[str, str], str]) -> None:
        name, prompt = [*home.choices][number % 3], PROMPTS[number // 3 % 3]
        text = ""
        stream = await client.completions.create(
            model=name, prompt=prompt, max_tokens=N_TOKENS, temperature=0, stream=True
        )
        async for piece in stream:
            text += piece.choices[0].text if piece.choices else ""
        assert text == texts[name, prompt], name

    async def main() -> None:
        texts = await alone(home)
        url = f"{home.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            home.connect() as member,
        ):
            assert {model.id for model in (await client.models.list()).data} >= {*home.choices}
            await asyncio.gather(*(ask(client, number, texts) for number in range(3)))
            states = await member.household()
            print([(o.model.name, o.state, o.shares) for o in states])
            [large] = [one for one in states if one.model.name == "large"]
            victim = next(node for node in home.nodes[1:] if node.ready["name"] in [s.name for s in large.shares])
            print("victim", victim.ready["name"])

            async def disturb() -> None:
                await asyncio.sleep(0.3)
                victim.process.kill()
                more = HouseholdModel(name="more", choice=home.choices["titles"])
                await member.name_models([more])
                [result] = await member.complete("abc", model=ModelChoice(model="more"), max_tokens=3)
                assert result.text == "def"
                await member.name_models(dropped=["more"])

            await asyncio.gather(disturb(), *(ask(client, number, texts) for number in range(N_REQUESTS)))
            print([(o.model.name, o.state, o.shares) for o in await member.household()])
        victim.kill()

    try:
        asyncio.run(main())
    finally:
        for node in home.nodes:
            print(node.log)
