"""A member that asks for absurd things is answered by name, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from support.cluster.small_node import small_settings
from support.hostile.extremes import extremes, plain
from support.soak import is_soak
from support.strategies.wire_strategies import encoded, hello

from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.cluster.node.node import running
from shardnet.cluster.peers.control_link import ControlLink, ControlRequest, Incoming, Notice
from shardnet.errors import RemoteProtocolError, ShardnetError
from shardnet.runtime.loading.model_facts import ModelFacts, identify
from shardnet.transport.memory import memory_pair
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.activity import ClockRead, RingActivity
from shardnet.wire.messages.control import ControlMessage, Done, Redirect, read_control
from shardnet.wire.messages.deputies import AnswerFound, NodeFound, ValueFound, ValuesListed
from shardnet.wire.messages.generation import Cancel, Finished, LastRun, TextPiece
from shardnet.wire.messages.household import HouseholdListed, RunnerOpened
from shardnet.wire.messages.measurements import LinksMeasured, StageMeasured
from shardnet.wire.messages.membership import KeyTaken, ModelIdentity, Ping, StatusReply
from shardnet.wire.messages.plans import PlanReply
from shardnet.wire.messages.stages import Drain, StageReady
from shardnet.wire.messages.updates import Rearranged, UpdateDescribed

NOWHERE = "/nowhere/model"
ANSWER_S = 30.0
LAST = (
    HouseholdListed,
    RunnerOpened,
    *(ClockRead, Done, Redirect, Finished, LastRun, RingActivity, LinksMeasured, StageMeasured),
    AnswerFound,
    KeyTaken,
    ModelIdentity,
    NodeFound,
    Rearranged,
    StatusReply,
    UpdateDescribed,
    ValueFound,
    ValuesListed,
)
SLOW = {
    *(f"LoadStage.form.{name}" for name in ("model", "quant", "kv_dtype", "dtype", "gather_dtype")),
    "LoadStage.n_streamed",
    *(f"Generate.choice.{name}" for name in ("model", "quant", "kv_dtype", "context")),
    "Generate.choice.stream_layers",
    "Generate.deterministic",
    *(f"{name}.choice.model" for name in ("Tokenize.generate", "Detokenize", "DescribeTokenizer")),
}
"""What has the model loaded again, or looked for on the Hub, which other tests do."""
ENDS_THE_LINK = {"PeersKnown.peers[].addresses", "PeersKnown.peers[].addresses[]"}
"""A notice has no answer: an address that is none ends the link, by name."""

Meta = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a node list no models but its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return identify(DEFAULT_MODEL_PATH)


@asynccontextmanager
async def member(folder: Path) -> AsyncIterator[ControlLink]:
    """A member's link to a node, which serves it as it serves every peer."""

    async def refuse(control: ControlLink, message: Incoming) -> None:
        raise RemoteProtocolError("a member is not asked")

    async def until_it_ends(control: ControlLink) -> None:
        with pytest.raises(ShardnetError):
            await control.serve()

    async with running(small_settings(folder)) as node, asyncio.TaskGroup() as tasks:
        near, far = await memory_pair(hello("evil"), hello("anna"))
        control = ControlLink(near, refuse)
        tasks.create_task(until_it_ends(ControlLink(far, node.handlers.handle)))
        tasks.create_task(until_it_ends(control))
        yield control
        await near.close()


async def outcome(control: ControlLink, message: ControlRequest) -> str:
    """How a request ends: the name of its last answer, or of its error. Fails for a bug of ours."""
    ends = (*LAST, StageReady, TextPiece)
    if type(message).__name__ != "Generate":
        ends = (*ends, PlanReply)
    try:
        async with asyncio.timeout(ANSWER_S), control.conversation(message) as answers:
            async for answer in answers:
                if isinstance(answer, TextPiece):  # it would go on to the end of its context
                    control.send(Cancel(request=answer.request))
                if isinstance(answer, ends):
                    return type(answer).__name__
    except TimeoutError:
        failure = ShardnetError(f"no answer within {ANSWER_S} s")
    except ShardnetError as error:
        failure = error
    assert control.ended is None, f"{message} ended the link: {failure}"
    assert type(failure) is not ShardnetError, f"{str(message)[:300]}: {failure}"
    assert "internal error" not in str(failure), f"{str(message)[:300]}: {failure}"
    return type(failure).__name__


