"""The models that may be asked for."""

from __future__ import annotations

import msgspec

from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.model_names import ServedModel
from shardnet.api.server.service import Exchange


class ModelCard(msgspec.Struct, kw_only=True):
    """One model. When it was made is not known."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "shardnet"


class ModelList(msgspec.Struct, kw_only=True):
    """All models, the default one first.

    Codex reads `models` alone, with its own instructions for each one. For what is not there it has
    those of any model, so there is none.
    """

    object: str = "list"
    data: list[ModelCard]
    models: list[ModelCard] = msgspec.field(default_factory=list)


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name)


async def list_models(exchange: Exchange, body: None) -> Reply:
    """List the models."""
    return Json(value=ModelList(data=[*map(_card, await exchange.service.models.list())]))


async def show_model(exchange: Exchange, body: None) -> Reply:
    """Return one model, found by its name or a part of it."""
    return Json(value=_card(await exchange.service.models.find(exchange.path_parameters["name"])))
