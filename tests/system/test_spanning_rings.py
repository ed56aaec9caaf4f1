"""Stages that span two nodes do what one node's stage does, and say the same to the bit."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from support.models.adapters import ALL, make_peft
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.models.mtp_checkpoints import make_mtp
from support.servers.proxy import Proxy
from support.soak import cases
from support.system.nodes import Machine, NodeProcess, open_machine

from shardnet.api.client import Client, connect
from shardnet.api.connections import load_identity
from shardnet.api.events import GenerationResult
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.machine.folders import PACKS_FOLDER
from shardnet.constraints import Constraint
from shardnet.model.kernels.library import native_kernels
from shardnet.output_params import OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice, NamedAdapter

IS_DETERMINISTIC = native_kernels() is None
N_TOKENS = 24
REST_S = 3.0
"""How long nodes are watched that have nothing to do."""
PROMPT = [*range(5, 40), *range(5, 30)]
SAMPLED = SamplingParams(temperature=0.8, seed=7, n_logprobs=2, repetition_penalty=1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two nodes on one machine, of which the first leads."""

    machine: Machine
    nodes: list[NodeProcess]

    def choices(self, folder: Path | str, **more: Any) -> tuple[ModelChoice, ModelChoice]:
        """What one node computes alone, and what both share each layer of."""
        addresses = [node.address for node in self.nodes]
        alone = ModelChoice(model=str(folder), nodes=addresses[:1], context=512, **more)
        return alone, replace(alone, nodes=addresses, nodes_per_stage=2)

    def client(self) -> Any:
        """Connect to the one that leads."""
        return connect(self.nodes[0].address)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_machine(tmp_path_factory.mktemp("pair") / "machine") as machine:
        nodes = machine.start_nodes("anna", "bert", arguments=["--prefix-cache", "1GiB"])
        yield Pair(machine=machine, nodes=nodes)


async def say(
    client: Client,
    choice: ModelChoice,
    prompt: Any = PROMPT,
    sampling: SamplingParams = SAMPLED,
    **more: Any,
) -> GenerationResult:
    """Run one request."""
    options: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True} | more
    [result] = await client.complete(
        prompt, sampling, model=choice, deterministic=IS_DETERMINISTIC, **options
    )
    return result


def words(result: GenerationResult) -> tuple[object, ...]:
    """All that two nodes have to say as one does."""
    return result.token_ids, result.logprobs, result.prompt_logprobs


def test_a_part_keeps_its_quantised_weights_on_disk_and_in_memory(
    pair: Pair, tmp_path: Path
) -> None:
    folder = make_decoder(tmp_path / "model", "llama", hidden_size=64, num_attention_heads=4)
    alone, both = pair.choices(folder, quant="int8")
    packs = pair.machine.folder / "cache" / PACKS_FOLDER
    n_linears = 4 * 4 + 1
    """Of four layers, and the LM head."""

    def packed() -> set[tuple[Path, int]]:
        return {(file, file.stat().st_mtime_ns) for file in packs.rglob("*.packed")}

    def written(n_stages: int) -> set[tuple[Path, int]]:
        """Wait until all linears of so many stages are there: they are written beside steps."""
        while len(packed()) < n_stages * n_linears:
            time.sleep(0.01)
        return packed()

    def freed() -> int:
        """Count how often a node was told to free its part, which is not in its memory then."""
        return sum(node.log.count("freed the stage") for node in pair.nodes)

    async def main() -> None:
        async with pair.client() as client:
            plain = words(await say(client, alone))
            whole = await asyncio.to_thread(written, 1)
            assert words(await say(client, both)) == plain
            parts = await asyncio.to_thread(written, 3)
            assert len({file.parent for file, _ in parts - whole}) == 2, "one for each part"
            assert words(await say(client, alone)) == plain
            assert words(await say(client, both)) == plain
            assert packed() == parts, "what was cached was made again"
            while True:
                n_freed = freed()
                for file, _ in packed() - whole:
                    file.unlink()
                assert words(await say(client, replace(both, context=256))) == plain
                if freed() == n_freed:
                    break  # else the ring was lost in between, as happens where nodes stand still
                assert words(await say(client, both)) == plain
            assert packed() == whole, "linears that were here were made again"

    asyncio.run(main())