def choosing(model: str) -> dict[str, Meta]:
    """What asks for a tokenizer, with a model that is not looked for on the Hub."""
    choice = {"model": model}
    return {
        "Tokenize": {"generate": plain_of("Generate") | {"choice": choice}},
        "Detokenize": {"choice": choice},
        "DescribeTokenizer": {"choice": choice},
    }


def orders(bases: dict[str, Meta], first: int) -> Iterator[ControlMessage]:
    """Every message that a node may receive with every field at its extremes.

    The suite sends every eighth one from `first` on: a node with a model gets others than one
    without.
    """
    for kind in get_args(Incoming):
        if kind is Drain:  # the first one that is carried out ends the node
            continue
        base = bases.get(kind.__name__, {})
        for number, case in enumerate(extremes(kind, base)):
            if number % 8 != first and not is_soak():
                continue
            if case.is_within and case.path not in SLOW | ENDS_THE_LINK:
                meta = encoded(case.meta)
                # A link's queue is bounded.
                most = 10_000 if kind.__name__ == "Generate" else 8 << 20
                if len(meta) < most:
                    yield read_control(Frame(kind=FrameKind.CONTROL, meta=meta))


async def give_all(control: ControlLink, messages: Iterator[ControlMessage]) -> dict[str, set[str]]:
    """Send every message, and a ping after each. Returns the outcomes by type."""
    outcomes: dict[str, set[str]] = {}
    for message in messages:
        if isinstance(message, get_args(Notice)):
            control.send(message)
        else:
            how = await outcome(control, message)  # type: ignore[arg-type]
            outcomes.setdefault(type(message).__name__, set()).add(how)
        await control.ask(Ping(request=0), Done)
    return outcomes


def test_every_field_at_its_extremes_without_a_model(tmp_path: Path) -> None:
    choice = {"model": NOWHERE}
    bases: dict[str, Meta] = {
        **choosing(NOWHERE),
        "PlanRequest": {"choice": choice},
        "Generate": {"choice": choice},
        "LoadStage": {"form": form(NOWHERE)},
        "IdentifyModel": {"model": NOWHERE},
        "ReportRequest": {"model": NOWHERE},
    }

    async def main() -> None:
        async with member(tmp_path) as control:
            outcomes = await give_all(control, orders(bases, 0))
            asked = {kind.__name__ for kind in get_args(ControlRequest) if kind is not Drain}
            assert outcomes.keys() == asked

    asyncio.run(main())


