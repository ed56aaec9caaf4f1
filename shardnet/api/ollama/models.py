"""The version, and the models: which there are, what each can do, which one is loaded."""

from __future__ import annotations

import hashlib
from pathlib import PurePath
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from shardnet import __version__
from shardnet.api.ollama.answers import now
from shardnet.api.ollama.body import OllamaShow
from shardnet.api.ollama.facts import Facts, ModelFacts
from shardnet.api.ollama.names import find_model
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.service import Exchange

API_VERSION: Final = "0.14.2"
"""The version of Ollama whose requests are understood: programs refuse to talk to an old one."""

_NEVER: Final = "9999-12-31T23:59:59Z"
_UNKNOWN: Final = "1970-01-01T00:00:00Z"


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The version of the API that is understood; who answers, and for how long that has run."""

    version: str = API_VERSION
    shardnet: str = __version__
    node: str
    uptime_s: float


class OllamaDetails(msgspec.Struct, kw_only=True):
    """What a model is; "" where it is not known."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model. The digest is that of its name; a size of 0 is not known."""

    name: str
    model: str
    modified_at: str | UnsetType = UNSET
    size: int = 0
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    """Models."""

    models: list[OllamaModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """What is known of a model."""

    modelfile: str = ""
    parameters: str = ""
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str = _UNKNOWN


async def version(exchange: Exchange, body: None) -> Reply:
    """Say which version of Ollama's API this is."""
    service = exchange.service
    return Json(value=OllamaVersion(node=service.client.node_name, uptime_s=service.uptime_s))


class Tags:
    """Lists the models that may be asked for, the default one first, as far as they are known."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts

    async def __call__(self, exchange: Exchange, body: None) -> Reply:
        """List them."""
        models = []
        for served in await exchange.service.models.list():
            listed = await self._facts.listed(exchange, served)
            model = _model(served.name)
            model.modified_at = _UNKNOWN
            model.size = listed.size_bytes
            model.details = _details(listed.family, listed.form)
            models.append(model)
        return Json(value=OllamaModels(models=models))


async def running(exchange: Exchange, body: None) -> Reply:
    """List the models that nodes have loaded."""
    names = {one.choice.model: one.name for one in await exchange.service.models.list()}
    status = await exchange.service.client.status(with_peers=True)
    loaded = [info.stage.model for info in (status.node, *status.peers) if info.stage is not None]
    models = []
    expires_s = exchange.service.switch.expires_s
    for path in dict.fromkeys(loaded):
        model = _model(names.get(path) or PurePath(path).name)
        model.expires_at, model.size_vram = _NEVER if expires_s is None else now(expires_s), 0
        models.append(model)
    return Json(value=OllamaModels(models=models))


class Show:
    """Describes a model, as far as that can be known without switching to it."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts

    async def __call__(self, exchange: Exchange, body: OllamaShow) -> Reply:
        """Describe one."""
        served = await find_model(exchange.service.models, body.model or body.name)
        return Json(value=_shown(served.name, await self._facts.of(exchange, served)))


def _shown(name: str, facts: Facts) -> OllamaShown:
    info: dict[str, str | int] = {
        "general.architecture": facts.family,
        "general.basename": name,
    }
    if facts.context:
        info[f"{facts.family}.context_length"] = facts.context
    return OllamaShown(
        template=facts.template,
        details=_details(facts.family, facts.form),
        model_info=info,
        capabilities=list(facts.capabilities),
    )


def _details(family: str, form: str) -> OllamaDetails:
    families = [family] if family else []
    return OllamaDetails(family=family, families=families, quantization_level=form)


def _model(name: str) -> OllamaModel:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return OllamaModel(name=name, model=name, digest=digest, details=OllamaDetails())
