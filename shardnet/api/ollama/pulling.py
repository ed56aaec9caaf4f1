"""Pulls, copies, creates and deletes models as Ollama's programs ask, and refuses to push one.

The last three are about names: weights stay as and where they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec

from shardnet.api.ollama.body import ModelName, line
from shardnet.api.ollama.generating import STREAM_TYPE
from shardnet.api.ollama.models import TAG, find_model
from shardnet.api.server.endpoint import Json, Reply, Stream
from shardnet.api.server.errors import refused, too_many
from shardnet.api.server.service import Exchange
from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download.hub import pull_beside
from shardnet.errors import shown

MAX_PULLS: Final = 4
RETRY_S: Final = 10
_HOSTS: Final = ("hf.co/", "huggingface.co/")


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


class OllamaPull(msgspec.Struct, kw_only=True):
    """Which model to pull; `name` is what `model` was called before."""

    model: ModelName | None = None
    name: ModelName | None = None
    stream: bool | None = None


class OllamaProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How far it is, in bytes."""

    status: str
    total: int = 0
    completed: int = 0


class Pulls:
    """The pulls of one server."""

    def __init__(self, pull: Callable[..., Any] = pull_beside) -> None:
        self._pull = pull
        self._running: set[str] = set()

    async def pull(self, exchange: Exchange, body: OllamaPull) -> Reply:
        """Pull a model of the Hub to this machine; files of one given up are kept if whole."""
        name = _hub_name(body.model or body.name or "")
        lines = self._lines(exchange, name)
        if body.stream is not False:
            return Stream(chunks=lines, media_type=STREAM_TYPE)
        async for _ in lines:
            pass
        return Json(value=OllamaProgress(status="success"))

    async def _lines(self, exchange: Exchange, name: HubName) -> AsyncGenerator[bytes, None]:
        """Yield a line for each step. Ending early cancels the download.

        Raises HttpError 409 while the same model is pulled, 429 while MAX_PULLS others are.
        """
        if str(name) in self._running:
            raise refused(f"{name} is being pulled already: wait until that ends", status=409)
        if len(self._running) >= MAX_PULLS:
            raise too_many(f"{MAX_PULLS} models are being pulled already", RETRY_S)
        told: asyncio.Queue[OllamaProgress] = asyncio.Queue()

        def progress(done: int, total: int) -> None:
            told.put_nowait(OllamaProgress(status=f"pulling {name}", total=total, completed=done))

        self._running.add(str(name))
        pulling = asyncio.ensure_future(self._pull(name, progress, exchange.service.settings.log))
        try:
            yield line(OllamaProgress(status="pulling manifest"))
            while not (pulling.done() and told.empty()):
                getting = asyncio.ensure_future(told.get())
                try:
                    await asyncio.wait({pulling, getting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not getting.done():
                        getting.cancel()
                if getting.done() and not getting.cancelled():
                    yield line(getting.result())
            await pulling
            exchange.service.models.forget()
            yield line(OllamaProgress(status="success"))
        finally:
            self._running.discard(str(name))
            pulling.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pulling


async def push(exchange: Exchange, body: None) -> Reply:
    """Say what there is instead. Raises HttpError 400."""
    raise refused("/api/push is not done by this server: upload with the Hub's own programs")


def _hub_name(text: str) -> HubName:
    """Read ORG/NAME or ORG/NAME:GGUF. Raises HttpError 400."""
    plain = text.removesuffix(TAG)
    for host in _HOSTS:
        plain = plain.removeprefix(host)
    name = HubName.parse(plain) if "/" in plain else None
    if name is None:
        what = f"model is {shown(text)}, which is none of the Hugging Face Hub"
        raise refused(f"{what}: give ORG/NAME or ORG/NAME:GGUF", "model")
    return name


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
