"""A compute that a package adds beside torch's: `shardnet node --device NAME` has it compute.

docs/extending.md shows how, with an example. Must not know where plug-ins come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.errors import ConfigurationError
from shardnet.plugins import COMPUTES, installed, installed_names
from shardnet.runtime.stage.compute import StageCompute
from shardnet.types import DType

if TYPE_CHECKING:
    from shardnet.checkpoint.checkpoint import Checkpoint
    from shardnet.model.sampling.sampler import Sampler
    from shardnet.runtime.stage.stage_order import StageOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """A stage that a plug-in is to load; what `order` says of the model has been checked.

    `checkpoint` is open. `sampler` is the tail's, None on other stages. Weights and KV cache may
    take `memory_bytes`, of which another stage holds `held_bytes` until this one is in use.
    `progress` is to be called with (bytes done, bytes in all), each 30 s at
    the least; what it raises ends the loading.
    """

    order: StageOrder
    checkpoint: Checkpoint
    sampler: Sampler | None
    memory_bytes: int
    progress: Callable[[int, int], None]
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluggedStage:
    """A stage that a plug-in has loaded.

    `weight_bytes` is the memory of its weights, `room_blocks` how many KV blocks of 256 positions
    it has room for: the head books no more. `kernel` says to people what computes. Up to
    `exact_rows` rows in one step are computed with the same bits as each alone.
    """

    compute: StageCompute
    weight_bytes: int
    room_blocks: int
    kernel: str
    exact_rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlugin:
    """Another compute. `description` is what people see as a node's device.

    `dtypes` are those it computes in without falling back to another, best first. `load` runs on
    the loading thread; it raises CapacityError where the stage or one context does not fit,
    UnsupportedModelError for a model that it cannot compute. `free_bytes` returns the free memory
    of the device, None where that is the machine's own.
    """

    name: str
    description: str
    dtypes: tuple[DType, ...]
    load: Callable[[StageJob], PluggedStage]
    free_bytes: Callable[[], int] | None = None


def installed_compute(name: str) -> ComputePlugin:
    """Return the plug-in that an installed package adds under `name`. Raises ConfigurationError."""
    found = installed(COMPUTES, name)
    if isinstance(found, ComputePlugin):
        return found
    raise ConfigurationError(
        f"{name!r} of {COMPUTES} should be a ComputePlugin, and is a {type(found).__name__}",
        remedy="uninstall the package that adds it, or tell its makers",
    )


def installed_computes() -> list[str]:
    """List the names of the plug-ins that installed packages add."""
    return installed_names(COMPUTES)
