"""How fast this machine is with one model: its layers, its LM head, its disk.

Knows how often to repeat a measurement and how to summarise it. Runs on the compute thread, the
disk measurement on another. Must not know nodes, plans or where figures are stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardnet.checkpoint.tensors.checkpoint_files import folder_entries, open_file
from shardnet.checkpoint.tensors.manifest import TENSOR_SUFFIXES
from shardnet.errors import CapacityError, CheckpointError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.registry import parse_config
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.types import PREFILL_CHUNK_ROWS, Arith, DType, KvDType, LayerRange
from shardnet.wire.messages.measurements import StageSeconds

if TYPE_CHECKING:
    from shardnet.stage.synthetic_model import StepTimes, SyntheticModel

WINDOW_S = 0.1
"""Steps are averaged over this long: a process with a limited share of the processor alternates
between full speed and standing still several times within it."""
N_WINDOWS = 5
FIGURE_S = 1.0
"""A figure takes no longer than this once it has the windows that it needs."""
CHUNK_S = 8.0
"""A chunk of 256 rows that would take longer is measured with fewer rows."""

_LAYERS_ON_DEVICE = 8
"""Of a GPU so many are measured: to hand it a step takes as long as a layer or two."""

STEADY = 1.25
"""On an undisturbed device the median window takes at most this many times the fastest."""

READ_BYTES = 256 * 2**20
"""How much memory is read."""
DISK_BYTES = 64 * 2**20
DISK_S = 0.3
"""Most bytes and seconds of reading from a checkpoint."""
_DISK_PIECE_BYTES = 2**20


Drive = Callable[[Callable[[], bool]], float]
"""Runs a step until it returns False; returns the seconds that a token takes beside it."""


def in_a_row(step: Callable[[], bool]) -> float:
    """Run steps with nothing between them (Drive)."""
    while step():
        pass
    return 0.0


class StageFigures(StageSeconds, frozen=True, kw_only=True):
    """Measured times of a device for one model, to two significant digits.

    `head_s` has norm, LM head and greedy sampling; the fixed cost of a step is part of it and of
    `embed_s`. `kernel` names the linear kernel. Without `is_steady` something else kept the machine
    or the device busy meanwhile.
    """

    kernel: str
    is_steady: bool = True

    def compute_s(self, layers: LayerRange, n_layers: int) -> float:
        """Predict the seconds of a stage with these of `n_layers` layers for one row."""
        is_first, is_last = layers.start == 0, layers.end == n_layers
        return len(layers) * self.layer_s + is_first * self.embed_s + is_last * self.head_s

    def scaled(self, factor: float) -> StageFigures:
        """Return the figures with all that is computed taking `factor` times as long."""
        return replace(
            self,
            layer_s=rounded(self.layer_s * factor),
            layer_256_s=rounded(self.layer_256_s * factor),
            embed_s=rounded(self.embed_s * factor),
            head_s=rounded(self.head_s * factor),
        )


def read_config(text: str, where: str, *, ignore_unknown_config: bool = False) -> ModelConfig:
    """Read a config.json that came as text from `where`. Raises CheckpointError as parsing does.

    Unknown keys are refused unless `ignore_unknown_config`.
    """
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where}: expected a JSON object")
        return parse_config(raw, where, [] if ignore_unknown_config else None)
    except (ValueError, RecursionError) as error:  # of an error's text, too: it has the value
        raise CheckpointError(f"{where}: not readable as JSON ({error})") from error


def measure_stage(
    config: ModelConfig,
    dtype: DType,
    quant: Quantization | None = None,
    kv_dtype: KvDType = KvDType.AUTO,
    arith: Arith = Arith.FAST,
    *,
    device: str,
    threads: int,
    memory_bytes: int,
    tick: Callable[[], None],
    drive: Drive = in_a_row,
    driver: str = "",
) -> StageFigures:
    """Measure a model of the shape of `config` in random weights, with `threads` threads.

    `dtype`, `quant`, `kv_dtype` and `arith` are the ring's; the compute dtype is chosen as
    in loading; with a `driver` the kernel text computes there. It takes one to three seconds for
    usual models and at most `memory_bytes`. `tick` is called between the parts; an error that it
    raises ends the measurement. Decode steps are run by `drive`, which tells what a token takes
    beside them.

    Each figure is the median of the means of time windows, which ignores single disturbances and
    includes a limited share of the processor. Where other programs took processors meanwhile, it is
    the fastest window, and the figures are not steady. For a huge LM head a slice of the vocabulary
    is measured and scaled up, for a slow machine fewer rows of the chunk. Raises CapacityError when
    memory does not hold one layer.
    """
    import torch

    from shardnet.model.devices.bits import open_device
    from shardnet.model.kernels.devices import capacity_error_for
    from shardnet.model.kernels.linear import probe
    from shardnet.stage.estimate.memory_estimate import WeightForm, graph_bytes
    from shardnet.stage.synthetic_model import SyntheticModel, synthetic_config

    with _threads(threads):
        is_host = device == "cpu" and not driver
        rate = measure_reads(min(READ_BYTES, memory_bytes)) if is_host else None
        choice = probe(torch.device(device), dtype, config.checkpoint_dtype, quant, arith)
        choice = dataclasses.replace(choice, kv_form=kv_dtype)
        if device == "cuda":
            memory_bytes -= graph_bytes(config, choice.dtype)
        form = WeightForm(
            dtype=choice.dtype,
            quant=None if choice.unpacks else quant,
            linear_dtype=choice.stored_dtype,
        )
        least = _LAYERS_ON_DEVICE if driver or device != "cpu" else 1
        sample = synthetic_config(config, form, memory_bytes, kv_dtype, least)
        if sample is None:
            raise CapacityError(
                f"measuring needs the memory of one layer, and only {memory_bytes / 2**20:.0f} MiB "
                "are free here",
                remedy="give the node more --memory",
            )
        with capacity_error_for(f"{device} has no memory left to measure in"):
            on = open_device(driver) if driver else None
            model = SyntheticModel(sample, choice, torch.device(device), tick, on)
            if on is not None:
                choice = dataclasses.replace(choice, by_text=on.driver.description)
            model.step(1)  # the first one only warms up
            before = ProcessorUse.now()
            singles = Windows(lambda: model.step(1), at_least=3, tick=tick)
            step_s = drive(singles.step)
            chunk_s = _chunk_s(model, tick)
            is_disturbed = before.disturbed(ProcessorUse.now())
    figures = _figures(
        config, sample, choice.name, singles.means, chunk_s, is_disturbed=is_disturbed
    )
    return replace(figures, step_s=rounded(step_s), read_bytes_per_s=rate)


def measure_reads(n_bytes: int) -> float | None:
    """Sum up so much memory several times; return the bytes per second of the fastest.

    None for so little that caches hold it.
    """
    import torch

    if n_bytes < READ_BYTES // 4:
        return None
    memory = torch.ones(n_bytes // 4)
    return rounded(n_bytes / min(timeit.repeat(memory.sum, number=1, repeat=3)))


def _figures(
    config: ModelConfig,
    sample: ModelConfig,
    kernel: str,
    single: Sequence[StepTimes],
    chunk_s: float,
    *,
    is_disturbed: bool,
) -> StageFigures:
    """Scale the times of a smaller `sample` model to the model of `config`."""
    typical = min if is_disturbed else statistics.median
    plan_s = typical([times.plan_s for times in single])
    head_s = typical([times.head_s for times in single])
    sample_s = typical([times.sample_s for times in single])
    return StageFigures(
        layer_s=rounded(typical([times.layers_s for times in single]) / sample.n_layers),
        layer_256_s=rounded(chunk_s / sample.n_layers),
        embed_s=rounded(plan_s + typical([times.embed_s for times in single])),
        head_s=rounded(plan_s + sample_s + head_s * config.vocab_size / sample.vocab_size),
        kernel=kernel,
        is_steady=not is_disturbed and _is_steady([times.layers_s for times in single]),
    )


def measure_disk(path: Path) -> float | None:
    """Read part of the largest tensor file at `path`; return bytes per second.

    On Linux the page cache of that part is dropped first, so that the disk is measured. None if
    there is no tensor file or it cannot be read.
    """
    try:
        found = [path / name for name in folder_entries(path)] if path.is_dir() else [path]
        files = [file for file in found if file.suffix in TENSOR_SUFFIXES]
        if not files:
            return None
        return _read_rate(max(files, key=lambda file: file.stat().st_size))
    except (OSError, CheckpointError):
        return None


def rounded(value: float) -> float:
    """Round to two significant digits, so that equal machines are not distinguished by noise."""
    return float(f"{value:.2g}")


@dataclass(eq=False, repr=False)
class Windows:
    """Mean times of a warmed-up step, `take`, in `at_least` or more time windows.

    `tick` is called before each. `clock` gives seconds.
    """

    take: Callable[[], StepTimes]
    _: KW_ONLY
    at_least: int
    tick: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.means: list[StepTimes] = []
        """The windows that are full."""
        self._began_s: float | None = None
        self._window_began_s = 0.0
        self._times: list[StepTimes] = []

    def step(self) -> bool:
        """Take one step, and say whether more are needed."""
        from shardnet.stage.synthetic_model import mean_times

        self.tick()
        if self._began_s is None:
            self._began_s = self._window_began_s = self.clock()
        self._times.append(self.take())
        now_s = self.clock()
        if now_s - self._window_began_s < WINDOW_S:
            return True
        self.means.append(mean_times(self._times))
        self._times, self._window_began_s = [], now_s
        n_more = N_WINDOWS if now_s - self._began_s < FIGURE_S else self.at_least
        return len(self.means) < max(self.at_least, n_more)


def _is_steady(times: Sequence[float]) -> bool:
    """Say whether the median window is about as short as the shortest."""
    return statistics.median(times) <= STEADY * min(times)


def _chunk_s(model: SyntheticModel, tick: Callable[[], None]) -> float:
    """Measure all layers of the sample at 256 rows."""
    few = 32
    tick()
    estimate_s = model.step(few).layers_s * PREFILL_CHUNK_ROWS / few
    n_rows = PREFILL_CHUNK_ROWS
    if estimate_s > CHUNK_S:
        n_rows = max(few, int(n_rows * CHUNK_S / estimate_s))
    chunks = Windows(lambda: model.step(n_rows), at_least=1, tick=tick)
    in_a_row(chunks.step)
    median_s = statistics.median(chunk.layers_s for chunk in chunks.means)
    return median_s * PREFILL_CHUNK_ROWS / n_rows


@contextlib.contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    """Compute with `n_threads` threads inside, and restore the number that a loaded stage relies
    on.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_rate(path: Path) -> float | None:
    size_bytes = min(DISK_BYTES, path.stat().st_size)
    with open_file(path) as opened:
        file = opened.fileno()
        if sys.platform == "linux":
            os.posix_fadvise(file, 0, size_bytes, os.POSIX_FADV_DONTNEED)
        done_bytes, began = 0, time.perf_counter()
        while done_bytes < size_bytes and time.perf_counter() - began < DISK_S:
            piece = os.read(file, min(_DISK_PIECE_BYTES, size_bytes - done_bytes))
            if not piece:
                break
            done_bytes += len(piece)
        took_s = time.perf_counter() - began
    return rounded(done_bytes / took_s) if done_bytes else None
