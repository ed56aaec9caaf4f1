"""The endpoints of Ollama that there are, and texts as vectors in its form and its older one."""

from __future__ import annotations

import time
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from shardnet.api.embedding import Embedding, Pooling, Shape, embed
from shardnet.api.ollama.body import (
    OLLAMA,
    ModelName,
    OllamaChatAnswer,
    OllamaGenerated,
)
from shardnet.api.ollama.generating import STREAM_TYPE, chat, generate, keep_of
from shardnet.api.ollama.models import (
    ModelFacts,
    OllamaModels,
    OllamaShown,
    OllamaVersion,
    find_model,
    version,
)
from shardnet.api.ollama.pulling import (
    OllamaProgress,
    Pulls,
    copy,
    create,
    delete,
    push,
)
from shardnet.api.server.endpoint import Endpoint, Json, Reply
from shardnet.api.server.service import Exchange
from shardnet.wire.messages.generation import Encode
from shardnet.wire.messages.plans import ModelChoice

MAX_INPUTS: Final = 2048


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """Texts; without any the model is only loaded. `pooling` is not Ollama's.

    Unless `truncate` is false a text is cut at the end of the context. None of the `options`
    counts.
    """

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    model: ModelName | None = None
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    truncate: bool | None = None
    pooling: Pooling | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaEmbedded(msgspec.Struct, kw_only=True):
    """Their vectors, each of length 1, in order; times are in ns."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaOldEmbed(msgspec.Struct, kw_only=True):
    """One text, in the older form."""

    prompt: str | None = None
    model: ModelName | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaOldEmbedded(msgspec.Struct, kw_only=True):
    """Its vector, of whatever length it has."""

    embedding: list[float]


async def embed_texts(exchange: Exchange, body: OllamaEmbed) -> Reply:
    """Return the vectors of texts."""
    given = body.input or []
    texts = [given] if isinstance(given, str) else given
    served = await find_model(exchange.service.models, body.model)
    exchange.keep = keep_of(body.keep_alive)
    shape = Shape(
        pooling=body.pooling, dimensions=body.dimensions or None, at_most=True, normalized=True
    )
    cuts = body.truncate is not False
    found = await _vectors(exchange, texts, shape, served.choice, truncate=cuts)
    return Json(
        value=OllamaEmbedded(
            model=body.model or served.name,
            embeddings=[one.as_json() for one in found],
            total_duration=int(1e9 * (time.monotonic() - exchange.began_s)),
            prompt_eval_count=sum(one.n_prompt for one in found),
        )
    )


async def embed_text(exchange: Exchange, body: OllamaOldEmbed) -> Reply:
    """Return the vector of one text."""
    served = await find_model(exchange.service.models, body.model)
    exchange.keep = keep_of(body.keep_alive)
    prompts = [body.prompt] if body.prompt else []
    found = await _vectors(exchange, prompts, Shape(normalized=False), served.choice)
    return Json(value=OllamaOldEmbedded(embedding=found[0].as_json() if found else []))


async def _vectors(
    exchange: Exchange,
    texts: list[str],
    shape: Shape,
    model: ModelChoice,
    *,
    truncate: bool = False,
) -> list[Embedding]:
    """Embed texts; return the vectors in their order. Without any, have the model loaded."""
    if not texts:
        asked = Encode(request=0, model=model.model, keep_s=exchange.keep_s)
        encoder = await exchange.encode(asked)
        if not encoder.kind:  # that is loaded for its first text
            await exchange.use(model)
        return []
    async with aclosing(embed(exchange, texts, shape, model=model, truncate=truncate)) as found:
        return sorted([one async for one in found], key=lambda one: one.index)


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    facts, at = ModelFacts(), OLLAMA.at
    counted = partial(at, counts=True)

    def streamed(
        route: str, summary: str, handle: Any, answer: Any, *, counts: bool = False
    ) -> Endpoint[Any]:
        further = {"chunk": answer, "chunk_type": STREAM_TYPE, "counts": counts}
        return at(route, summary, handle, answer, **further)

    return [
        at("POST /api/copy", "Give a model a further name", copy),
        streamed(
            "POST /api/create",
            "Give a model a further name, as one that is made of it",
            create,
            OllamaProgress,
        ),
        at("DELETE /api/delete", "Drop a name that was given", delete),
        at("POST /api/push", "Not done by this server: the answer says what is", push),
        streamed(
            "POST /api/pull",
            "Pull a model of the Hugging Face Hub to this machine",
            Pulls().pull,
            OllamaProgress,
            counts=True,
        ),
        at("GET /api/version", "The version of Ollama's API", version, OllamaVersion),
        at("GET /api/tags", "The models that may be asked for", facts.tags, OllamaModels),
        at("GET /api/ps", "The models that are loaded", facts.running, OllamaModels),
        at("POST /api/show", "What is known of a model", facts.show, OllamaShown),
        streamed("POST /api/chat", "Continue a conversation", chat, OllamaChatAnswer, counts=True),
        streamed(
            "POST /api/generate",
            "Answer a prompt, or continue it as it is",
            generate,
            OllamaGenerated,
            counts=True,
        ),
        counted("POST /api/embed", "Texts as vectors", embed_texts, OllamaEmbedded),
        counted(
            "POST /api/embeddings",
            "A text as a vector, in the older form",
            embed_text,
            OllamaOldEmbedded,
        ),
    ]
