"""Two nodes of which the second looks n-grams up in files: what it is told of prompts, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult
from shardnet.cluster.member import kv_orders
from shardnet.cluster.node.node import listening
from shardnet.cluster.peers.control_link import ControlLink, ControlRequest, OnAnswer
from shardnet.sampling_params import SamplingParams
from shardnet.stage import file_table
from shardnet.stage.file_table import FileTable
from shardnet.stage.streaming.buffers import FilePart
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Capability, Hello
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.stages import ReadAhead

PROMPT = random_prompt(600, 90, seed=2)
N_CHUNKS = 3
WAIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The third of its four layers looks n-grams up."""
    sizes: dict[str, Any] = {"ple_layer_ids": [3], "ngram_vocab_size_base": 3000}
    sizes |= {"max_position_embeddings": 1024}
    folder = tmp_path_factory.mktemp("tables")
    return make_decoder(folder, "qwen4_exp_text", **CASES["qwen4_exp_text"] | sizes)


@asynccontextmanager
async def ring(folder: Path, model: Path) -> AsyncIterator[tuple[Client, ModelChoice]]:
    anna = small_settings(folder / "anna")
    bert = replace(small_settings(folder / "bert"), node=NodeId("b" * 32), name="bert")
    async with (
        listening(anna, "127.0.0.1", 0) as head,
        listening(bert, "127.0.0.1", 0) as other,
        connect(head.address) as client,
    ):
        addresses = [head.address, other.address]
        yield (
            client,
            ModelChoice(model=str(model), nodes=addresses, layers=[(0, 2), (2, 4)], context=1024),
        )


async def said(
    client: Client, choice: ModelChoice, prompt: Sequence[int], max_tokens: int = 1
) -> GenerationResult:
    [result] = await client.complete(
        [*prompt], SamplingParams(), model=choice, max_tokens=max_tokens
    )
    return result


class Watched:
    """What the second node is sent, asks its disk for because of that, and reads for steps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: list[ReadAhead] = []
        self.asked: list[tuple[str, int]] = []
        self.read: set[tuple[str, int]] = set()
        self.ended: list[str] = []
        self.has_ended = threading.Event()
        self.may_ask = threading.Event()
        self.may_ask.set()
        self.must_wait = False
        """Whether no step reads before all that was asked for ahead."""
        begin, carry_out, fill = ControlLink.begin, kv_orders.read_ahead, file_table._fill_rows

        def begun(control: ControlLink, message: ControlRequest, on_answer: OnAnswer) -> int:
            if isinstance(message, ReadAhead):
                self.sent.append(message)
            return begin(control, message, on_answer)

        async def carried_out(*order: Any) -> Done:
            how = "failed"
            try:
                done = await carry_out(*order)
                how = "done"
                return done
            except asyncio.CancelledError:
                how = "cancelled"
                raise
            finally:
                self.ended.append(how)
                self.has_ended.set()

        def ask(part: FilePart, rows: Sequence[int], row_bytes: int) -> None:
            self.asked += [(str(part.path), part.offset + row * row_bytes) for row in rows]
            assert self.may_ask.wait(WAIT_S)

        def filled(
            part: FilePart, rows: Sequence[int], raw: torch.Tensor, places: Sequence[int]
        ) -> None:
            if self.must_wait:
                assert self.has_ended.wait(WAIT_S)
            self.read |= {(str(part.path), part.offset + row * raw.shape[1]) for row in rows}
            fill(part, rows, raw, places)

        patch.setattr(ControlLink, "begin", begun)
        patch.setattr(kv_orders, "read_ahead", carried_out)
        patch.setattr(file_table, "_ask_for_rows", ask)
        patch.setattr(file_table, "_fill_rows", filled)
        patch.setattr(FileTable, "read_ahead", lambda table, ids: None)  # of steps that wait


@pytest.mark.usefixtures("unmeasured")
def test_a_stage_reads_for_the_whole_prompt_before_it_gets_there_and_then_for_what_is_new(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    watched.must_wait = True

    async def main() -> None:
        async with ring(tmp_path, model) as (client, choice):
            await said(client, choice, PROMPT)
            assert [each.token_ids for each in watched.sent] == [tuple(PROMPT)]
            assert watched.ended == ["done"], "the first node has no such table"
            assert {*watched.asked} == watched.read
            assert len(watched.asked) == len(watched.read) > 1000
            watched.has_ended.clear()
            longer = [*PROMPT, *random_prompt(40, 90, seed=3)]
            answer = await said(client, choice, longer)
            assert answer.usage.n_reused > 256
            [_, again] = watched.sent
            assert again.token_ids == tuple(longer[answer.usage.n_reused - 2 :])
            assert watched.read <= {*watched.asked}

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
def test_a_node_of_a_release_that_does_not_know_it_is_not_told_and_says_the_same(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, lacking = Watched(monkeypatch), Hello.lacking
    berts: list[Capability] = []

    def lacks(peer: Hello, *needed: Capability) -> list[Capability]:
        return [*needed] if peer.name == "bert" and berts == [*needed] else lacking(peer, *needed)

    monkeypatch.setattr(Hello, "lacking", lacks)

    async def main() -> GenerationResult:
        async with ring(tmp_path, model) as (client, choice):
            return await said(client, choice, PROMPT, max_tokens=8)

    told = asyncio.run(main())
    assert len(watched.sent) == 1
    berts.append(Capability.READ_AHEAD)
    assert asyncio.run(main()).token_ids == told.token_ids
    assert len(watched.sent) == 1


@pytest.mark.usefixtures("unmeasured")
def test_what_a_request_that_has_ended_would_look_up_is_not_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    watched.may_ask.clear()

    async def main() -> None:
        async with ring(tmp_path, model) as (client, choice):
            await said(client, choice, PROMPT)
            assert await asyncio.to_thread(watched.has_ended.wait, WAIT_S)
            watched.may_ask.set()
            watched.has_ended.clear()
            n_before = len(watched.sent)
            await said(client, choice, PROMPT[:20])
            assert len(watched.sent) == n_before + 1

    asyncio.run(main())
    assert watched.ended[0] == "cancelled"
    assert len({*watched.asked} & watched.read) < len(watched.read) * 2 // N_CHUNKS
