"""The version, and the models: which there are, what each can do, which one is loaded."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from shardnet import __version__
from shardnet.api.ollama.answers import now
from shardnet.api.ollama.body import OllamaShow
from shardnet.api.ollama.facts import Facts, ModelFacts, find_model
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.model_names import ServedModel, written
from shardnet.api.server.service import Exchange
from shardnet.checkpoint.model_names import short_name
from shardnet.wire.messages.membership import ListedModel
from shardnet.wire.messages.plans import ModelChoice

API_VERSION: Final = "0.14.2"
"""The version of Ollama whose requests are understood: programs refuse to talk to an old one."""

_NEVER: Final = "9999-12-31T23:59:59Z"


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
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    """Models."""

    models: list[OllamaModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """What is known of a model."""

    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


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
            model = _model(served.name, listed)
            model.modified_at, model.size = written(listed.modified_s), listed.size_bytes
            models.append(model)
        return Json(value=OllamaModels(models=models))


class Running:
    """Lists the models that nodes have loaded: what they take, and of that what GPUs hold."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts

    async def __call__(self, exchange: Exchange, body: None) -> Reply:
        """List them."""
        status = await exchange.service.client.status(with_peers=True)
        stages = [(info.device, info.stage) for info in (status.node, *status.peers) if info.stage]
        served = {one.choice.model: one for one in reversed(await exchange.service.models.list())}
        expires_s = exchange.service.switch.expires_s
        models = []
        for loaded in dict.fromkeys(stage.model for _, stage in stages):
            known = served.get(loaded) or ServedModel(
                name=short_name(loaded), choice=ModelChoice(model=loaded)
            )
            listed = await self._facts.listed(exchange, known)
            model = _model(known.name, listed)
            layers = Counter[bool]()
            for device, stage in stages:
                if stage.model == loaded:
                    layers[device != "cpu"] += stage.layers[1] - stage.layers[0]
            model.size = listed.size_bytes
            model.size_vram = listed.size_bytes * layers[True] // max(1, layers.total())
            model.context_length = self._facts.context_of(known, listed)
            model.expires_at = _NEVER if expires_s is None else now(expires_s)
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
    listed = facts.listed
    family = listed.family or "unknown"
    known: dict[str, str | int] = {
        "general.architecture": family,
        "general.basename": name,
        "general.license": listed.licence,
        "general.parameter_count": listed.parameters,
        f"{family}.context_length": facts.context,
    }
    return OllamaShown(
        license=listed.licence,
        template=facts.template,
        details=_details(listed),
        model_info={key: value for key, value in known.items() if value},
        capabilities=list(facts.capabilities),
        modified_at=written(listed.modified_s),
    )


def _details(listed: ListedModel) -> OllamaDetails:
    return OllamaDetails(
        family=listed.family,
        families=[listed.family] if listed.family else [],
        parameter_size=_size(listed.parameters),
        quantization_level=listed.form,
    )


def _size(parameters: int) -> str:
    """Write how many parameters a model has as Ollama does: 8.0B, 268.10M."""
    if parameters >= 10**9:
        return f"{parameters / 10**9:.1f}B"
    return f"{parameters / 10**6:.2f}M" if parameters else ""


def _model(name: str, listed: ListedModel) -> OllamaModel:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return OllamaModel(name=name, model=name, digest=digest, details=_details(listed))
