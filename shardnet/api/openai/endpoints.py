"""The endpoints of OpenAI that there are, and those about text as token ids and back.

In the form that vLLM gave these endpoints, which evaluation programs ask for.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardnet.api.openai.chat import ChatChunk, ChatCompletion, complete_chat
from shardnet.api.openai.chat_body import ChatBody
from shardnet.api.openai.completions import (
    Completion,
    CompletionBody,
    InfillAnswer,
    InfillBody,
    complete,
    fill_in,
)
from shardnet.api.openai.embeddings import (
    EmbeddingBody,
    EmbeddingList,
    Ranking,
    RerankBody,
    embeddings,
    rank,
)
from shardnet.api.openai.faults import OPENAI, page_of
from shardnet.api.openai.sampling import Count
from shardnet.api.server.endpoint import Endpoint, Json, Reply
from shardnet.api.server.model_names import ModelNames, ServedModel, written
from shardnet.api.server.service import Exchange
from shardnet.wire.messages.generation import MAX_DETOKENIZED


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text, and whether tokens that begin a text are added to it."""

    prompt: str
    add_special_tokens: bool | None = None
    model: str | None = None


class Tokens(msgspec.Struct, kw_only=True):
    """The token ids, and how many there may be."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: Annotated[list[Count], Meta(max_length=MAX_DETOKENIZED)]
    model: str | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    """The text of token ids, special tokens included."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokens that begin and end a text, and the chat template, as text."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


async def tokenizer_info(exchange: Exchange, body: None) -> Reply:
    """Describe the tokenizer of the default model."""
    choice = exchange.service.models.default.choice
    told = await exchange.describe_tokenizer(model=choice)
    ids = [*([] if told.bos_id is None else [told.bos_id]), *told.eos_ids[:1]]
    texts = (await exchange.detokenize(ids, model=choice)).tokens if ids else []
    bos = texts.pop(0) if told.bos_id is not None else None
    return Json(
        value=TokenizerInfo(
            bos_token=bos,
            eos_token=texts[0] if texts else None,
            chat_template=told.template or None,
        )
    )


async def tokenize(exchange: Exchange, body: TokenizeBody) -> Reply:
    """Return the token ids of a text."""
    served = await exchange.service.models.find(body.model)
    if not body.prompt:
        return Json(value=Tokens(tokens=[], count=0, max_model_len=0))
    told = await exchange.tokenize(
        body.prompt,
        model=served.choice,
        bos="off" if body.add_special_tokens is False else "auto",
    )
    ids = told.token_ids
    return Json(value=Tokens(tokens=ids, count=len(ids), max_model_len=told.context))


async def detokenize(exchange: Exchange, body: DetokenizeBody) -> Reply:
    """Return the text of token ids."""
    served = await exchange.service.models.find(body.model)
    told = await exchange.detokenize(body.tokens, keep_special_tokens=True, model=served.choice)
    return Json(value=Detokenized(prompt=told.text))


class ModelCard(msgspec.Struct, kw_only=True):
    """One model, for OpenAI's programs and Anthropic's. It is as old as its files here."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "shardnet"
    type: str = "model"
    display_name: str
    created_at: str


class ModelList(msgspec.Struct, kw_only=True):
    """All models, the default one first.

    Codex reads `models` alone, with its own instructions for each one. For what is not there it has
    those of any model, so there is none.
    """

    object: str = "list"
    data: list[ModelCard]
    models: list[ModelCard] = []
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def _card(models: ModelNames, model: ServedModel) -> ModelCard:
    at_s, name = models.modified_s(model), model.name.rpartition("/")[2]
    return ModelCard(id=model.name, created=at_s, display_name=name, created_at=written(at_s))


async def list_models(exchange: Exchange, body: None) -> Reply:
    """List the models, or a page of them."""
    models = exchange.service.models
    every = [_card(models, model) for model in await models.list()]
    cards, has_more = page_of(every, exchange.query)
    first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
    return Json(value=ModelList(data=cards, first_id=first, last_id=last, has_more=has_more))


async def show_model(exchange: Exchange, body: None) -> Reply:
    """Return one model, found by its name or a part of it."""
    models = exchange.service.models
    return Json(value=_card(models, await models.find(exchange.path_parameters["name"])))


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    return [
        OPENAI.at(
            "POST /v1/chat/completions",
            "Continue a conversation",
            complete_chat,
            ChatBody,
            ChatCompletion,
            chunk=ChatChunk,
            counts=True,
        ),
        OPENAI.at(
            "POST /v1/completions",
            "Continue texts or token ids",
            complete,
            CompletionBody,
            Completion,
            chunk=Completion,
            counts=True,
        ),
        OPENAI.at(
            "POST /infill",
            "What stands between two texts, in llama-server's form",
            fill_in,
            InfillBody,
            InfillAnswer,
            chunk=InfillAnswer,
            counts=True,
        ),
        OPENAI.at(
            "POST /v1/embeddings",
            "Texts or token ids as vectors",
            embeddings,
            EmbeddingBody,
            EmbeddingList,
            counts=True,
        ),
        *(
            OPENAI.at(
                f"POST {path}",
                "Documents in the order of how well they answer a query",
                rank,
                RerankBody,
                Ranking,
                counts=True,
            )
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        OPENAI.at(
            "GET /v1/models", "The models that may be asked for", list_models, answer=ModelList
        ),
        OPENAI.at("GET /v1/models/{name:path}", "One model", show_model, answer=ModelCard),
        OPENAI.at(
            "POST /tokenize", "Text to token ids", tokenize, TokenizeBody, Tokens, counts=True
        ),
        OPENAI.at(
            "POST /detokenize",
            "Token ids to text",
            detokenize,
            DetokenizeBody,
            Detokenized,
            counts=True,
        ),
        OPENAI.at(
            "GET /tokenizer_info",
            "The tokens that begin and end a text, and the chat template",
            tokenizer_info,
            answer=TokenizerInfo,
        ),
    ]
