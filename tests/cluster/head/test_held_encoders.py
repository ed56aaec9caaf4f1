"""Encoders of a node: in what memory they are, who is asked where they are not, when they go."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from runtime.encoding.test_decoders import (
    DOCUMENTS,
    QUERY,
    judged,
    make_embedder,
    make_reranker,
)
from support.models.checkpoints import make_llama
from support.models.encoder_checkpoints import add_modules, make_encoder

from shardnet.cluster.head import encoders, held_encoder
from shardnet.cluster.head.encoders import MAX_REQUESTS, Encoders
from shardnet.cluster.peers.control_link import RedirectedError
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    CapacityError,
    CheckpointError,
    DeadlineError,
    PeerFailedError,
    QueueFullError,
    UsageError,
)
from shardnet.model.families import encoders as families
from shardnet.runtime.encoding import encoder
from shardnet.runtime.encoding.encoder_facts import find_encoder
from shardnet.runtime.encoding.judge import INSTRUCTION
from shardnet.stage.stage_model import StageModel
from shardnet.types import NodeId
from shardnet.wire.messages.control import ControlMessage
from shardnet.wire.messages.generation import MAX_ENCODED_WIDTH, Encode, Encoded


@dataclass(slots=True, kw_only=True)
class Lab:
    """A node's encoders, with `room_bytes` of memory, and what they are told by its other parts."""

    room_bytes: int = 1 << 40
    ring: str = "of/the-ring"
    holders: dict[str, str] = field(default_factory=dict)
    provided: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[ControlMessage] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    orders: Any = None
    encoders: Encoders = field(init=False)

    async def resolve(self, model: str, in_use: object) -> str:
        await self.gate.wait()
        return model

    async def holder(self, model: str) -> NodeId | None:
        found = self.holders.get(model)
        return NodeId(found) if found else None

    async def provide(self, model: str, on_progress: object, tokenizer_for: str) -> None:
        self.provided.append(model)

    async def ask(self, model: Path | str, *texts: str, **more: Any) -> Any:
        message = Encode(request=1, model=str(model), texts=list(texts), **more)
        await self.encoders.encode(cast("Any", self), message)
        return self.sent[-1]

    def send(self, message: ControlMessage) -> None:
        self.sent.append(message)


@asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    made, disk = Lab(), DiskJobs("test-disk")
    made.gate.set()
    made.orders = SimpleNamespace(
        encoder_bytes=0,
        free_bytes=lambda: made.room_bytes - made.orders.encoder_bytes,
        threads_of=lambda place: 1,
        device=SimpleNamespace(for_torch="cpu"),
    )
    parts = {"lists": made, "planner": made, "orders": made.orders}
    made.encoders = Encoders(
        own_info=lambda: cast("Any", None),
        ring_model=lambda: made.ring,
        **cast("Any", parts),
        disk=disk,
        address_of=lambda node: f"{node}:7433",
        log=made.log.append,
    )
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.encoders.close()
        disk.close()


def needed_bytes(folder: Path) -> int:
    facts = find_encoder(folder)
    assert facts is not None
    return facts.needed_bytes


def test_idle_encoders_make_room_and_files_that_change_are_read_again(tmp_path: Path) -> None:
    first = make_encoder(tmp_path / "first", "BertModel")
    second = make_encoder(tmp_path / "second", "BertModel", num_hidden_layers=3)

    async def main() -> None:
        async with lab() as here:
            here.room_bytes = needed_bytes(second)
            answer: Encoded = await here.ask(first, "a letter", "she")
            width = 32
            assert (answer.kind, answer.context, answer.width) == ("embedding", 48, width)
            assert answer.n_tokens == [4, 3]
            assert (await here.ask(first)).width == width
            assert here.orders.encoder_bytes == needed_bytes(first)
            await here.ask(second, "a")
            assert here.orders.encoder_bytes == needed_bytes(second)
            assert here.log[-2] == f"freed the encoder {first}"
            make_encoder(second, "BertModel", num_hidden_layers=1)
            again: Encoded = await here.ask(second, "a", pooling="cls")
            assert np.frombuffer(again.values, "<f4").shape == (width,)
            assert here.orders.encoder_bytes == needed_bytes(second)
            here.encoders.free_idle(time.monotonic())
            assert here.orders.encoder_bytes > 0
            here.encoders.free_idle()
            assert here.orders.encoder_bytes == 0
            await here.ask(second, "a")
            here.room_bytes = needed_bytes(first) - 1
            with pytest.raises(CapacityError, match="free the model of the ring"):
                await here.ask(first, "a")
            assert here.orders.encoder_bytes == needed_bytes(second), "freed for nothing"

    asyncio.run(main())


