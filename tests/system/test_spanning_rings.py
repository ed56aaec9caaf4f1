"""Stages that span two nodes do what one node's stage does, and say the same to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.models.checkpoints import make_decoder
from support.system.nodes import Machine, NodeProcess, open_machine

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult
from shardnet.cluster.machine.folders import PACKS_FOLDER
from shardnet.model.kernels.library import native_kernels
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

IS_DETERMINISTIC = native_kernels() is None
N_TOKENS = 40
PROMPT = [*range(5, 40), *range(5, 30)]
SAMPLED = SamplingParams(temperature=0.8, seed=7, n_logprobs=2, repetition_penalty=1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two nodes on one machine, of which the first leads."""

    machine: Machine
    nodes: list[NodeProcess]

    def choices(self, folder: Path, **more: Any) -> tuple[ModelChoice, ModelChoice]:
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

    def packed() -> set[tuple[Path, int]]:
        return {(file, file.stat().st_mtime_ns) for file in packs.rglob("*.packed")}

    async def main() -> None:
        async with pair.client() as client:
            plain = words(await say(client, alone))
            whole = packed()
            assert words(await say(client, both)) == plain
            parts = packed()
            assert len({file.parent for file, _ in parts - whole}) == 2, "one for each part"
            assert words(await say(client, alone)) == plain
            assert words(await say(client, both)) == plain
            assert packed() == parts, "what was cached was made again"
            for file, _ in parts - whole:
                file.unlink()
            assert words(await say(client, replace(both, context=256))) == plain
            assert packed() == whole, "linears that were here were made again"

    asyncio.run(main())
