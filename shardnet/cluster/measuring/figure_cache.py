"""Cache what this machine has measured of itself: a file per model shape.

Knows what a figure depends on, and which files are valid. Must not know how anything is measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardnet.files import read_own, write_whole
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.runtime.loading.measuring import StageFigures
from shardnet.types import Arith, DType, KvDType, Strict

FOLDER = "figures"

UNSTEADY_GOOD_FOR_S = 300.0
"""A figure from a busy device is measured again when it is older."""

_SHAPE_FIELDS = (
    "family",
    "n_layers",
    "hidden_size",
    "n_heads",
    "n_kv_heads",
    "head_size",
    "full_heads",
    "intermediate_size",
    "vocab_size",
    "activation",
    "attention_bias",
    "mlp_bias",
    "attention_soft_cap",
    "experts",
    "checkpoint_dtype",
    "value_size",
    "has_gates",
    "latent",
    "delta_net",
    "short_conv",
    "mixerless_layers",
    "indexer",
    "streams",
    "mlp_limit",
    "late_limits",
)
"""Fields of a config that the time of a step depends on. In which dtype weights are stored decides
how they are held, and computed, in a ring of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureKey:
    """What a figure depends on: `isa`, `arithmetic` and `torch` are those of `Device`, `cores` are
    those that the process may use.
    """

    shape: tuple[tuple[str, str], ...]
    dtype: DType
    quant: Quantization | None = None
    kv_dtype: KvDType = KvDType.AUTO
    arith: Arith = Arith.FAST
    device: str
    isa: str
    arithmetic: str
    torch: str
    threads: int
    cores: int
    version: str
    host: str

    @property
    def file_name(self) -> str:
        """The name of the figure's file."""
        return f"{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]}.json"


def shape_of(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Return the fields of a config that the time of a step depends on, each with its name."""
    return tuple((name, str(getattr(config, name))) for name in _SHAPE_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured, and when in seconds since 1970."""

    stage: StageFigures
    measured_at_s: float


class _Written(Strict, frozen=True, kw_only=True):
    """What a file has: the figure, and of what it speaks."""

    key: FigureKey
    figure: Figure


class FigureCache:
    """Figures by key, in memory and in the cache `folder`. `log` gets a line once if the disk
    fails. `now_s` returns the seconds since 1970.
    """

    def __init__(
        self, folder: Path, log: Callable[[str], None], now_s: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder / FOLDER
        self._log = log
        self._now_s = now_s
        self._known: dict[FigureKey, Figure] = {}
        self._gathers: dict[tuple[FigureKey, int], float] = {}
        self._has_logged = False

    def get(self, key: FigureKey) -> Figure | None:
        """Return the figure of `key`, None without one.

        The file counts before what is in memory: another node of this machine may have measured
        since, or a generation there may have corrected the figure. A damaged file counts as none,
        and so does a figure from a busy device after UNSTEADY_GOOD_FOR_S.
        """
        found = _read(self._folder / key.file_name, key)
        if found is not None:
            self._known[key] = found
        known = self._known.get(key)
        if known is not None and not known.stage.is_steady:
            age_s = self._now_s() - known.measured_at_s
            if not 0 <= age_s < UNSTEADY_GOOD_FOR_S:
                del self._known[key]
                return None
        return known

    def put(self, key: FigureKey, figure: Figure) -> None:
        """Cache a figure, in memory alone if the disk fails."""
        self._known[key] = figure
        content = msgspec.json.encode(_Written(key=key, figure=figure))
        try:
            write_whole(self._folder / key.file_name, msgspec.json.format(content, indent=1))
        except OSError as error:
            if not self._has_logged:
                self._log(f"figures are not kept in {self._folder}: {error}")
            self._has_logged = True

    def gather_s(self, key: FigureKey, n_shards: int) -> float | None:
        """Return what it takes so many devices, each like that of `key`, to join parts; None if
        that was not measured.
        """
        try:
            took_s = float(json.loads(read_own(self._gather_path(key, n_shards)))["gather_s"])
        except (OSError, ValueError, TypeError, KeyError):
            return self._gathers.get((key, n_shards))
        return took_s if 0 < took_s < 1 else None

    def keeps_gather(self, key: FigureKey, n_shards: int) -> bool:
        """Say whether that was measured undisturbed, so that it need not be measured again."""
        return self._gather_path(key, n_shards).exists()

    def put_gather(
        self, key: FigureKey, n_shards: int, gather_s: float, *, keeps: bool = True
    ) -> None:
        """Cache what it takes to join parts.

        In memory alone if the disk fails, or unless it `keeps`, as after a disturbed measurement.
        """
        self._gathers[key, n_shards] = gather_s
        if keeps:
            path = self._gather_path(key, n_shards)
            with contextlib.suppress(OSError):
                write_whole(path, json.dumps({"gather_s": gather_s}).encode())

    def _gather_path(self, key: FigureKey, n_shards: int) -> Path:
        """Return the file of a gather: the model and its dtypes do not matter."""
        machine = [key.device, key.isa, key.threads, key.cores, key.version, key.host, n_shards]
        name = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:24]
        return self._folder / f"gather-{name}.json"


def _read(path: Path, key: FigureKey) -> Figure | None:
    try:
        written = msgspec.json.decode(read_own(path), type=_Written)
    except (OSError, msgspec.DecodeError):  # none yet, half a file, another version's
        return None
    stage = written.figure.stage
    times = (stage.layer_s, stage.layer_256_s, stage.embed_s, stage.head_s)
    is_whole = written.key == key and all(0 < time_s < 3600 for time_s in times)
    return written.figure if is_whole else None
