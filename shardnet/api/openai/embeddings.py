"""Texts as vectors, in OpenAI's form; documents by how well they answer, in Cohere's and Jina's."""

from __future__ import annotations

import base64
import uuid
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardnet.api.chat.reranking import INSTRUCTION, Scored, rerank
from shardnet.api.embedding import Embedding, Pooling, Shape, embed
from shardnet.api.openai.prompts import PromptBody, prompts_of
from shardnet.api.requests import GenerationOptions
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange

MAX_INPUTS = 2048
"""Texts in one request: OpenAI's number."""

Encoding = Literal["float", "base64"]


MAX_DOCUMENTS = 1024


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of a request for vectors; from `pooling` on the fields are not OpenAI's."""

    input: PromptBody
    model: Annotated[str, Meta(max_length=4096)] | None = None
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None


class EmbeddingItem(msgspec.Struct, kw_only=True):
    """The vector of input number `index`: numbers, or their float32 bytes in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer, in order of the inputs."""

    object: str = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


async def embeddings(exchange: Exchange, body: EmbeddingBody) -> Reply:
    """Return the vectors of texts."""
    texts = prompts_of(body.input, "input")
    if len(texts) > MAX_INPUTS:
        raise refused(f"input has {len(texts)}: give at most {MAX_INPUTS}", "input")
    served = await exchange.service.models.find(body.model)
    shape = Shape(pooling=body.pooling, dimensions=body.dimensions, normalized=body.normalize)
    options = GenerationOptions(
        priority=body.priority or 0, bos="off" if body.add_special_tokens is False else "auto"
    )
    encoding = body.encoding_format or "float"
    items: list[EmbeddingItem] = []
    n_tokens = 0
    async with aclosing(embed(exchange, texts, shape, model=served.choice, **options)) as found:
        async for one in found:
            n_tokens += one.n_prompt
            items.append(EmbeddingItem(index=one.index, embedding=_encoded(one, encoding)))
    items.sort(key=lambda item: item.index)
    usage = EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens)
    return Json(value=EmbeddingList(data=items, model=served.name, usage=usage))


def _encoded(one: Embedding, encoding: Encoding) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(one.vector.astype("<f4").tobytes()).decode()
    return one.as_json()


class DocumentBody(msgspec.Struct, kw_only=True):
    """A document."""

    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    """The body of a request; from `instruction` on the fields are not Cohere's.

    That says what a good answer is, `truncate` whether an encoder cuts what is too long, and
    `raw_scores` has scores as the model gives them.
    """

    query: str
    documents: Annotated[list[str | DocumentBody], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    model: Annotated[str, Meta(max_length=4096)] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Document number `index`, and how well it answers: from 0 to 1 unless scores are raw."""

    index: int
    relevance_score: float
    document: DocumentBody | None = None


class Ranking(msgspec.Struct, kw_only=True):
    """The documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


async def rank(exchange: Exchange, body: RerankBody) -> Reply:
    """Return the documents in their order."""
    served = await exchange.service.models.find(body.model)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    instruction = body.instruction or INSTRUCTION
    scored: list[Scored] = []
    found = rerank(
        exchange,
        body.query,
        texts,
        instruction=instruction,
        truncate=body.truncate is not False,
        model=served.choice,
    )
    async with aclosing(found):
        async for one in found:
            scored.append(one)
    scored.sort(key=lambda one: (-one.logit, one.index))
    n_tokens = sum(one.n_prompt for one in scored)
    results = [
        RankedDocument(
            index=one.index,
            relevance_score=one.logit if body.raw_scores else one.score,
            document=DocumentBody(text=texts[one.index]) if body.return_documents else None,
        )
        for one in scored[: body.top_n]
    ]
    return Json(
        value=Ranking(
            id=f"rerank-{uuid.uuid4().hex}",
            model=served.name,
            results=results,
            usage=EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
        )
    )
