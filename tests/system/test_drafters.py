"""Drafters on other nodes, as real processes: texts are those without, whatever becomes of one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.models.checkpoints import make_llama
from support.models.drafter_checkpoints import make_dflash, make_eagle3
from support.servers.hub_server import open_hub
from support.soak import cases
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

REPO = "lab/small"
PROMPT = "Once upon a time there was a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Two nodes with a model, a third that drafts, and drafters by name."""

    machine: Machine
    nodes: list[NodeProcess]
    model: str
    drafters: dict[str, str]

    async def say(
        self,
        client: Client,
        speculate: str = "off",
        *,
        n_tokens: int = 60,
        at_20: Callable[[], None] = lambda: None,
    ) -> GenerationResult:
        """Ask for a text; `at_20` is called once 20 tokens are there."""
        n_said = 0
        choice = ModelChoice(
            model=self.model, nodes=[node.address for node in self.nodes[:2]], context=512
        )
        async for event in client.generate(
            PROMPT,
            SamplingParams(temperature=0.4, seed=3),
            model=choice,
            max_tokens=n_tokens,
            ignore_eos=True,
            speculate=speculate,
        ):
            if event.error is not None:
                raise event.error
            if n_said < 20 <= n_said + len(event.token_ids):
                at_20()
            n_said += len(event.token_ids)
            if event.result is not None:
                return event.result
        raise AssertionError("no result")


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    folder = tmp_path_factory.mktemp("drafters")
    model = make_llama(folder / "model", num_hidden_layers=8)
    drafters = {
        "itself": model,
        "small": make_llama(folder / "small", num_hidden_layers=1, seed=5),
        "eagle3": make_eagle3(folder / "eagle3", "specforge"),
        "dflash": make_dflash(folder / "dflash"),
        "other": make_llama(folder / "other", num_hidden_layers=1, vocab_size=330),
        "wide": make_eagle3(folder / "wide", "specforge", hidden_size=96),
    }
    machine = Machine(_made(folder / "machine"))
    try:
        nodes = machine.start_nodes("anna")
        peer = ("--peer", nodes[0].address)
        nodes += machine.start_nodes("berta", "carl", arguments=peer)
        machine.nodes_with("berta", "carl")
        named = {name: str(path) for name, path in drafters.items()}
        yield Ring(machine=machine, nodes=nodes, model=str(model), drafters=named)
    finally:
        machine.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("which", ["small", "itself", "eagle3", "dflash"])
@pytest.mark.parametrize("where", ["anna", "carl"])
def test_words_are_those_without_drafts(ring: Ring, which: str, where: str) -> None:
    async def main() -> None:
        async with connect(ring.nodes[0].address) as client:
            plain = await ring.say(client)
            before = len(ring.nodes[2].log)
            said = await ring.say(client, f"{ring.drafters[which]}@{where}")
            assert said.token_ids == plain.token_ids
            drafts = f"drafting with {ring.drafters[which]} for anna"
            assert (drafts in ring.nodes[2].log[before:]) == (where == "carl")

    asyncio.run(main())


def test_a_drafter_of_the_hub_is_downloaded_by_the_node_that_drafts(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", num_hidden_layers=8)
    with open_hub() as hub:
        hub.add(REPO, make_llama(tmp_path / "small", num_hidden_layers=1, seed=5))
        environment = {"SHARDNET_NO_MDNS": "1", "HF_HOME": str(tmp_path / "hf"), **hub.environment}
        machine = Machine(_made(tmp_path / "machine"), environment=environment)
        try:
            [anna] = machine.start_nodes("anna")
            [carl] = machine.start_nodes("carl", arguments=("--peer", anna.address))
            machine.nodes_with("carl")
            asked = (
                "generate",
                "--model",
                str(model),
                "--nodes",
                anna.address,
                "--max-tokens",
                "9",
            )
            plain = machine.run(*asked, PROMPT)
            said = machine.run(*asked, "--speculate", f"{REPO}@{carl.address}", PROMPT)
            assert (said.code, said.stdout) == (0, plain.stdout), said.stderr
            assert f"pulled {REPO}" in carl.log
            assert f"drafting with {REPO} for anna" in carl.log
        finally:
            machine.close()


def test_where_nothing_is_said_a_drafter_is_on_one_of_the_nodes(ring: Ring) -> None:
    async def main() -> None:
        async with connect(ring.nodes[0].address) as client:
            plain = await ring.say(client)
            said = await ring.say(client, ring.drafters["small"])
            assert said.token_ids == plain.token_ids

    asyncio.run(main())


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("other", "330 token ids, the model of the ring 320"),
        ("wide", "made for a model of 96 columns, this one has 48"),
    ],
)
def test_a_drafter_for_another_model_is_refused(ring: Ring, which: str, message: str) -> None:
    async def main() -> None:
        async with connect(ring.nodes[0].address) as client:
            with pytest.raises(CheckpointError, match=message):
                await ring.say(client, f"{ring.drafters[which]}@carl")
            with pytest.raises(ShardnetError, match="nowhere at all"):
                await ring.say(client, "/nowhere at all@carl")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("which", "number"),
    cases(
        [("small", signal.SIGSTOP), ("eagle3", signal.SIGKILL)],
        [("eagle3", signal.SIGSTOP), ("small", signal.SIGKILL)],
    ),
)
def test_a_drafter_that_is_lost_is_a_ring_without_drafts(
    ring: Ring, which: str, number: signal.Signals
) -> None:
    """The text goes on, and another one too."""
    peer = ("--peer", ring.nodes[0].address, "--peer", ring.nodes[1].address)
    [node] = ring.machine.start_nodes("dora", arguments=peer)
    ring.machine.nodes_with("dora")

    async def main() -> None:
        async with connect(ring.nodes[0].address) as client:
            plain = await ring.say(client, n_tokens=200)
            drafter = f"{ring.drafters[which]}@dora"
            said = await ring.say(client, drafter, n_tokens=200, at_20=lambda: node.signal(number))
            assert said.token_ids == plain.token_ids
            for node_name in ("dora", "carl"):
                drafter = f"{ring.drafters[which]}@{node_name}"
                again = await ring.say(client, drafter, n_tokens=200)
                assert again.token_ids == plain.token_ids

    asyncio.run(main())
    node.kill()


@pytest.mark.parametrize("which", ["eagle3", "small"])
def test_a_ring_that_loses_a_node_drafts_on(ring: Ring, which: str) -> None:
    """Rows are computed anew on what is left; the drafter has read their states."""
    [erik] = ring.machine.start_nodes("erik", arguments=("--peer", ring.nodes[0].address))
    ring.machine.nodes_with("erik")
    shrinking = replace(ring, nodes=[ring.nodes[0], erik])
    drafter = f"{ring.drafters[which]}@{ring.nodes[2].address}"

    async def main() -> None:
        async with connect(ring.nodes[0].address) as client:
            plain = await ring.say(client, n_tokens=200)
            said = await shrinking.say(client, drafter, n_tokens=200, at_20=erik.process.kill)
            assert said.token_ids == plain.token_ids

    asyncio.run(main())
    erik.kill()
