"""A household: several models at one address, over nodes that share their memory between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from msgspec import structs
from support.models.encoder_checkpoints import make_encoder
from support.soak import is_soak
from support.system.nodes import Machine, NodeProcess, open_machine
from support.system.parrot import Parrots

from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import BusyError, CapacityError, LinkError
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.generation import Encode
from shardnet.wire.messages.household import HouseholdModel, HouseholdModelState
from shardnet.wire.messages.plans import ModelChoice

N_REQUESTS = 90 if is_soak() else 30
N_TOKENS = 40
Texts = dict[tuple[str, str], str]
PROMPTS = ("Once upon a time", "A story about a dog", "The cat and the")
NAMES = ("anna", "bert", "cleo", "dora")
FILE = """
[models.large]
model = "{large}"
context = 512
priority = 10
keep = true
parallel = 4
nodes = ["bert", "cleo", "dora"]

[models.titles]
model = "{titles}"
context = 512
parallel = 4

[models.signs]
model = "{signs}"
context = 64
idle-unload = "10m"

[models.notes]
model = "{notes}"
"""


@dataclass(kw_only=True)
class Home:
    """Four nodes, of which the first leads and serves."""

    machine: Machine
    nodes: list[NodeProcess]
    choices: dict[str, ModelChoice]

    def connect(self, place: int = 0) -> AbstractAsyncContextManager[Client]:
        """Connect to a node as a member."""
        key = self.machine.config_path.parent / "cluster.key"
        return connect(self.nodes[place].address, load_identity(str(key)))


@pytest.fixture
def home(tmp_path: Path, parrots: Parrots) -> Iterator[Home]:
    """None of the nodes that may have the large model has memory for it alone."""
    models = {
        "large": DEFAULT_MODEL_NAME,
        "titles": str(parrots.alphabet),
        "signs": str(parrots.signs),
        "notes": str(make_encoder(tmp_path / "notes", "BertModel")),
    }
    (tmp_path / "household.toml").write_text(FILE.format(**models))
    with open_machine(tmp_path / "machine") as machine:
        assert machine.call("key", "new").code == 0
        more = ["--http", "127.0.0.1:0", "--deputy", "auto"]
        more += ["--household", str(tmp_path / "household.toml")]
        nodes = machine.start_nodes("anna", arguments=["--memory", "40MiB", *more])
        peer = ["--memory", "24MiB", "--peer", nodes[0].address]
        nodes += machine.start_nodes(*NAMES[1:], arguments=peer)
        machine.nodes_with(*NAMES, arguments=["--peer", nodes[0].address])
        choices = {
            name: ModelChoice(model=models[name], context=64 if name == "signs" else 512)
            for name in ("large", "titles", "signs")
        }
        yield Home(machine=machine, nodes=nodes, choices=choices)


async def said_alone(home: Home) -> Texts:
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
    return found


async def states(client: Client) -> dict[str, HouseholdModelState]:
    return {one.model.name: one for one in await client.household()}


async def until_told(
    home: Home, place: int, names: set[str], placed: str = ""
) -> dict[str, HouseholdModelState]:
    """Return how the models are, once a node knows these, and where the layers of `placed` are.

    It may wait for another one to lead, and that one for the runners to say.
    """
    async with home.connect(place) as client, asyncio.timeout(60):
        while True:
            with contextlib.suppress(LinkError):
                found = await states(client)
                shares = found[placed].shares if placed in found else []
                is_told = not placed or (shares and all(share.layers for share in shares))
                if {*found} == names and is_told:
                    return found
            await asyncio.sleep(0.2)


def test_three_models_answer_side_by_side_and_outlive_a_node(home: Home) -> None:
    """Thirty requests, while the head of the large one's ring dies and a model comes and goes."""

    async def ask(
        client: openai.AsyncOpenAI, number: int, texts: dict[tuple[str, str], str]
    ) -> None:
        name, prompt = [*home.choices][number % 3], PROMPTS[number // 3 % 3]
        text = ""
        stream = await client.completions.create(
            model=name, prompt=prompt, max_tokens=N_TOKENS, temperature=0, stream=True
        )
        async for piece in stream:
            text += piece.choices[0].text if piece.choices else ""
        assert text == texts[name, prompt], name

    async def disturb(member: Client, victim: NodeProcess) -> None:
        await asyncio.sleep(0.3)
        victim.process.kill()
        await member.name_models([HouseholdModel(name="more", choice=home.choices["titles"])])
        asked = member.complete("abc", model=ModelChoice(model="more"), max_tokens=3)
        assert [result.text for result in await asked] == ["def"]
        await member.name_models(dropped=["more"])

    async def main() -> NodeProcess:
        texts = await said_alone(home)
        url = f"{home.nodes[0].ready['http']}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            home.connect() as member,
            home.connect(2) as elsewhere,
        ):
            listed = [model.id for model in (await client.models.list()).data]
            assert {*listed} >= {*home.choices, "notes"}
            await asyncio.gather(*(ask(client, number, texts) for number in range(3)))
            found = await states(member)
            places = [{share.name for share in found[name].shares} for name in home.choices]
            assert [found[name].state for name in home.choices] == ["loaded"] * 3
            assert len(places[0]) == 2, "no node has memory for it alone"
            assert not places[0] & places[1]
            told = await states(elsewhere)  # which asks who leads
            assert {name: told[name].shares for name in told} == {
                name: found[name].shares for name in found
            }
            [vector] = (await client.embeddings.create(model="notes", input="a letter")).data
            assert vector.embedding
            names = [node.ready["name"] for node in home.nodes]
            victim = home.nodes[max(names.index(name) for name in places[0])]
            every = (ask(client, number, texts) for number in range(N_REQUESTS))
            await asyncio.gather(disturb(member, victim), *every)
            assert {*await states(member)} == {*home.choices, "notes"}
        return victim

    asyncio.run(main()).kill()


