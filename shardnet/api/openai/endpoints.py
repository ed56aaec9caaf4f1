"""The endpoints of OpenAI that there are, those about tokens, and what is kept between requests.

In the form that vLLM gave these endpoints, which evaluation programs ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from shardnet.api.chat.run import chat_prompt
from shardnet.api.client import Client
from shardnet.api.openai.chat import (
    ChatChunk,
    ChatCompletion,
    Controlled,
    complete_chat,
    control_chat,
)
from shardnet.api.openai.chat_body import ChatBody, chat_request
from shardnet.api.openai.completions import (
    Completion,
    InfillAnswer,
    complete,
    fill_in,
)
from shardnet.api.openai.embeddings import (
    EmbeddingList,
    RankedText,
    Ranking,
    embeddings,
    rank,
)
from shardnet.api.openai.faults import OPENAI, page_of
from shardnet.api.openai.sampling import Count
from shardnet.api.server.endpoint import Endpoint, Json, Reply
from shardnet.api.server.errors import HttpError, refused
from shardnet.api.server.model_names import ModelNames, ServedModel, written
from shardnet.api.server.service import Exchange
from shardnet.wire.messages.deputies import MAX_LISTED_VALUE, MAX_VALUE
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


class Applied(msgspec.Struct, kw_only=True):
    """A conversation as the model gets it."""

    prompt: str


async def apply_template(exchange: Exchange, body: ChatBody) -> Reply:
    """Return the prompt that a chat completion means, in llama-server's form."""
    served = await exchange.service.models.find(body.model)
    messages, options = chat_prompt(chat_request(body, served.choice))
    told = await exchange.tokenize(messages, model=served.choice, **options)
    ids = told.token_ids
    said = await exchange.detokenize(ids, keep_special_tokens=True, model=served.choice)
    return Json(value=Applied(prompt=said.text))


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
    """Return one model, found by its name or a part of it; behind `/v1/models/` nothing is all."""
    models, name = exchange.service.models, exchange.path_parameters["name"]
    if not name:
        return await list_models(exchange, body)
    return Json(value=_card(models, await models.find(name)))


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    counted = partial(OPENAI.at, counts=True)
    return [
        counted(
            "POST /v1/chat/completions",
            "Continue a conversation",
            complete_chat,
            ChatCompletion,
            chunk=ChatChunk,
        ),
        OPENAI.at(
            "POST /v1/chat/completions/control",
            "End the reasoning of an answer that is being made",
            control_chat,
            Controlled,
        ),
        counted(
            "POST /v1/completions",
            "Continue texts or token ids",
            complete,
            Completion,
            chunk=Completion,
        ),
        counted(
            "POST /infill",
            "What stands between two texts, in llama-server's form",
            fill_in,
            InfillAnswer,
            chunk=InfillAnswer,
        ),
        counted("POST /v1/embeddings", "Texts or token ids as vectors", embeddings, EmbeddingList),
        *(
            counted(
                f"POST {path}",
                "Documents in the order of how well they answer a query",
                rank,
                Ranking | list[RankedText],
            )
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        OPENAI.at("GET /v1/models", "The models that may be asked for", list_models, ModelList),
        OPENAI.at("GET /v1/models/{name:path}", "One model", show_model, ModelCard),
        counted("POST /tokenize", "Text to token ids", tokenize, Tokens),
        counted("POST /detokenize", "Token ids to text", detokenize, Detokenized),
        counted(
            "POST /apply-template",
            "A conversation in the model's chat template, in llama-server's form",
            apply_template,
            Applied,
        ),
        OPENAI.at(
            "GET /tokenizer_info",
            "The tokens that begin and end a text, and the chat template",
            tokenizer_info,
            TokenizerInfo,
        ),
    ]


_ROOM: Final = 256
"""Bytes of a value beside its description."""


class _Value(msgspec.Struct, array_like=True, frozen=True):
    """What is kept under a name: a description, and how long the content in parts is."""

    description: bytes
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A description as JSON, and how long ago it came."""

    description: bytes
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Values of one kind, each a small description and a content, which may be large.

    `what` names one in errors; all ids begin with `prefix`. The nodes bound how many there are:
    the least recently used make room. Calls raise ShardnetError where no node answers.
    """

    what: str
    prefix: str

    async def put(
        self, client: Client, owner: str, name: str, description: bytes, content: bytes = b""
    ) -> None:
        """Keep a value. Raises HttpError 400 for a description that is too long."""
        if len(description) > MAX_LISTED_VALUE - _ROOM:
            raise refused(f"what describes a {self.what} has {len(description)} bytes: too many")
        for place, at in enumerate(range(0, len(content), MAX_VALUE)):
            await client.keep_value(owner, _part(name, place), content[at : at + MAX_VALUE])
        value = _Value(description=description, n_bytes=len(content))
        await client.keep_value(owner, name, msgspec.msgpack.encode(value))

    async def touch(self, client: Client, owner: str, name: str) -> None:
        """Make the age of a value 0."""
        if (value := await client.find_value(owner, name)) is not None:
            await client.keep_value(owner, name, value)

    async def describe(self, client: Client, owner: str, name: str) -> bytes:
        """Return a description. Raises HttpError 404."""
        value = await self._find(client, owner, name)
        if value is None:
            raise self._missing(name)
        return value.description

    async def find(self, client: Client, owner: str, name: str) -> bytes | None:
        """Return a content, None if it is not kept, or not all of it."""
        value = await self._find(client, owner, name)
        if value is None:
            return None
        content = bytearray()
        for place in range(-(-value.n_bytes // MAX_VALUE)):
            part = await client.find_value(owner, _part(name, place))
            if part is None:
                return None
            content += part
        return bytes(content) if len(content) == value.n_bytes else None

    async def get(self, client: Client, owner: str, name: str) -> bytes:
        """Return a content. Raises HttpError 404."""
        content = await self.find(client, owner, name)
        if content is None:
            raise self._missing(name)
        return content

    async def listed(self, client: Client, owner: str, prefix: str = "") -> list[Listed]:
        """List the descriptions of a key, or of those whose ids begin with `prefix`."""
        values = await client.list_values(owner, prefix or self.prefix)
        return [
            Listed(
                description=msgspec.msgpack.decode(value.value, type=_Value).description,
                age_s=value.age_s,
            )
            for value in values
        ]

    async def drop(self, client: Client, owner: str, name: str) -> None:
        """Keep a value no longer. Raises HttpError 404 if it is not kept."""
        value = await self._find(client, owner, name)
        if value is None:
            raise self._missing(name)
        await client.drop_value(owner, name)
        for place in range(-(-value.n_bytes // MAX_VALUE)):
            await client.drop_value(owner, _part(name, place))

    def gone(self, name: str) -> str:
        """Say that there is no value of this name, and for how long there would be one."""
        return (
            f"there is no {self.what} {name[:128]}: the cluster keeps what was used last, in the "
            "memory of two nodes, until these end"
        )

    def _missing(self, name: str) -> HttpError:
        return refused(self.gone(name), status=404)

    async def _find(self, client: Client, owner: str, name: str) -> _Value | None:
        if not name.startswith(self.prefix) or len(name) > 128 or "\0" in name:
            return None
        found = await client.find_value(owner, name)
        return msgspec.msgpack.decode(found, type=_Value) if found is not None else None


def _part(name: str, place: int) -> str:
    return f"part/{name}/{place}"
