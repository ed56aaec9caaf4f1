"""Text to token ids and back, and what there is to know of a tokenizer.

In the form that vLLM gave these endpoints, which evaluation programs ask for.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shardnet.api.openai.sampling import Count
from shardnet.api.server.endpoint import Json, Reply
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