def test_a_model_that_has_no_room_makes_some_and_says_what_it_waits_for(
    tmp_path: Path, parrots: Parrots
) -> None:
    """One node has room for one of two: the one that is not used goes."""
    one, other = (
        HouseholdModel(name=name, choice=ModelChoice(model=str(parrots.alphabet), context=512))
        for name in ("one", "other")
    )
    with open_machine(tmp_path / "machine") as machine:
        [node] = machine.start_nodes("anna", arguments=["--memory", "9MiB"])

        async def main() -> None:
            async with connect(node.address) as client:
                await client.name_models([one, other])
                long = client.generate(
                    "abc", model=ModelChoice(model="one"), max_tokens=400, ignore_eos=True
                )
                async for event in long:
                    if event.token_ids:
                        break
                waits, text = set[str](), ""
                async for event in client.generate(
                    "xyz", model=ModelChoice(model="other"), max_tokens=4
                ):
                    assert event.error is None
                    waits |= {event.why} if event.why else set()
                    text += event.text
                    if "other waits for memory: one in use" in waits:
                        await long.aclose()
                assert text == "abcd"
                assert "other waits for memory: one in use" in waits
                found = await states(client)
                assert (found["one"].state, found["other"].state) == ("unloaded", "loaded")
                await client.name_models([structs.replace(other, kept=True)])
                with pytest.raises(CapacityError, match="one does not fit beside other, which"):
                    await client.complete("abc", model=ModelChoice(model="one"), max_tokens=1)

        asyncio.run(main())


def test_a_node_that_drains_gives_the_layers_of_its_runners_away(tmp_path: Path) -> None:
    """A text goes on, and is what one node alone says."""
    choice = ModelChoice(model=DEFAULT_MODEL_NAME, context=512)
    with open_machine(tmp_path / "machine") as machine:
        assert machine.call("key", "new").code == 0
        nodes = machine.start_nodes("anna", arguments=["--memory", "24MiB"])
        more = ["--memory", "24MiB", "--peer", nodes[0].address]
        nodes += machine.start_nodes("bert", "cleo", arguments=more)
        machine.nodes_with("anna", "bert", "cleo", arguments=["--peer", nodes[0].address])
        home = Home(machine=machine, nodes=nodes, choices={"large": choice})

        async def main() -> NodeProcess:
            async with home.connect() as client:
                await client.name_models([HouseholdModel(name="large", choice=choice)])
                asked = ModelChoice(model="large")
                [whole] = await client.complete("The cat", model=asked, max_tokens=400)
                [state] = await client.household()
                tail = max(state.shares, key=lambda share: share.layers or (0, 0)).name
                names = [node.ready["name"] for node in nodes]
                leaving, ids = home.nodes[names.index(tail)], list[int]()
                async with asyncio.TaskGroup() as tasks:
                    async for event in client.generate("The cat", model=asked, max_tokens=400):
                        assert event.error is None
                        if event.token_ids and not ids:
                            tasks.create_task(drain(names.index(tail)))
                        ids += event.token_ids
                assert tuple(ids) == tuple(whole.token_ids)
            other = 1 if leaving is nodes[0] else 0  # the one that leads may be the one that leaves
            while True:  # who leads hears of it a moment later
                state = (await until_told(home, other, {"large"}))["large"]
                if state.shares and tail not in {share.name for share in state.shares}:
                    return leaving

        async def drain(place: int) -> None:
            async with home.connect(place) as client:
                await client.drain(30.0)

        asyncio.run(main()).wait()


