"""Other names of models: copied, created and deleted. Weights stay as and where they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final

import msgspec

from shardnet.api.ollama.body import ModelName
from shardnet.api.ollama.faults import line
from shardnet.api.ollama.generating import STREAM_TYPE
from shardnet.api.ollama.names import TAG, find_model
from shardnet.api.ollama.pulling import OllamaProgress
from shardnet.api.server.endpoint import Json, Reply, Stream
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange
from shardnet.errors import shown

NewName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_WITH_REQUESTS: Final = "send it with each request"
_NOT_CREATED: Final = {
    "system": _WITH_REQUESTS,
    "messages": _WITH_REQUESTS,
    "parameters": "send options with each request",
    "template": "a model has the template that its files have",
    "files": "give the file to `shardnet serve --model`",
    "adapters": "give the files to `shardnet serve`",
    "quantize": "give --quant to `shardnet serve`",
}
"""What a created model cannot have, and what there is instead."""


class OllamaCopy(msgspec.Struct, kw_only=True):
    """Which model gets which further name."""

    source: ModelName
    destination: NewName


class OllamaDelete(msgspec.Struct, kw_only=True):
    """Which name goes; `name` is what `model` was called before."""

    model: ModelName | None = None
    name: ModelName | None = None


class OllamaCreate(msgspec.Struct, kw_only=True, rename={"source": "from"}):
    """A model by the name `model`, made of another one. Only its name may be another."""

    model: NewName | None = None
    name: NewName | None = None
    source: ModelName | None = None
    stream: bool | None = None
    system: Any = None
    messages: Any = None
    parameters: Any = None
    template: Any = None
    files: Any = None
    adapters: Any = None
    quantize: Any = None


async def copy(exchange: Exchange, body: OllamaCopy) -> Reply:
    """Give a model a further name, until the server ends. Raises HttpError 404, 400."""
    await _name(exchange, body.destination, body.source)
    return Json(value={})


async def create(exchange: Exchange, body: OllamaCreate) -> Reply:
    """Make a model of another one, which is to give that a further name.

    Raises HttpError 400, which names it, for what else it would have.
    """
    for field, instead in _NOT_CREATED.items():
        if getattr(body, field):
            raise refused(f"{field} cannot be kept with a name: {instead}", field)
    name, source = body.model or body.name, body.source
    if not name or not source:
        missing = "from" if name else "model"
        raise refused(f"{missing} is missing: a model is made of one that there is", missing)
    if body.stream is not False:
        return Stream(chunks=_creating(exchange, name, source), media_type=STREAM_TYPE)
    await _name(exchange, name, source)
    return Json(value=OllamaProgress(status="success"))


async def delete(exchange: Exchange, body: OllamaDelete) -> Reply:
    """Drop a name that was given. Raises HttpError 404 for none, 400 for a model of the nodes."""
    name = (body.model or body.name or "").removesuffix(TAG)
    models = exchange.service.models
    if not models.drop_alias(name):
        await find_model(models, name)
        raise refused(
            f"{shown(name)} is kept in a store that other programs use too: delete it there; "
            "`shardnet cache` deletes what came from other nodes",
            "model",
        )
    return Json(value={})


async def _creating(exchange: Exchange, name: str, source: str) -> AsyncGenerator[bytes, None]:
    await _name(exchange, name, source)
    yield line(OllamaProgress(status=f"using existing model {source}"))
    yield line(OllamaProgress(status="success"))


async def _name(exchange: Exchange, name: str, source: str) -> None:
    models = exchange.service.models
    served = await find_model(models, source)
    models.add_alias(name.removesuffix(TAG), served.name)
