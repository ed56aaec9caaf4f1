"""Texts as vectors, in OpenAI's form; documents by how well they answer.

These in Cohere's and Jina's form, or in that of Text Embeddings Inference (TEI).
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import exp
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from shardnet.api.chat.request import thinking_options
from shardnet.api.chat.run import ChatGenerator
from shardnet.api.embedding import (
    Embedding,
    EncoderClient,
    Pooling,
    Shape,
    embed,
    encode,
    results_of,
)
from shardnet.api.openai.sampling import PromptBody, prompts_of
from shardnet.api.requests import GenerationOptions, Message, Prompt
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange
from shardnet.errors import RemoteProtocolError
from shardnet.output_params import OutputParams
from shardnet.runtime.encoding.judge import ANSWERS, INSTRUCTION, SYSTEM, question
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.generation import Encode
from shardnet.wire.messages.plans import ModelChoice

MAX_INPUTS = 2048
"""Texts in one request: OpenAI's number."""

Encoding = Literal["float", "base64"]


MAX_DOCUMENTS = 1024


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of a request for vectors; from `pooling` on the fields are not OpenAI's.

    With `truncate` texts that are too long are cut, which are else refused.
    """

    input: PromptBody
    model: Annotated[str, Meta(max_length=4096)] | None = None
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate: bool | None = None
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
    cuts = body.truncate is True
    vectors = embed(exchange, texts, shape, model=served.choice, truncate=cuts, **options)
    async with aclosing(vectors) as found:
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
    `raw_scores` has scores as the model gives them. TEI's programs give `texts` in place of
    `documents`, and have RankedText in the answer.
    """

    query: str
    documents: (
        Annotated[list[str | DocumentBody], Meta(min_length=1, max_length=MAX_DOCUMENTS)] | None
    ) = None
    model: Annotated[str, Meta(max_length=4096)] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_DOCUMENTS)] | None = None
    return_text: bool | None = None


class RankedText(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Text number `index`, and how well it answers, in TEI's words."""

    index: int
    score: float
    text: str | None = None


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
    given = body.documents if body.texts is None else body.texts
    if given is None or (body.documents is not None and body.texts is not None):
        raise refused("give either documents or texts", "documents")
    served = await exchange.service.models.find(body.model)
    texts = [one if isinstance(one, str) else one.text for one in given]
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
    scores = {one.index: one.logit if body.raw_scores else one.score for one in scored}
    if body.texts is not None:
        ranked = [
            RankedText(index=place, score=score, text=texts[place] if body.return_text else None)
            for place, score in scores.items()
        ]
        return Json(value=ranked[: body.top_n])
    n_tokens = sum(one.n_prompt for one in scored)
    results = [
        RankedDocument(
            index=place,
            relevance_score=score,
            document=DocumentBody(text=texts[place]) if body.return_documents else None,
        )
        for place, score in [*scores.items()][: body.top_n]
    ]
    return Json(
        value=Ranking(
            id=f"rerank-{uuid.uuid4().hex}",
            model=served.name,
            results=results,
            usage=EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Document number `index`: an encoder's score, or the logit of yes above that of no.

    `n_prompt` are the tokens of the document with its query.
    """

    index: int
    logit: float
    n_prompt: int

    @property
    def score(self) -> float:
        """How well it answers, from 0 to 1: of a causal model the probability of yes."""
        return 1 / (1 + exp(min(-self.logit, 700.0)))


class RankGenerator(ChatGenerator, EncoderClient, Protocol):
    """What chats, and asks encoders."""


async def rerank(
    generator: RankGenerator,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str = INSTRUCTION,
    truncate: bool = True,
    model: ModelChoice,
) -> AsyncGenerator[Scored, None]:
    """Yield the score of each document as it comes: in any order.

    Encoders of pairs know no instruction. An encoder cuts what is too long if it is to `truncate`.
    Closing the iterator cancels the others. Raises the first error of any document.
    """
    encoder = await generator.encode(Encode(request=0, model=model.model))
    if encoder.kind:
        asked = Encode(
            request=0,
            model=model.model,
            query=query,
            instruction=instruction,
            truncate=truncate,
        )
        async with aclosing(encode(generator, asked, documents)) as encoded:
            async for one in encoded:
                yield Scored(index=one.index, logit=float(one.values[0]), n_prompt=one.n_tokens)
        return
    ids = [await _first_id(generator, answer, model) for answer in ANSWERS]
    options = GenerationOptions(
        max_tokens=0,
        outputs=OutputParams(logit_rows=1),
        template_options=thinking_options(False),  # where reasoning would be, there is none
    )
    prompts = [Prompt(conversation(query, document, instruction)) for document in documents]
    events = generator.generate(prompts, SamplingParams(), model=model, **options)
    async with aclosing(results_of(events, "document", len(documents))) as results:
        async for result in results:
            if result.logits is None or result.logits.n_rows != 1:
                raise RemoteProtocolError("the head's answer has no logits of the last token")
            [row] = result.logits.array()
            yield Scored(
                index=result.index,
                logit=float(row[ids[0]]) - float(row[ids[1]]),
                n_prompt=result.usage.n_prompt,
            )


def conversation(query: str, document: str, instruction: str) -> list[Message]:
    """Return the question whether a document answers a query."""
    text = question(query, document, instruction)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


async def _first_id(generator: ChatGenerator, text: str, model: ModelChoice) -> int:
    told = await generator.tokenize(text, model=model, bos="off")
    return told.token_ids[0]