@pytest.mark.parametrize("family", cases(["deepseek_v3"], ["glm4_moe", "qwen3_5_text"]))
def test_what_predicts_further_tokens_drafts_on_all_parts(
    pair: Pair, tmp_path: Path, family: str
) -> None:
    folder = make_mtp(tmp_path, family)
    alone, both = pair.choices(folder, mtp=True, dtype="float32")
    asked = {"outputs": OutputParams(n_prompt_logprobs=1)}

    async def main() -> None:
        async with pair.client() as client:
            plain = await say(client, alone)
            drafted = await say(client, alone, speculate="mtp")
            assert words(drafted) == words(plain)
            found = await say(client, both, speculate="mtp", **asked)
            assert words(found)[:2] == words(plain)[:2]
            assert found.timing.n_drafted
            together = await asyncio.gather(
                *(say(client, both, PROMPT[n:], speculate="mtp") for n in range(3))
            )
            assert words(together[0]) == words(plain)
            regex = {"constraint": Constraint(kind="regex", text="([a-f]+,){30}")}
            one, cut = [await say(client, each, speculate="mtp", **regex) for each in (alone, both)]
            assert words(cut) == words(one)
            assert not (await client.activity()).recoveries, "parts were unlike"

    asyncio.run(main())


@pytest.mark.parametrize("family", cases(["granitemoehybrid"], ["qwen3_5_text", "lfm2"]))
def test_drafts_are_verified_by_all_parts(pair: Pair, tmp_path: Path, family: str) -> None:
    """Looked up or of a model on the head; what was rejected is taken back, of states too."""
    folder = make_decoder(tmp_path, family, **CASES[family])
    alone, both = pair.choices(folder)
    likely = SamplingParams(n_logprobs=2)

    async def main() -> None:
        async with pair.client() as client:
            plain = await say(client, alone, PROMPT, likely, max_tokens=100)
            drafted = [
                await say(client, both, PROMPT, likely, max_tokens=100, **how)
                for how in ({}, {"speculate": "ngram"}, {"speculate": str(folder)})
            ]
            assert [words(one) for one in drafted] == [words(plain)] * 3
            # A busy machine may find those of one kind too dear.
            assert any(one.timing.n_drafted for one in drafted[1:])
            text = [*PROMPT, *plain.token_ids]
            continued = await say(client, both, text)  # from what is kept of it
            assert continued.usage.n_reused
            assert words(continued) == words(await say(client, alone, text))

    asyncio.run(main())


