"""Encoders on a real node, over HTTP: equal to transformers, and refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import pytest
import torch
import transformers
from runtime.encoding.test_decoders import last_states, make_embedder
from support.models.encoder_checkpoints import add_modules, make_encoder, write_encoder_gguf
from support.system.nodes import Machine, NodeProcess

from shardnet.api.client import connect
from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening, Settings
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.commands.models import model_lines, models_json
from shardnet_cli.output.plan_text import plan_text

if TYPE_CHECKING:
    import openai

TOLERANCE = 1e-4
TEXTS = ["She read a letter.", "It rained", "what did she do in the north?", "a"]
QUERY = "what did she do"
LONG = "she read a letter " * 20


class Oracle:
    """transformers' own tokenizer and model of a folder."""

    def __init__(self, folder: Path, kind: Any) -> None:
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
        )
        names = ["input_ids", "attention_mask", "token_type_ids"]
        self.tokenizer.model_input_names = names if "Bert" in kind.__name__[:4] else names[:2]

    def vector(self, text: str) -> Any:
        """The first hidden state, of length 1."""
        given = self.tokenizer(text, truncation=True, max_length=48, return_tensors="pt")
        with torch.inference_mode():
            state = self.model(**given).last_hidden_state[0, 0].numpy()
        return state / np.linalg.norm(state)

    def logit(self, query: str, document: str) -> float:
        given = self.tokenizer(query, document, truncation=True, max_length=47, return_tensors="pt")
        with torch.inference_mode():
            return float(self.model(**given).logits[0, 0])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """An embedder by its first hidden state and a reranker, as GGUFs too, and a decoder."""
    folder = tmp_path / "models"
    add_modules(make_encoder(folder / "embedder", "BertModel"), "cls_token", normalizes=True)
    make_encoder(folder / "reranker", "XLMRobertaForSequenceClassification", type_vocab_size=1)
    make_embedder(folder / "decoder")
    write_encoder_gguf(folder / "embedder", folder / "vectors.gguf", pooling_type=2)
    write_encoder_gguf(folder / "reranker", folder / "scores.gguf", "F16", pooling_type=4)
    return folder


@asynccontextmanager
async def served(node: NodeProcess, model: Path) -> AsyncIterator[str]:
    listening = Listening(host="127.0.0.1", port=0, settings=Settings())
    async with asyncio.timeout(120), connect(node.address) as client:
        client.choice = ModelChoice(model=str(model))
        loaded: asyncio.Queue[Any] = asyncio.Queue()
        async with serving(client, listening, on_loaded=loaded.put_nowait) as url:
            assert await loaded.get() is None  # nothing is wrong with an encoder
            yield url


def test_vectors_and_rankings_are_those_of_transformers(machine: Machine, models: Path) -> None:
    [node] = machine.start_nodes("anna", arguments=["--model-folder", str(models)])
    embedder = Oracle(models / "embedder", transformers.BertModel)
    reranker = Oracle(models / "reranker", transformers.XLMRobertaForSequenceClassification)
    vectors = [embedder.vector(text) for text in TEXTS]

    import openai  # here: test_http_server says why

    async def main() -> None:
        async with (
            served(node, models / "embedder") as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
        ):
            asked = [client.embeddings.create(model="embedder", input=TEXTS) for _ in range(2)]
            for answer in await asyncio.gather(*asked):
                found = [one.embedding for one in answer.data]
                np.testing.assert_allclose(found, vectors, rtol=0, atol=TOLERANCE)
                n_tokens = sum(len(embedder.tokenizer(text).input_ids) for text in TEXTS)
                assert answer.usage.prompt_tokens == n_tokens
            await check_lengths(http, client, embedder)
            await check_ollama(http, embedder)
            for name in ("reranker", "scores"):
                await check_ranking(http, reranker, name)
            of_gguf = await client.embeddings.create(model="vectors", input=TEXTS)
            found = [one.embedding for one in of_gguf.data]
            np.testing.assert_allclose(found, vectors, rtol=0, atol=TOLERANCE)
            states = last_states(models / "decoder", TEXTS)
            of_decoder = await client.embeddings.create(model="decoder", input=TEXTS)
            found = [one.embedding for one in of_decoder.data]
            lengths = np.linalg.norm(states, axis=1, keepdims=True)
            np.testing.assert_allclose(found, states / lengths, rtol=0, atol=TOLERANCE)
            await check_refused(http, client)
        await check_lists(node, models)

    asyncio.run(main())


