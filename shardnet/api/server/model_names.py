"""The names by which programs ask for models, and what each means to the nodes.

Knows the default model and what the nodes have. Must not know any dialect.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from shardnet.api.client import Client
from shardnet.api.server.errors import HttpError, refused
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.checkpoint.model_names import is_path, match, nearest_name, short_name
from shardnet.errors import ShardnetError, UsageError
from shardnet.wire.messages.household import HOUSEHOLD_STORE
from shardnet.wire.messages.plans import AdapterScale, ModelChoice

FRESH_S: Final = 30.0
"""A list counts for so long."""
LIST_S: Final = 2.0
"""How long the nodes may take to name their models: a program that lists them waits."""
MAX_LISTED: Final = 1000
MAX_ALIASES: Final = 1000
ANY: Final = "*"
"""The alias of every name that means no model."""
NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})
LATEST_S: Final = 253_402_300_799
"""The last second that has a date."""
NAMED: Final = 5
"""How many names an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that may be asked for: its `name`, and the `choice` that the nodes are sent."""

    name: str
    choice: ModelChoice

    @property
    def is_adapted(self) -> bool:
        """Whether it is another model with a LoRA adapter."""
        return bool(self.choice.used_adapters)


class ModelNames:
    """Finds models by name, and lists them."""

    def __init__(
        self,
        client: Client,
        *,
        current: Callable[[], ModelChoice | None] | None = None,
        may_switch: bool = True,
        aliases: Mapping[str, str] = NO_ALIASES,
    ) -> None:
        """Take the client.

        The default model is what `current` returns or returned last, else the client's choice.
        Without `may_switch` there is no other one, unless `current` says that there is none.
        `aliases` are other names of models, the model of ANY that of every name there is not.
        """
        self._aliases = dict(aliases)
        self._client = client
        self._current = current
        self._may_switch = may_switch
        self._last: ModelChoice | None = None
        self._listed: dict[str, int] = {}
        self._named_path = ""
        self._listed_at_s = -FRESH_S
        self._listing = asyncio.Lock()
        self._household: list[str] = []
        """What models of the household are called, the most important first."""

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        self._last = (self._current() if self._current else None) or self._last
        choice = self._last or self._client.choice
        if self._household and self._last is None:
            choice = _other(choice, self._household[0])
        return ServedModel(name=short_name(choice.model), choice=choice)

    async def find(self, name: str | None) -> ServedModel:
        """Return the model that `name` means, perhaps as an alias, the default for none.

        Raises HttpError 404, with names that would do, if there is none, 400 if it may be several.
        """
        if name and name in self._aliases:
            return await self._find(self._aliases[name])
        try:
            return await self._find(name)
        except HttpError:
            if ANY not in self._aliases:
                raise
        return await self._find(self._aliases[ANY])

    async def _find(self, name: str | None) -> ServedModel:
        if not name:
            await self._every()
        default = self.default
        if not name or name in (default.name, default.choice.model):
            return default
        for adapted in _adapted(default):
            if name == adapted.name:
                return adapted
        every = await self._every()
        served = {model.name: model for model in every if not model.is_adapted}
        for model in served.values():
            if name == model.choice.model:
                return model
        try:
            found = match(name, served)
        except UsageError as error:
            raise _unknown(str(error)) from error
        if found is not None:
            return served[found]
        near = nearest_name(name, served)
        others = [other for other in (near, *served) if other]
        known = ", ".join(dict.fromkeys(others[: NAMED + 1]))
        more = f" and {len(served) - NAMED} more" if len(served) > NAMED else ""
        if self._is_fixed:
            more = ", and this server does not change the model of the ring (--switch never)"
        raise _unknown(f"there is no model '{name[:200]}'; there is {known}{more}")

    async def list(self) -> list[ServedModel]:
        """List the default model, all others that the nodes have, and what else they are called."""
        every = await self._every()
        served = {model.name: model for model in every}
        known = {model.choice.model: model for model in reversed(every)} | served
        further = [
            ServedModel(name=name, choice=known[meant].choice)
            for name, meant in self._aliases.items()
            if name not in (ANY, *served) and meant in known
        ]
        return [*served.values(), *further]

    def modified_s(self, served: ServedModel) -> int:
        """Return when a listed model last changed, in seconds since 1970, 0 if nobody said so."""
        return self._listed.get(served.choice.model, 0)

    def add_alias(self, name: str, meant: str) -> None:
        """Give the model `meant` a further name. Raises HttpError 400 for MAX_ALIASES others."""
        if len(self._aliases) >= MAX_ALIASES and name not in self._aliases:
            raise refused(f"models have {MAX_ALIASES} further names already", "destination")
        if name != meant:
            self._aliases[name] = meant

    def drop_alias(self, name: str) -> bool:
        """Drop a further name; say whether there was one."""
        return self._aliases.pop(name, None) is not None

    def is_of_household(self, model: str) -> bool:
        """Say whether what nodes are sent is a model of the household: it waits for no turn."""
        return model in self._household

    def forget(self) -> None:
        """Have the nodes asked anew: they have another model."""
        self._listed_at_s = -FRESH_S

    async def _every(self) -> tuple[ServedModel, ...]:
        """Return the models by their own names, the default one first."""
        default = self.default
        async with self._listing:
            if time.monotonic() - self._listed_at_s >= FRESH_S:
                await self._refresh()
        if self._is_fixed:
            own = (default, *_adapted(default))
            of_household = [name for name in self._household if name != default.name]
            return (*own, *(_served(self._client.choice, name) for name in of_household))
        known = (default.name, default.choice.model, self._named_path)
        names = [name for name in {**self._listed, DEFAULT_MODEL_NAME: 0} if name not in known]
        alike = Counter([default.name, *map(short_name, names)])
        others = (
            ServedModel(
                name=short_name(name) if alike[short_name(name)] == 1 else name,
                choice=_other(self._client.choice, name),
            )
            for name in names
        )
        return (default, *_adapted(default), *others)

    def shown(self, text: str) -> str:
        """Return a text as clients see it: with the names of models, not where they lie."""
        for model in (self.default.choice.model, *self._listed):
            text = text.replace(model, short_name(model))
        return text

    @property
    def _is_fixed(self) -> bool:
        """Whether the ring has a model that it keeps."""
        return not self._may_switch and (self._current is None or self._current() is not None)

    async def _refresh(self) -> None:
        """Ask the nodes. What they do not say in time is what they said before."""
        found: dict[str, int] = {}
        household: list[str] = []
        model = self.default.choice.model
        self._named_path = model if is_path(model) else ""
        try:
            pieces = self._client.models(names_only=True, model=self._named_path)
            async with asyncio.timeout(LIST_S), aclosing(pieces):
                async for piece in pieces:
                    usable = (model for model in piece.models if not model.failure)
                    for listed in usable:
                        found[listed.name] = listed.modified_s
                        if listed.store == HOUSEHOLD_STORE and listed.name not in household:
                            household.append(listed.name)
                    if len(found) >= MAX_LISTED:
                        break
        except (ShardnetError, TimeoutError):
            found = {**self._listed, **found}
            household = household or self._household
        self._household = household
        self._listed, self._listed_at_s = found, time.monotonic()


def written(at_s: int) -> str:
    """Write a time, in seconds since 1970, as programs read it."""
    return datetime.fromtimestamp(min(at_s, LATEST_S), UTC).isoformat().replace("+00:00", "Z")


def _served(choice: ModelChoice, model: str) -> ServedModel:
    return ServedModel(name=model, choice=_other(choice, model))


def _other(choice: ModelChoice, model: str) -> ModelChoice:
    """Return the choice of another model, for which the adapters of this one are not."""
    return replace(choice, model=model, adapters=[], used_adapters=[])


def _adapted(model: ServedModel) -> list[ServedModel]:
    """List a model with each of its LoRA adapters, as `MODEL:ADAPTER`."""
    return [
        ServedModel(
            name=f"{model.name}:{adapter.name}",
            choice=replace(model.choice, used_adapters=[AdapterScale(adapter.name, 1.0)]),
        )
        for adapter in model.choice.adapters
    ]


def _unknown(message: str) -> HttpError:
    return refused(message, "model", status=404, code="model_not_found")
