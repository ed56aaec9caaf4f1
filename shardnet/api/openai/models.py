"""The models that may be asked for."""

from __future__ import annotations

import msgspec

from shardnet.api.openai.paging import page_of
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.model_names import ServedModel
from shardnet.api.server.service import Exchange


class ModelCard(msgspec.Struct, kw_only=True):
    """One model, for OpenAI's programs and Anthropic's. When it was made is not known."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "shardnet"
    type: str = "model"
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"


class ModelList(msgspec.Struct, kw_only=True):
    """All models, the default one first.

    Codex reads `models` alone, with its own instructions for each one. For what is not there it has
    those of any model, so there is none.
    """

    object: str = "list"
    data: list[ModelCard]
    models: list[ModelCard] = msgspec.field(default_factory=list)
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, display_name=model.name.rpartition("/")[2])


async def list_models(exchange: Exchange, body: None) -> Reply:
    """List the models, or a page of them."""
    every = [*map(_card, await exchange.service.models.list())]
    cards, has_more = page_of(every, exchange.query)
    first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
    return Json(value=ModelList(data=cards, first_id=first, last_id=last, has_more=has_more))


async def show_model(exchange: Exchange, body: None) -> Reply:
    """Return one model, found by its name or a part of it."""
    return Json(value=_card(await exchange.service.models.find(exchange.path_parameters["name"])))
