"""The models as Ollama's programs see them: which there are, what each can do, which is loaded.

A program asks of every model that it is told of, and a ring has one at a time: only the default
model may be loaded for it, and no other one unloaded. Of others it is known what the nodes say, and
what they were when they were used last.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from shardnet import __version__
from shardnet.api.chat_formats.choice import choose_format
from shardnet.api.chat_formats.marks import TokenText
from shardnet.api.ollama.body import OllamaShow, now
from shardnet.api.requests import added_ids, has_marks
from shardnet.api.server.endpoint import Json, Reply
from shardnet.api.server.errors import HttpError
from shardnet.api.server.model_names import FRESH_S, MAX_LISTED, ModelNames, ServedModel, written
from shardnet.api.server.service import Exchange
from shardnet.checkpoint.model_names import is_path, short_name
from shardnet.errors import ShardnetError
from shardnet.types import remember
from shardnet.wire.messages.chat import TokenizerDescribed
from shardnet.wire.messages.membership import ListedModel
from shardnet.wire.messages.plans import ModelChoice

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


class ModelFacts:
    """Remembers what was found out."""

    def __init__(self) -> None:
        self._contexts: dict[str, int] = {}
        self._listed: dict[str, ListedModel] = {}
        self._listed_at_s: float | None = None
        self._listing = asyncio.Lock()

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
            remember(self._contexts, name, told.context, MAX_KNOWN)
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
            path = model if is_path(model) else ""
            pieces = exchange.service.client.models(model=path)
            async with asyncio.timeout(ASK_S), aclosing(pieces):
                async for piece in pieces:
                    found.update((model.name, model) for model in piece.models)
                    if len(found) >= MAX_LISTED:
                        break
        self._listed = found or self._listed
        self._listed_at_s = time.monotonic()

    async def tags(self, exchange: Exchange, body: None) -> Reply:
        """List the models that may be asked for, the default one first, as far as is known."""
        models = []
        for served in await exchange.service.models.list():
            listed = await self.listed(exchange, served)
            model = _model(served.name, listed)
            model.modified_at, model.size = written(listed.modified_s), listed.size_bytes
            models.append(model)
        return Json(value=OllamaModels(models=models))

    async def running(self, exchange: Exchange, body: None) -> Reply:
        """List the models that nodes have loaded: what they take, and of that what GPUs hold."""
        status = await exchange.service.client.status(with_peers=True)
        stages = [(info.device, info.stage) for info in (status.node, *status.peers) if info.stage]
        served = {one.choice.model: one for one in reversed(await exchange.service.models.list())}
        expires_s = exchange.service.switch.expires_s
        models = []
        for loaded in dict.fromkeys(stage.model for _, stage in stages):
            known = served.get(loaded) or ServedModel(
                name=short_name(loaded), choice=ModelChoice(model=loaded)
            )
            listed = await self.listed(exchange, known)
            model = _model(known.name, listed)
            layers = Counter[bool]()
            for device, stage in stages:
                if stage.model == loaded:
                    layers[device != "cpu"] += stage.layers[1] - stage.layers[0]
            model.size = listed.size_bytes
            model.size_vram = listed.size_bytes * layers[True] // max(1, layers.total())
            model.context_length = self.context_of(known, listed)
            model.expires_at = _NEVER if expires_s is None else now(expires_s)
            models.append(model)
        return Json(value=OllamaModels(models=models))

    async def show(self, exchange: Exchange, body: OllamaShow) -> Reply:
        """Describe a model, as far as that can be known without switching to it."""
        served = await find_model(exchange.service.models, body.model or body.name)
        listed, described = await self.listed(exchange, served), None
        if listed.kind:
            shown = _shown(served.name, listed, listed.context, "", ("embedding",))
            return Json(value=shown)
        with contextlib.suppress(ShardnetError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                described = await self._described(exchange, served)
        template = described.template if described is not None else ""
        context, words = self.context_of(served, listed), capabilities_of(described)
        return Json(value=_shown(served.name, listed, context, template, words))


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


def _shown(
    name: str, listed: ListedModel, context: int, template: str, capabilities: Sequence[str]
) -> OllamaShown:
    """Describe a model: `context` is 0 and `template` "" where it is not known."""
    family = listed.family or "unknown"
    known: dict[str, str | int] = {
        "general.architecture": family,
        "general.basename": name,
        "general.license": listed.licence,
        "general.parameter_count": listed.parameters,
        f"{family}.context_length": context,
    }
    return OllamaShown(
        license=listed.licence,
        template=template,
        details=_details(listed),
        model_info={key: value for key, value in known.items() if value},
        capabilities=[*capabilities],
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
