"""Rings whose requests have pictures: other splits, lost nodes, the deputy of a head."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.models.checkpoints import make_decoder
from support.models.gguf_files import write_gguf
from support.models.model_stores import put_in_ollama
from support.models.pictured_model import make_pictured, png
from support.models.projector_files import Kind, write_mmproj
from support.models.trained_tokenizers import LLAMA3, gguf_ranks
from support.models.vision_checkpoints import CASES
from support.servers.proxy import slow_link
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import Client, connect
from shardnet.api.events import RequestState
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

N_TOKENS = 28
SAID: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a "},
            {"type": "image", "image": png(37, 53)},
            {"type": "text", "text": " and "},
            {"type": "image", "image": png(60, 60, seed=1)},
        ],
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictured(tmp_path_factory.mktemp("pictured"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the kind of Qwen2.5-VL as llama.cpp writes it: its text, and a projector."""
    folder = tmp_path_factory.mktemp("seeing")
    said = gguf_ranks(LLAMA3, "llama-bpe")
    said["tokenizer.ggml.tokens"] += ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    said["tokenizer.ggml.token_type"] += [3, 3, 3]
    n_tokens = len(said["tokenizer.ggml.tokens"])
    source = make_decoder(
        folder / "text", "qwen2", num_hidden_layers=2, vocab_size=n_tokens, with_tokenizer=False
    )
    sections = {"rope__dimension_sections": [2, 1, 1, 0]}
    model = folder / "eyes-Q8_0.gguf"
    write_gguf(source, model, architecture="qwen2vl", tokenizer=said, **sections)
    eyes = CASES["qwen2_5_vl"].make(folder / "whole")
    write_mmproj(eyes, folder / "mmproj-eyes-F16.gguf", Kind.F16)
    return model


async def say(
    client: Client,
    choice: ModelChoice,
    at_token: Callable[[int], None] = lambda n: None,
    **how: Any,
) -> tuple[list[int], list[str]]:
    """Generate greedily; return the tokens and the states that the request went through."""
    tokens: list[int] = []
    states: list[str] = []
    events = client.generate(
        SAID, SamplingParams(), model=choice, max_tokens=N_TOKENS, ignore_eos=True, **how
    )
    async for event in events:
        if event.error is not None:
            raise event.error
        if event.state.value not in states[-1:]:
            states.append(event.state.value)
        tokens += event.token_ids
        if event.token_ids:
            at_token(len(tokens))
    return tokens, states


@pytest.mark.parametrize("lost", ["tail", "head"])
def test_the_same_words_go_on_where_a_node_is_lost(
    machine: Machine, folder: Path, lost: str
) -> None:
    nodes = machine.start_nodes("anna", "bert")
    addresses = [node.address for node in nodes]
    victim: NodeProcess = nodes[lost == "tail"]

    def kill(n_tokens: int) -> None:
        if n_tokens == 12:
            victim.process.kill()

    async def main() -> None:
        key = {"key": "pictures"} if lost == "head" else {}
        async with connect(addresses[0]) as client:
            alone, _ = await say(
                client, ModelChoice(model=str(folder), nodes=addresses[:1], dtype="float32")
            )
            assert len(alone) == N_TOKENS
            with slow_link(nodes[1].ready["port"]) as to_bert:  # a busy client sees tokens late
                pair = ModelChoice(
                    model=str(folder),
                    nodes=[addresses[0], to_bert],
                    context=512,
                    dtype="float32",
                )
                undisturbed, _ = await say(client, pair)
                assert undisturbed == alone
                disturbed, states = await say(client, pair, kill, **key)
            assert disturbed == alone
            assert RequestState.RECOVERING.value in states

    asyncio.run(main())
    victim.kill()


def test_a_first_stage_that_spans_nodes_sees(machine: Machine, folder: Path) -> None:
    nodes = machine.start_nodes("anna", "bert")
    first = [nodes[0].address]
    alone = ModelChoice(model=str(folder), nodes=first, context=512, dtype="float32")
    both = replace(alone, nodes=[node.address for node in nodes], nodes_per_stage=2)

    async def main() -> None:
        async with connect(first[0]) as client:
            plain, _ = await say(client, alone)
            again, _ = await say(client, both)
            assert (again, len(plain)) == (plain, N_TOKENS)

    asyncio.run(main())


def test_stages_that_span_nodes_turn_rows_by_three_axes(
    machine: Machine, seeing: Path, tmp_path: Path
) -> None:
    """Of a kind whose rotary positions have three axes: time, line and column."""
    model, picture = seeing, tmp_path / "a.png"
    picture.write_bytes(png(60, 90))
    anna, bert = (node.address for node in machine.start_nodes("anna", "bert"))
    asked = ["the cat", "--model", str(model), "--image", str(picture), "--max-tokens", "12"]
    asked += ["--ignore-eos", "--context", "512", "--json"]

    def said(nodes: str, *more: str) -> Any:
        return machine.call("generate", *asked, "--nodes", nodes, *more).json["token_ids"]

    alone, cut = said(anna), said(f"{anna},{bert}", "--nodes-per-stage", "2")
    two = said(f"{anna},{bert}", "--layers", "0-1,1-2")
    assert (cut, two, len(alone)) == (alone, alone, 12)


def test_a_gguf_sees_by_the_projector_beside_it(
    machine: Machine, seeing: Path, tmp_path: Path
) -> None:
    """A raw prompt gets the marks that the makers' chat template writes around a picture."""
    for file in seeing.parent.glob("*.gguf"):
        shutil.copy(file, tmp_path)
    model, picture = tmp_path / seeing.name, tmp_path / "a.png"
    picture.write_bytes(png(37, 53))
    shared = ["--model", str(model), "--max-tokens", "5", "--ignore-eos", "--json"]

    def ask(prompt: str, *more: str) -> Any:
        return machine.call("generate", prompt, *shared, *more).json

    bos, *text = ask("the cat")["prompt_token_ids"]
    seen = ask("the cat", "--image", str(picture))
    marked = "<|vision_start|><|image_pad|><|vision_end|>the cat"
    n_rows = len(seen["prompt_token_ids"]) - len(text) - 3
    start = seen["prompt_token_ids"][1]
    ids = [bos, start, *[start + 1] * n_rows, start + 2, *text]
    assert (seen["prompt_token_ids"], n_rows > 1) == (ids, True)
    for prompt in (marked, "<|image_pad|>the cat"):
        assert ask(prompt, "--image", str(picture))["token_ids"] == seen["token_ids"]
    (tmp_path / "mmproj-eyes-F32.gguf").write_bytes(b"")
    refused = machine.call("generate", "the cat", *shared, "--image", str(picture))
    assert "has 2 projectors: mmproj-eyes-F16.gguf, mmproj-eyes-F32.gguf" in refused.error
    named = ["--image", str(picture), "--mmproj", str(tmp_path / "mmproj-eyes-F16.gguf")]
    assert ask("the cat", *named)["token_ids"] == seen["token_ids"]
    store = machine.folder / ".ollama" / "models"
    put_in_ollama(store, model, "eyes", projector=tmp_path / "mmproj-eyes-F16.gguf")
    shared[1] = "ollama:eyes"
    assert ask("the cat", "--image", str(picture))["token_ids"] == seen["token_ids"]
    nothing = machine.call("generate", "the cat", *shared, "--mmproj", str(tmp_path / "none.gguf"))
    assert f"{tmp_path / 'none.gguf'}: No such file" in nothing.error