def held_back(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> tuple[threading.Event, threading.Event]:
    """Have calls of a method wait for the second event, once they have set the first."""
    begun, go_on, real = threading.Event(), threading.Event(), getattr(owner, name)

    def late(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(owner, name, late)
    return begun, go_on


def test_files_that_change_under_a_request_and_memory_that_is_wanted_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    begun, go_on = held_back(monkeypatch, held_encoder.HeldEncoder, "inputs")

    async def main() -> None:
        async with lab() as here:
            loaded = asyncio.Event()

            def log(line: str) -> None:
                if line.startswith("loaded"):
                    here.encoders.free_idle() if not here.log else loaded.set()
                here.log.append(line)

            here.encoders.log = log
            first = asyncio.create_task(here.ask(folder, "a"))
            await loaded.wait()  # again: it was freed before it was used
            await asyncio.to_thread(begun.wait, 30)
            old_bytes = needed_bytes(folder)
            assert here.orders.encoder_bytes == old_bytes
            make_encoder(folder, "BertModel", num_hidden_layers=3)
            loaded.clear()
            second = asyncio.create_task(here.ask(folder, "a"))
            await loaded.wait()
            assert here.orders.encoder_bytes == old_bytes + needed_bytes(folder)
            go_on.set()
            assert (await first).n_tokens == (await second).n_tokens == [3]
            assert here.orders.encoder_bytes == needed_bytes(folder)

    asyncio.run(main())


def test_an_encoder_that_is_loaded_does_not_wait_for_one_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_encoder(tmp_path / "first", "BertModel")
    second, go_on = make_encoder(tmp_path / "second", "BertModel"), threading.Event()
    begun, load = threading.Event(), encoder.load_encoder

    def load_late(*arguments: Any) -> encoder.Encoder:
        begun.set()
        assert go_on.wait(30)
        return load(*arguments)

    async def main() -> None:
        async with lab() as here:
            await here.ask(first, "a")
            monkeypatch.setattr(encoder, "load_encoder", load_late)
            asked = asyncio.create_task(here.ask(second, "a"))
            await asyncio.to_thread(begun.wait, 30)
            with pytest.raises(UsageError, match="text number 1 is empty"):
                await here.ask(first, "", special_tokens=False)
            go_on.set()
            await asked

    asyncio.run(main())


def test_an_encoder_that_is_used_all_the_time_keeps_no_other_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_encoder(tmp_path / "first", "BertModel")
    second = make_encoder(tmp_path / "second", "BertModel")
    monkeypatch.setattr(encoders, "IDLE_S", 0.2)

    async def main() -> None:
        async with lab() as here:
            await here.ask(first, "a")
            while f"freed the encoder {first}" not in here.log:
                await here.ask(second, "a")
            assert f"freed the encoder {second}" not in here.log

    asyncio.run(main())


def test_an_encoder_is_kept_as_long_as_its_last_request_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_encoder(tmp_path / "first", "BertModel")
    second = make_encoder(tmp_path / "second", "BertModel")
    monkeypatch.setattr(encoders, "IDLE_S", 0.1)

    async def main() -> None:
        async with lab() as here:
            await here.ask(first, "a", keep_s=1e9)
            await here.ask(second, "a")
            while f"freed the encoder {second}" not in here.log:
                await here.ask(first)  # as it is asked before texts are sent
            assert f"freed the encoder {first}" not in here.log
            await here.ask(first, keep_s=0.0)
            while f"freed the encoder {first}" not in here.log:
                await here.ask(second, "a", keep_s=1e9)
            monkeypatch.setattr(encoders, "IDLE_S", 1e9)
            await here.ask(second, "a", keep_s=0.0)
            while here.log.count(f"freed the encoder {second}") < 2:
                await here.ask(first)

    asyncio.run(main())


def test_an_encoder_that_loads_for_longer_than_a_request_waits_is_there_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, go_on, n_loads = make_encoder(tmp_path / "model", "BertModel"), threading.Event(), 0
    load = encoder.load_encoder

    def load_late(*arguments: Any) -> encoder.Encoder:
        nonlocal n_loads
        n_loads += 1
        assert go_on.wait(30)
        return load(*arguments)

    monkeypatch.setattr(encoder, "load_encoder", load_late)

    async def main() -> None:
        async with lab() as here:
            monkeypatch.setattr(held_encoder, "JOB_S", 0.1)
            with pytest.raises(DeadlineError):
                await here.ask(folder, "a")
            assert here.orders.encoder_bytes == needed_bytes(folder), "what loads takes memory"
            monkeypatch.setattr(held_encoder, "JOB_S", 30.0)
            asked = [asyncio.create_task(here.ask(folder, "a")) for _ in range(2)]
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(*asked)
            assert n_loads == 1
            assert here.orders.encoder_bytes == needed_bytes(folder)

    asyncio.run(main())


def test_texts_are_read_while_others_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(tmp_path, "BertModel")
    begun, go_on = held_back(monkeypatch, encoder.Encoder, "forward")

    async def main() -> None:
        async with lab() as here:
            first = asyncio.create_task(here.ask(folder, "a"))
            await asyncio.to_thread(begun.wait, 30)
            with pytest.raises(UsageError, match="text number 3 is empty"):
                await here.ask(folder, "a", "she", "", special_tokens=False)
            go_on.set()
            assert (await first).n_tokens == [3]

    asyncio.run(main())


def test_a_long_text_that_nobody_waits_for_ends_after_its_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, go_on = make_embedder(tmp_path / "model"), threading.Event()
    begun, run, stages = threading.Event(), StageModel.run, list[StageModel]()

    def run_late(stage: StageModel, *arguments: Any) -> Any:
        stages.append(stage)
        begun.set()
        assert go_on.wait(30)
        return run(stage, *arguments)

    monkeypatch.setattr(StageModel, "run", run_late)

    async def main() -> None:
        async with lab() as here:
            asked = asyncio.create_task(here.ask(folder, "a fortune " * 900, truncate=True))
            await asyncio.to_thread(begun.wait, 30)
            asked.cancel()
            await asyncio.wait([asked])
            go_on.set()
            await here.encoders._thread.executor.run(lambda: None)
            assert len(stages) == 1
            assert stages[0].kv.blocks_used == 0
            assert (await here.ask(folder, "a")).n_tokens == [2]

    asyncio.run(main())


def test_a_job_may_take_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_encoder, "JOB_S", 1.0)
    held_up = threading.Event()

    def go_on(step: Callable[[], None]) -> None:
        for _ in range(15):
            step()
            held_up.wait(0.1)

    def hang(step: Callable[[], None]) -> None:
        held_up.wait(30)

    async def main() -> None:
        thread = held_encoder.EncoderThread("test-encode")
        try:
            await asyncio.gather(thread.run(go_on), thread.run(lambda step: None))
            with pytest.raises(DeadlineError, match="done nothing for 1 s"):
                await thread.run(hang)
        finally:
            held_up.set()
            thread.executor.close()

    asyncio.run(main())


def test_a_request_whose_node_leaves_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, go_on = make_encoder(tmp_path, "BertModel"), threading.Event()
    begun, inputs = threading.Event(), held_encoder.HeldEncoder.inputs

    def inputs_late(*arguments: Any) -> Any:
        made = inputs(*arguments)
        begun.set()
        assert go_on.wait(30)
        return made

    monkeypatch.setattr(held_encoder.HeldEncoder, "inputs", inputs_late)

    async def main() -> None:
        async with lab() as here:
            asked = asyncio.create_task(here.ask(folder, "a"))
            await asyncio.to_thread(begun.wait, 30)
            await here.encoders.close()
            go_on.set()
            with pytest.raises(PeerFailedError, match="is leaving"):
                await asked

    asyncio.run(main())


def test_a_node_that_ends_does_not_wait_for_an_encoder_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, begun, go_on = make_encoder(tmp_path, "BertModel"), threading.Event(), threading.Event()
    load = encoder.load_encoder

    def load_late(*arguments: Any) -> encoder.Encoder:
        begun.set()
        go_on.wait(20)
        return load(*arguments)

    monkeypatch.setattr(encoder, "load_encoder", load_late)

    async def main() -> None:
        async with lab() as here:
            asked = asyncio.create_task(here.ask(folder, "a"))
            await asyncio.to_thread(begun.wait, 20)
            async with asyncio.timeout(10):
                await here.encoders.close()
                asked.cancel()
                await asyncio.wait([asked])
            go_on.set()
            await asyncio.to_thread(here.encoders._thread.executor.join)
            await asyncio.sleep(0)  # what it has loaded comes to nothing
            assert here.log == []

    asyncio.run(main())


def test_a_decoder_is_ours_where_it_fits_and_else_the_rings(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model")
    says = {"prompts": {"query": "a fortune "}, "default_prompt_name": "query"}

    async def main() -> None:
        async with lab() as here:
            here.room_bytes = needed_bytes(folder) - 1
            assert (await here.ask(folder, "a")).kind == ""
            here.room_bytes += 1
            answer: Encoded = await here.ask(folder, "in", "a fortune in")
            assert (answer.kind, answer.context, answer.width) == ("embedding", 1024, 64)
            assert here.orders.encoder_bytes == needed_bytes(folder)
            assert "as stored)" in here.log[-1]
            (folder / "config_sentence_transformers.json").write_text(json.dumps(says))
            prompted: Encoded = await here.ask(folder, "in")
            assert prompted.values == answer.values[len(prompted.values) :]
            too_long = await here.ask(folder, "a fortune " * 900, truncate=True)
            assert too_long.n_tokens == [1024]
            add_modules(folder, "mean_tokens")  # a ring gives the last token's
            here.room_bytes -= 1
            with pytest.raises(CapacityError, match="this node has"):
                await here.ask(folder, "a")

    asyncio.run(main())


def test_a_decoder_judges_documents_as_it_is_told(tmp_path: Path) -> None:
    folder = make_reranker(tmp_path / "model")

    async def main() -> None:
        async with lab() as here:
            for instruction in ("", "be strict"):
                more = {"query": QUERY, "instruction": instruction, "truncate": True}
                answer: Encoded = await here.ask(folder, *DOCUMENTS, **more)
                assert (answer.kind, answer.width, answer.context) == ("reranker", 1, 1024)
                expected = judged(folder, instruction or INSTRUCTION, 1024)
                found = np.frombuffer(answer.values, "<f4")
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
            with pytest.raises(UsageError, match="takes a query and documents to rank"):
                await here.ask(folder, "a")
            here.ring = str(folder)  # which knows nothing of those tokens
            assert (await here.ask(folder, "a", query=QUERY)).kind == "reranker"
            here.ring = str(make_embedder(tmp_path / "embedder"))
            assert (await here.ask(here.ring, "a")).kind == ""

    asyncio.run(main())


def test_models_that_are_elsewhere_or_no_encoders(tmp_path: Path) -> None:
    causal = make_llama(tmp_path / "causal")

    async def main() -> None:
        async with lab() as here:
            here.holders["org/theirs"] = "bert"
            with pytest.raises(RedirectedError, match="bert:7433"):
                await here.ask("org/theirs", "a")
            for name in (causal, "of/the-ring"):
                assert (await here.ask(name, "a")).kind == ""
            with pytest.raises(CheckpointError, match="org/nobodys is not on this node"):
                await here.ask("org/nobodys", "a")
            assert here.provided == ["org/nobodys"]

    asyncio.run(main())


def test_requests_are_bounded_and_those_that_mean_nothing_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertForSequenceClassification")
    bare = make_encoder(tmp_path / "bare", "BertModel")
    (bare / "tokenizer.json").unlink()

    async def main() -> None:
        async with lab() as here:
            message = Encode(request=1, model=str(folder), texts=[[1, 2]], query="a")
            with pytest.raises(UsageError, match="a document to rank is a text"):
                await here.encoders.encode(cast("Any", here), message)
            with pytest.raises(UsageError, match="text number 8 is empty"):
                await here.ask(folder, "", query="", special_tokens=False, first=7)
            with pytest.raises(CheckpointError, match="has no tokenizer"):
                await here.ask(bare, "a")
            here.gate.clear()
            waiting = [asyncio.create_task(here.ask(folder)) for _ in range(MAX_REQUESTS)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="64 requests to encoders wait"):
                await here.ask(folder)
            here.gate.set()
            described = await asyncio.gather(*waiting)
            assert {one.kind for one in described} == {"reranker"}

    asyncio.run(main())


def test_the_widest_vector_travels() -> None:
    assert families.MAX_VECTOR == MAX_ENCODED_WIDTH