def test_another_node_leads_in_place_of_one_that_ends_and_finds_what_is_loaded(
    tmp_path: Path, parrots: Parrots
) -> None:
    """What was loaded stays where it is, what was not is loaded; the file counts again later."""
    choice = ModelChoice(model=str(parrots.alphabet), context=512)
    one, other = (HouseholdModel(name=name, choice=choice) for name in ("one", "other"))
    (tmp_path / "household.toml").write_text(
        f'[models.one]\nmodel = "{parrots.alphabet}"\ncontext = 512\n'
        f'[models.third]\nmodel = "{parrots.alphabet}"\ncontext = 512\n'
    )
    with open_machine(tmp_path / "machine") as machine:
        assert machine.call("key", "new").code == 0
        nodes = machine.start_nodes("anna", arguments=["--memory", "1MiB"])
        more = ["--memory", "64MiB", "--peer", nodes[0].address]
        nodes += machine.start_nodes("bert", "cleo", arguments=more)
        machine.nodes_with("anna", "bert", "cleo", arguments=["--peer", nodes[0].address])
        home = Home(machine=machine, nodes=nodes, choices={})

        async def say(place: int, model: str) -> None:
            async with home.connect(place) as client, asyncio.timeout(60):
                asked = client.complete("abc", model=ModelChoice(model=model), max_tokens=3)
                assert [result.text for result in await asked] == ["def"]

        async def main() -> None:
            async with home.connect() as client:
                await client.name_models([one, other])
            await until_told(home, 1, {"one", "other"})
            await say(1, "one")
            before = await until_told(home, 2, {"one", "other"})
            nodes[0].stop()
            await say(2, "other")  # waits for somebody to lead
            after = await until_told(home, 1, {"one", "other"}, placed="one")
            assert after["one"].shares == before["one"].shares
            assert after["one"].state == "loaded"
            await say(2, "one")
            async with home.connect(2) as client:
                [unknown, known] = [
                    await asyncio.to_thread(
                        machine.run, "unload", name, "--nodes", nodes[2].address
                    )
                    for name in ("titles", "other")
                ]
                assert "the household has no model called titles" in unknown.error
                assert "other is unloaded" in known.stderr
                assert (await states(client))["other"].state == "unloaded"
                await client.name_models(dropped=["other"])
            again = ["--peer", nodes[1].address, "--household", str(tmp_path / "household.toml")]
            nodes[0] = machine.start_nodes("anna", arguments=again)[0]
            await until_told(home, 0, {"one", "third"})
            await say(0, "third")
            found = await until_told(home, 1, {"one", "third"}, placed="one")
            assert found["one"].shares == before["one"].shares

        asyncio.run(main())


def test_a_model_makes_room_for_an_encoder_once_nobody_uses_it(
    tmp_path: Path, parrots: Parrots
) -> None:
    """The node that has the encoder does not lead."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    encoder = make_encoder(tmp_path / "notes", "BertModel", num_hidden_layers=2, **sizes)
    choice = ModelChoice(model=str(parrots.alphabet), context=512)
    one = HouseholdModel(name="one", choice=choice, only=["bert"], parallel=256)
    notes = HouseholdModel(name="notes", choice=ModelChoice(model=str(encoder)))
    with open_machine(tmp_path / "machine") as machine:
        nodes = machine.start_nodes("anna", arguments=["--memory", "1MiB"])
        more = ["--memory", "80MiB", "--peer", nodes[0].address]
        nodes += machine.start_nodes("bert", arguments=more)
        machine.nodes_with("anna", "bert", arguments=["--peer", nodes[0].address])

        async def main() -> None:
            async with connect(nodes[0].address) as leader, connect(nodes[1].address) as client:
                await leader.name_models([one, notes])
                async with asyncio.timeout(30):
                    while not await states(client):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                long = client.generate(
                    "abc", model=ModelChoice(model="one"), max_tokens=400, ignore_eos=True
                )
                async for event in long:
                    if event.token_ids:
                        break
                with pytest.raises(BusyError, match="requests to one run"):
                    await client.unload(model="one")
                asked = Encode(request=0, model="notes", texts=["a letter"])
                encoding = asyncio.create_task(client.encode(asked))
                await asyncio.sleep(0.2)
                assert not encoding.done()
                await long.aclose()
                assert len((await encoding).values) == 4 * sizes["hidden_size"]
                assert (await states(client))["one"].why == "it makes room for notes"

        asyncio.run(main())