async def check_lengths(
    http: httpx2.AsyncClient, client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    """Many texts, fewer dimensions, another pooling, and one text that is too long."""
    many = [f"she read {'a ' * (n % 40)}" for n in range(70)]
    answer = await client.embeddings.create(model="embedder", input=many, dimensions=8)
    for text, one in zip(many, answer.data, strict=True):
        expected = oracle.vector(text)[:8]
        expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(one.embedding, expected, rtol=0, atol=TOLERANCE)
    ids = oracle.tokenizer(TEXTS[0]).input_ids
    body = {"model": "embedder", "input": ids, "pooling": "mean", "normalize": False}
    [one] = (await http.post("/v1/embeddings", json=body)).json()["data"]
    with torch.inference_mode():
        state = oracle.model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(one["embedding"], state, rtol=0, atol=TOLERANCE)
    texts = [*["a"] * 40, LONG]
    refused = await http.post("/v1/embeddings", json={"model": "embedder", "input": texts})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    body = {"model": "embedder", "input": texts, "truncate": True}
    last = (await http.post("/v1/embeddings", json=body)).json()["data"][-1]
    np.testing.assert_allclose(last["embedding"], oracle.vector(LONG), rtol=0, atol=TOLERANCE)
    assert "the request (82 tokens) exceeds the available context size (48" in error["message"]


async def check_ollama(http: httpx2.AsyncClient, oracle: Oracle) -> None:
    body = {"model": "embedder", "input": [LONG, "a"]}
    answer = (await http.post("/api/embed", json=body)).json()
    expected = [oracle.vector(LONG), oracle.vector("a")]
    np.testing.assert_allclose(answer["embeddings"], expected, rtol=0, atol=TOLERANCE)
    assert (await http.post("/api/embed", json={**body, "truncate": False})).status_code == 400
    old = (await http.post("/api/embeddings", json={"model": "embedder", "prompt": "a"})).json()
    vector = np.array(old["embedding"])
    np.testing.assert_allclose(vector / np.linalg.norm(vector), expected[1], rtol=0, atol=TOLERANCE)
    nothing = (await http.post("/api/embed", json={"model": "embedder"})).json()
    assert nothing["embeddings"] == []
    empty = {"model": "embedder", "input": ["", ""]}
    assert len((await http.post("/api/embed", json=empty)).json()["embeddings"]) == 2
    shown = (await http.post("/api/show", json={"model": "embedder"})).json()
    assert shown["capabilities"] == ["embedding"]


async def check_ranking(http: httpx2.AsyncClient, oracle: Oracle, name: str) -> None:
    """In Cohere's form, in Jina's, and with the scores as the model gives them."""
    documents: list[Any] = ["She read.", {"text": "It rained all day."}, "A letter came.", LONG]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    logits = [oracle.logit(QUERY, text) for text in texts]
    order = sorted(range(4), key=lambda place: -logits[place])
    body = {"model": name, "query": QUERY, "documents": documents, "top_n": 3}
    for path, more in (("/v2/rerank", {}), ("/rerank", {"return_documents": True})):
        answer = (await http.post(path, json={**body, **more})).json()
        assert [one["index"] for one in answer["results"]] == order[:3]
        for one in answer["results"]:
            expected = 1 / (1 + np.exp(-logits[one["index"]]))
            assert one["relevance_score"] == pytest.approx(expected, abs=TOLERANCE)
            assert one.get("document") == ({"text": texts[one["index"]]} if more else None)
    raw = (await http.post("/v1/rerank", json={**body, "raw_scores": True})).json()
    for one in raw["results"]:
        assert one["relevance_score"] == pytest.approx(logits[one["index"]], abs=TOLERANCE)
    asked = {"model": name, "query": QUERY, "texts": texts, "return_text": True}
    for one, place in zip((await http.post("/rerank", json=asked)).json(), order, strict=True):
        score = pytest.approx(1 / (1 + np.exp(-logits[place])), abs=TOLERANCE)
        assert one == {"index": place, "score": score, "text": texts[place]}
    both = await http.post("/rerank", json={**body, "texts": texts})
    assert (both.status_code, "either documents or texts" in both.text) == (400, True)
    whole = await http.post("/v1/rerank", json={**body, "truncate": False})
    assert whole.json()["error"]["code"] == "context_length_exceeded"


async def check_refused(http: httpx2.AsyncClient, client: openai.AsyncOpenAI) -> None:
    """What an encoder of the other kind, or a conversation, is told. The ring keeps its model."""
    import openai

    await client.completions.create(model="default", prompt="a", max_tokens=1)
    for path, body, words in (
        ("/v1/rerank", {"model": "embedder", "query": "a", "documents": ["b"]}, "texts for vec"),
        ("/v1/embeddings", {"model": "reranker", "input": "a"}, "a query and documents to rank"),
        ("/v1/embeddings", {"model": "embedder", "input": [9999]}, "outside the model's vocab"),
    ):
        refused = await http.post(path, json=body)
        assert (refused.status_code, words in refused.text) == (400, True), refused.text
    with pytest.raises(openai.BadRequestError, match="encoder, which makes vectors or scores"):
        await client.chat.completions.create(
            model="embedder", messages=[{"role": "user", "content": "a"}]
        )


async def check_lists(node: NodeProcess, models: Path) -> None:
    """`plan` and `models` say what it is."""
    async with connect(node.address) as client:
        plan = await client.plan(str(models / "embedder"))
        of_decoder = await client.plan(str(models / "decoder"))
        lists = [listed async for listed in client.models()]
        loaded = (await client.status()).node.stage
    assert loaded is not None
    assert loaded.model == DEFAULT_MODEL_NAME
    assert "embedding encoder, one node, by transformers" in plan_text(plan)
    assert "embedding encoder, one node, by layers of our own" in plan_text(of_decoder)
    assert plan.stages[0].layers == (0, 2)
    kinds = {one["name"]: (one["family"], one["kind"]) for one in models_json(lists)["models"]}
    assert kinds[str(models / "embedder")] == ("bert", "embedding")
    assert kinds[str(models / "reranker")] == ("xlm-roberta", "reranker")
    assert kinds[str(models / "decoder")] == ("qwen3", "embedding")
    assert kinds[str(models / "scores.gguf")] == ("bert", "reranker")
    assert any("bert (embedding)" in line for line in model_lines(lists, None))
