"""What there is to know of a model without switching to it, and what programs call it.

A program asks of every model that it is told of, and a ring has one at a time: only the default
model may be loaded for it, and no other one unloaded. Of others it is known what the nodes say, and
what they were when they were used last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from shardnet.api.chat_formats.formats import choose_format
from shardnet.api.chat_formats.marks import TokenText
from shardnet.api.infilling import added_ids, has_marks
from shardnet.api.server.errors import HttpError
from shardnet.api.server.model_names import FRESH_S, MAX_LISTED, ModelNames, ServedModel
from shardnet.api.server.service import Exchange
from shardnet.errors import ShardnetError
from shardnet.wire.messages.chat import TokenizerDescribed
from shardnet.wire.messages.membership import ListedModel

ASK_S: Final = 10.0
"""How long nodes may take to open their models, or to load one: a program waits."""
MAX_KNOWN: Final = 64
_SIGNS: Final = (
    *("enable_thinking", "reasoning_effort", "<think>", "[THINK]", "<|channel|>"),
    *("<seed:think>", "<|START_THINKING|>", "<|inner_prefix|>"),
)
"""What chat templates of models that reason have one of."""


TAG: Final = ":latest"
"""What programs add to a name that has no tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a model: `context` is 0 and `template` "" where it is not.

    `listed` is what the nodes say of it, `capabilities` are Ollama's words.
    """

    listed: ListedModel
    context: int
    template: str
    capabilities: tuple[str, ...]


class ModelFacts:
    """Remembers what was found out."""

    def __init__(self) -> None:
        self._contexts: dict[str, int] = {}
        self._listed: dict[str, ListedModel] = {}
        self._listed_at_s: float | None = None
        self._listing = asyncio.Lock()

    async def of(self, exchange: Exchange, served: ServedModel) -> Facts:
        """Find out about a model."""
        listed = await self.listed(exchange, served)
        described = None
        if listed.kind:
            return Facts(
                listed=listed,
                context=listed.context,
                template="",
                capabilities=("embedding",),
            )
        with contextlib.suppress(ShardnetError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                described = await self._described(exchange, served)
        return Facts(
            listed=listed,
            context=self.context_of(served, listed),
            template=described.template if described is not None else "",
            capabilities=capabilities_of(described),
        )

    def context_of(self, served: ServedModel, listed: ListedModel) -> int:
        """Return the context that a model has here, in tokens, 0 where that is not known."""
        most = served.choice.context
        context = self._contexts.get(served.choice.model, listed.context)
        return min(context, most) if context and most else context or most

    async def _described(
        self, exchange: Exchange, served: ServedModel
    ) -> TokenizerDescribed | None:
        """Describe a model's tokenizer, if it is known or the model may be loaded for it."""
        name, service = served.choice.model, exchange.service
        if name in self._contexts and name in service.tokenizers:
            return service.tokenizers[name][1]
        if served == service.models.default and service.switch.model in ("", name):
            described = await exchange.describe_tokenizer(model=served.choice)
            told = await exchange.tokenize([0], model=served.choice)
            if len(self._contexts) >= MAX_KNOWN:
                del self._contexts[next(iter(self._contexts))]
            self._contexts[name] = told.context
            return described
        return service.tokenizers[name][1] if name in service.tokenizers else None

    async def listed(self, exchange: Exchange, served: ServedModel) -> ListedModel:
        """Return what the nodes say of a model, its name alone where they say nothing."""
        async with self._listing:
            at_s = self._listed_at_s
            if at_s is None or time.monotonic() - at_s >= FRESH_S:
                await self._refresh(exchange)
        for name in (served.name, served.choice.model):
            if name in self._listed:
                return self._listed[name]
        return ListedModel(name=served.name, store="")

    async def _refresh(self, exchange: Exchange) -> None:
        found: dict[str, ListedModel] = {}
        with contextlib.suppress(ShardnetError, TimeoutError):
            model = exchange.service.models.default.choice.model
            path = model if PurePath(model).is_absolute() else ""
            pieces = exchange.service.client.models(model=path)
            async with asyncio.timeout(ASK_S), aclosing(pieces):
                async for piece in pieces:
                    found.update((model.name, model) for model in piece.models)
                    if len(found) >= MAX_LISTED:
                        break
        self._listed = found or self._listed
        self._listed_at_s = time.monotonic()


def capabilities_of(described: TokenizerDescribed | None) -> tuple[str, ...]:
    """Return what a model can do in Ollama's words, by its chat template and added tokens."""
    if described is None:
        return ("completion",)
    tokens = {token.token_id: TokenText(token.text, token.is_special) for token in described.added}
    has_tools = choose_format(described.template, tokens).has_tools
    thinks = any(sign in described.template for sign in _SIGNS)
    fills_in = has_marks(added_ids(described))
    words = ("completion", *["tools"] * has_tools, *["thinking"] * thinks, *["insert"] * fills_in)
    return (*words, *["vision"] * described.sees)


async def find_model(models: ModelNames, name: str | None) -> ServedModel:
    """Return the model that `name` means, with the tag or without, the default for none.

    Raises HttpError 404, with names that would do, for no model or several.
    """
    try:
        return await models.find(name)
    except HttpError:
        if name is None or not name.endswith(TAG):
            raise
    return await models.find(name.removesuffix(TAG))
