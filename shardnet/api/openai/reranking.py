"""Documents in the order of how well they answer a query, in the form of Cohere and Jina."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import Annotated

import msgspec
from msgspec import Meta

from shardnet.api.chat.reranking import INSTRUCTION, Scored, rerank
from shardnet.api.openai.embeddings import EmbeddingUsage
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.service import Exchange

MAX_DOCUMENTS = 1024


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