def test_all_outputs_and_chosen_experts_are_those_of_one_node(pair: Pair, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model", "mixtral")
    alone, both = pair.choices(folder, dtype="float32")
    asked = OutputParams(
        n_prompt_logprobs=2, logit_rows=20, hidden_rows=20, every_layer=True, routing=True
    )

    async def main() -> None:
        async with pair.client() as client:
            one, cut = [await say(client, each, outputs=asked) for each in (alone, both)]
            assert words(cut) == words(one)
            assert (cut.logits, cut.hidden, cut.routing) == (one.logits, one.hidden, one.routing)
            assert None not in (one.logits, one.hidden, one.routing)

    asyncio.run(main())


@pytest.mark.parametrize("family", cases(["phi3"], ["qwen3", "llama"]))
def test_adapters_are_cut_as_the_linears_that_they_add_to(
    pair: Pair, tmp_path: Path, family: str
) -> None:
    """Also of joined linears, and where five heads do not divide: a part then has no values."""
    folder = make_decoder(tmp_path / "model", family, **CASES.get(family, {}))
    targets = [*ALL, "qkv_proj", "gate_up_proj"]
    paths = {
        name: make_peft(tmp_path / name, folder, seed=n, targets=targets)
        for n, name in enumerate("ab")
    }
    named = [NamedAdapter(name, str(path)) for name, path in paths.items()]
    alone, both = pair.choices(folder, adapters=named, dtype="float32")
    uses: list[dict[str, float]] = [{"a": 1.0}, {}, {"b": 0.5}]

    async def main() -> None:
        async with pair.client() as client:
            plain = [words(await say(client, alone, adapters=used)) for used in uses]
            assert len({one[0] for one in plain}) == len(plain)
            found = await asyncio.gather(*(say(client, both, adapters=used) for used in uses))
            assert [words(one) for one in found] == plain

    asyncio.run(main())


def test_of_a_node_with_several_devices_the_first_one_computes(
    machine: Machine, tmp_path: Path
) -> None:
    devices = ["--device", "cpu:0,cpu:1", "--tensor-parallel", "1"]
    nodes = machine.start_nodes("cleo", "dora", arguments=devices)
    alone, both = Pair(machine=machine, nodes=nodes).choices(make_decoder(tmp_path / "m", "llama"))

    async def main() -> None:
        async with connect(nodes[0].address) as client:
            plain = await say(client, alone)
            assert words(await say(client, both)) == words(plain)
            plan = await client.plan(both)
            assert not any(stage.parts for stage in plan.stages)

    asyncio.run(main())


@pytest.mark.parametrize("family", cases(["qwen3_5_text"], ["llama"]))
def test_a_node_that_leaves_hands_its_part_to_another(
    machine: Machine, tmp_path: Path, family: str
) -> None:
    """One of three comes in its place: it takes the rows of its heads, and computes none anew."""
    [cleo] = machine.start_nodes("cleo")
    others = machine.start_nodes("dora", "emil", arguments=["--peer", cleo.address])
    nodes = {"cleo": cleo, "dora": others[0], "emil": others[1]}
    sizes = CASES.get(family, {}) | {"max_position_embeddings": 1024}
    folder = str(make_decoder(tmp_path / "model", family, **sizes))
    both = ModelChoice(model=folder, nodes_per_stage=2, context=1024)

    async def main() -> None:
        async with connect(cleo.address) as client:
            [stage] = (await client.plan(both)).stages
            [other] = stage.shards
            n_tokens, found = 0, None
            options = {"max_tokens": 600, "ignore_eos": True, "deterministic": IS_DETERMINISTIC}
            async for event in client.generate(PROMPT, SAMPLED, model=both, **options):
                n_tokens += len(event.token_ids)
                if n_tokens > 20:
                    nodes[other.name].tell_to_leave()
                found = event.result or found
            assert found is not None
            log = nodes[stage.name].log
            assert "1 moved with their KV cache" in log, log
            alone = ModelChoice(model=folder, nodes=[nodes[stage.name].address], context=1024)
            assert words(found) == words(await say(client, alone, max_tokens=600))

    asyncio.run(main())


def flipped(piece: bytes) -> bytes:
    """Flip a bit of the last number."""
    return piece[:-1] + bytes([piece[-1] ^ 1])


def twice(piece: bytes) -> bytes:
    """Send it again."""
    return piece * 2


@pytest.mark.parametrize(
    ("has_key", "how"), cases([(True, flipped)], [(False, twice), (False, flipped), (True, twice)])
)
def test_parts_that_no_node_has_sent_end_the_ring_by_name_and_change_no_text(
    machine: Machine, has_key: bool, how: Callable[[bytes], bytes]
) -> None:
    identity = None
    if has_key:
        assert machine.run("key", "new").code == 0
        identity = load_identity(str(machine.config_path.with_name("cluster.key")))
    cleo, dora = machine.start_nodes("cleo", "dora", arguments=["--host", "127.0.0.1"])
    alone = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=[cleo.address], context=512)

    async def main(proxy: Proxy) -> None:
        nodes = [f"127.0.0.1:{proxy.port}", dora.address]  # shards open links to those before
        both = replace(alone, nodes=nodes, nodes_per_stage=2)
        async with connect(cleo.address, identity) as client:
            plain = await say(client, alone, max_tokens=150)
            n_tokens, found, is_changed = 0, None, False
            options = {"max_tokens": 150, "ignore_eos": True, "deterministic": IS_DETERMINISTIC}
            async for event in client.generate(PROMPT, SAMPLED, model=both, **options):
                n_tokens += len(event.token_ids)
                if n_tokens > 20 and not is_changed:
                    is_changed = True
                    proxy.change(how)
                found = event.result or found
            assert found is not None
            assert words(found) == words(plain)
            [seen] = (await client.activity()).recoveries
            assert (seen.lost, seen.nodes, seen.error) == ([], ["cleo", "dora"], "")
            assert re.search(r"(cleo|dora) \(127.*(damaged| as part of step )", seen.why), seen.why

    with Proxy("127.0.0.1", cleo.ready["port"]) as proxy:
        asyncio.run(main(proxy))


def test_nodes_that_share_layers_rest_when_nothing_is_asked(tmp_path: Path) -> None:
    environment = {"SHARDNET_NO_MDNS": "1", "SHARDNET_NO_SPIN": "0"}  # as users start them
    with closing(Machine(tmp_path / "machine", environment=environment)) as machine:
        nodes = machine.start_nodes("cleo", "dora")
        _, both = Pair(machine=machine, nodes=nodes).choices(DEFAULT_MODEL_NAME)
        processes = [psutil.Process(node.pid) for node in nodes]

        async def main() -> None:
            async with connect(nodes[0].address) as client:
                await say(client, both)
                before_s = [sum(process.cpu_times()[:2]) for process in processes]
                await asyncio.sleep(REST_S)
                after_s = [sum(process.cpu_times()[:2]) for process in processes]
            spent_s = [after - before for before, after in zip(before_s, after_s, strict=True)]
            assert max(spent_s) < REST_S / 5, "a thread spins"

        asyncio.run(main())
