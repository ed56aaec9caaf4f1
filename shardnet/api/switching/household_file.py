"""The file that names the models of a household.

Knows its keys. Must not know how models are loaded.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from shardnet.api.switching.model_switch import parse_duration
from shardnet.errors import ConfigurationError
from shardnet.types import PathText
from shardnet.wire.messages.household import MAX_HOUSEHOLD, HouseholdModel
from shardnet.wire.messages.plans import ModelChoice

MAX_BYTES: Final = 1 << 20
OPTIONS: Final = (
    *("context", "dtype", "quant", "kv_dtype", "wire_dtype", "optimise", "stream_layers", "arith"),
    *("standby", "nodes_per_stage", "mtp"),
)
"""The keys of a model that are options of its ring, as `shardnet generate` has them."""


class HouseholdEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """What a file, or a page, says of a model of the household."""

    model: PathText
    priority: int = 0
    keep: bool = False
    idle_unload: str = ""
    parallel: int = 1
    nodes: list[str] = []
    options: dict[str, Any] = {}

    def named(self, name: str) -> HouseholdModel:
        """Return the model. Raises ValueError, which names what is wrong."""
        choice = {"model": os.path.expanduser(self.model), **self.options}
        model = {
            "name": name,
            "choice": msgspec.convert(choice, ModelChoice),
            "priority": self.priority,
            "kept": self.keep,
            "idle_s": parse_duration(self.idle_unload) if self.idle_unload else None,
            "parallel": self.parallel,
            "only": self.nodes,
        }
        return msgspec.convert(model, HouseholdModel)


def read_household(path: Path) -> list[HouseholdModel]:
    """Read the models of a file. Raises ConfigurationError, which names the file and the key."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES)
        told = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from error
    models = told.pop("models", None)
    if told or not isinstance(models, dict) or not models:
        raise ConfigurationError(
            f"{path} has no table [models.NAME]" if not told else f"{path}: unknown {sorted(told)}",
            remedy='write [models.NAME] and below it model = "…" for each model',
        )
    if len(models) > MAX_HOUSEHOLD:
        raise ConfigurationError(f"{path} has {len(models)} models: {MAX_HOUSEHOLD} at most")
    return [_read(path, name, entry) for name, entry in models.items()]


def _read(path: Path, name: str, entry: Any) -> HouseholdModel:
    try:
        keys = {key.replace("_", "-"): value for key, value in dict(entry).items()}
        options = {key: keys.pop(key.replace("_", "-")) for key in OPTIONS if _is_in(key, keys)}
        return msgspec.convert({**keys, "options": options}, HouseholdEntry).named(name)
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path}: models.{name}: {error}") from error


def _is_in(option: str, keys: dict[str, Any]) -> bool:
    return option.replace("_", "-") in keys