def test_every_field_at_its_extremes_with_a_model_loaded(tmp_path: Path, facts: ModelFacts) -> None:
    n_layers = facts.config.n_layers
    load = last_layers(facts)
    generate = {"choice": {"model": DEFAULT_MODEL_NAME}, "token_ids": [1, 2], "max_tokens": 1}
    bases: dict[str, Meta] = {
        **choosing(NOWHERE),
        "PlanRequest": {"choice": {"model": NOWHERE}},
        "Generate": generate,
        "LoadStage": load,
        "ConnectRing": {"ring": "r", "epoch": 1},
        "UnloadStage": {"ring": "other"},
        "IdentifyModel": {"model": str(DEFAULT_MODEL_PATH)},
        "ReportRequest": {"model": str(DEFAULT_MODEL_PATH)},
    }
    wrong: list[Meta] = [
        {"layers": [0, n_layers], "rank": 0},
        {"layers": [1, n_layers + 1]},
        {"layers": [0, 1]},
        {"layers": [2, 1]},
        {"layers": [1, n_layers], "addresses": ["a:1"]},
        {"layers": [1, n_layers], "rank": 2, "n_stages": 2, "addresses": ["a:1", "b:1"]},
        {"form": load["form"] | {"context": 2**24}},
        {"form": load["form"] | {"context": 0}},
        {"threads": 4096},
        {"n_streamed": 10_000},
        {"ring": ""},
        {"form": form()},
        {"form": form(NOWHERE), "sources": ["a" * 100 + ":1", "²:²"]},
        {"form": form("/" + "x" * 4000)},
    ]

    async def main() -> None:
        async with member(tmp_path) as control:
            for changes in wrong:
                order = read({**plain_of("LoadStage"), **load, **changes})
                assert await outcome(control, order) not in ("StageReady", "TimeoutError"), changes
            ready = read({**plain_of("LoadStage"), **load})
            assert await outcome(control, ready) == "StageReady"
            connect = read({**plain_of("ConnectRing"), "ring": "r", "epoch": 1})
            await outcome(control, connect)
            assert await outcome(control, connect) == "UsageError", "a ring is connected once"
            outcomes = await give_all(control, orders(bases, 2))
            assert "StageReady" in outcomes["LoadStage"]
            assert "TextPiece" in outcomes["Generate"]

    asyncio.run(main())


def last_layers(facts: ModelFacts) -> Meta:
    """The order for the last stage of a ring of two with the bundled model."""
    return {
        "ring": "r",
        "epoch": 1,
        "rank": 1,
        "n_stages": 2,
        "addresses": ["127.0.0.1:9", "127.0.0.1:9"],
        "layers": [1, facts.config.n_layers],
        "wire_dtype": "float32",
        "received_dtype": "float32",
        "threads": 1,
        "form": form(DEFAULT_MODEL_NAME, facts.model_id),
    }


def form(model: str = DEFAULT_MODEL_NAME, model_id: str = "0" * 64) -> Meta:
    """What a ring computes with; no node has the model without another id."""
    return {"model": model, "model_id": model_id, "dtype": "float32", "context": 64}


def plain_of(name: str) -> Meta:
    kind = next(kind for kind in get_args(ControlRequest) if kind.__name__ == name)
    made: Meta = plain(kind)
    return made


def read(meta: Meta) -> Any:
    return read_control(Frame(kind=FrameKind.CONTROL, meta=encoded(meta)))


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
    "decoder_sparse_step": 1,
}
ABSURD: list[Meta] = [
    MOE | {"num_experts": 32767, "num_hidden_layers": 10_000},
    MOE | {"num_experts": 2, "num_hidden_layers": 10_000, "mlp_only_layers": [9999] * 140_000},
    {"hidden_size": 2**31 - 1, "head_dim": 64},
    {"num_attention_heads": 2**31 - 1, "num_key_value_heads": 2**31 - 1, "head_dim": 2},
    {"intermediate_size": 2**31 - 1},
    {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}},
    {"layer_types": ["full_attention"] * 30_000},
]


def test_an_absurd_config_is_not_measured(tmp_path: Path, facts: ModelFacts) -> None:
    config = json.loads(facts.config_text)

    async def main() -> None:
        async with member(tmp_path) as control:
            texts = [json.dumps(config | absurd) for absurd in ABSURD]
            texts += ["", "[]", "[" * 100_000, "{" + '"a":[' * 50_000, "9" * 100_000]
            for text in texts:
                order = {"config": text, "dtype": "float32", "threads": 1}
                got = await outcome(control, read({**plain_of("MeasureStage"), **order}))
                assert got in ("CheckpointError", "UnsupportedModelError", "CapacityError"), text
            many = {"config": json.dumps(config), "dtype": "float32", "threads": 4096}
            assert (
                await outcome(control, read({**plain_of("MeasureStage"), **many})) == "UsageError"
            )

    asyncio.run(main())
