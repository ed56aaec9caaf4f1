"""A household: several models at one address, over nodes that share their memory between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.system.nodes import Machine, NodeProcess, open_machine
from support.system.parrot import Parrots

from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.household import HouseholdModel, HouseholdModelState
from shardnet.wire.messages.plans import ModelChoice

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@dataclass(kw_only=True)
class Home:
    machine: Machine
    nodes: list[NodeProcess]

    def connect(self, place: int = 0):
        identity = load_identity(str(self.machine.config_path.parent / "cluster.key"))
        return connect(self.nodes[place].address, identity)


async def state_of(client: Client, name: str) -> HouseholdModelState:
    [found] = [one for one in await client.household() if one.model.name == name]
    return found


@pytest.fixture
def home(tmp_path) -> Iterator[Home]:
    with open_machine(tmp_path / "machine") as machine:
        assert machine.call("key", "new").code == 0
        nodes = machine.start_nodes("anna", arguments=["--memory", "120MiB"])
        peer = ["--memory", "120MiB", "--peer", nodes[0].address]
        nodes += machine.start_nodes("bert", "cleo", arguments=peer)
        machine.nodes_with("anna", "bert", "cleo", arguments=["--peer", nodes[0].address])
        yield Home(machine=machine, nodes=nodes)


def test_two_models_answer_side_by_side(home: Home, parrots: Parrots) -> None:
    async def main() -> None:
        async with home.connect() as client:
            models = [
                HouseholdModel(name="large", choice=ModelChoice(model=DEFAULT_MODEL_NAME, context=512), priority=5, kept=True),
                HouseholdModel(name="small", choice=ModelChoice(model=str(parrots.alphabet), context=512)),
            ]
            await client.name_models(models)
            began = time.monotonic()
            [result] = await client.complete("abc", model=ModelChoice(model="small"), max_tokens=5)
            print(result.text, time.monotonic() - began)
            [result] = await client.complete("Once", model=ModelChoice(model="large"), max_tokens=5)
            print(result.text, time.monotonic() - began)
            for one in await client.household():
                print(one)
        await asyncio.sleep(2)
        async with home.connect(1) as client:
            [result] = await client.complete("abc", model=ModelChoice(model="small"), max_tokens=5)
            print(result.text)
            [result] = await client.complete("Once", model=ModelChoice(model="large"), max_tokens=5)
            print(result.text)
            async for piece in client.models(names_only=True):
                print(piece.name, [m.name for m in piece.models])

    try:
        asyncio.run(main())
    finally:
        for node in home.nodes:
            print(node.log)
