"""Measure how fast this node is with a model, once.

Knows when to measure, when a known figure is valid, and the memory that shards share. Must not
plan, nor know what other nodes measure.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from msgspec import convert, structs

from shardnet import __version__
from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.profile import available_cores, machine_name
from shardnet.cluster.measuring.figure_cache import Figure, FigureCache, FigureKey, shape_of
from shardnet.cluster.measuring.measurement import WRONG_BY
from shardnet.cluster.measuring.rehearsal import rehearse
from shardnet.cluster.member.refusals import check_threads
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    BusyError,
    ConfigurationError,
    DiskSilentError,
    LostShardError,
    UsageError,
)
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.runtime.loading import measuring
from shardnet.runtime.loading.loading import check_layers, set_compute_threads
from shardnet.runtime.loading.model_facts import find_folder
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.types import Arith, DType, KvDType, LayerRange
from shardnet.wire.framing.schema import OfModel
from shardnet.wire.messages.measurements import (
    DeviceMeasured,
    MeasureStage,
    StageMeasured,
    StageObserved,
    StageSeconds,
)

LOOK_S: Final = 0.05
"""How long the processors are watched before a figure of a busy machine is measured again."""


GATHERS = 100
"""Gathers in a window."""
WINDOWS = 5
COLUMNS = 2048
"""Of a row: how many hardly matters, since waking takes longer than copying."""
DEADLINE_S = 10.0


class NodeBenchmark:
    """Measures on `host`, within the memory that `orders` gives a stage. `disk` reads files."""

    def __init__(
        self, *, host: StageHost, orders: StageOrders, disk: DiskJobs, cache: FigureCache
    ) -> None:
        self._host = host
        self._orders = orders
        self._disk_jobs = disk
        self._cache = cache
        self._disks: dict[int, float | None] = {}

    async def measure(
        self, message: MeasureStage, asker: str, on_progress: Callable[[int, int], None]
    ) -> StageMeasured:
        """Return the known figure of a model, else measure it now.

        `asker` names the sender of the config in errors. `on_progress` takes (bytes done, bytes in
        all). Raises BusyError if nothing is known and sequences are open here, CheckpointError for
        a config this node cannot read, UsageError for an unknown dtype, more threads than this
        node has cores or a plug-in that computes, CapacityError without the memory to measure in.
        """
        if self._orders.device.plugin is not None:
            raise UsageError(
                f"{self._orders.device.description} is a plug-in, which cannot be measured",
                remedy="say with --nodes and --layers what it is to compute",
            )
        disk = await self._disk(message)
        figures = [
            await self._figure(message, asker, on_progress, place)
            for place in range(len(self._orders.devices))
        ]
        gather_s = await self._gather_s(message, asker) if len(figures) > 1 else None
        return self._answer(message, figures, disk, gather_s)

    async def _figure(
        self, message: MeasureStage, asker: str, on_progress: Callable[[int, int], None], place: int
    ) -> Figure:
        """Return the figure of one device, the known one or a new one; raises as `measure`."""
        config, dtype, quant, key = self._subject(message, asker, place)
        known = self._cache.get(key)
        is_like_first = place > 0 and key == self._subject(message, asker)[-1]
        if known is not None and (
            is_like_first or not (message.again or await self._is_better_now(known))
        ):
            return known
        memory_bytes = self._orders.free_bytes(place)
        device, driver = self._orders.devices[place].for_torch, self._orders.devices[place].driver

        def measure(tick: Callable[[], None]) -> measuring.StageFigures:
            return measuring.measure_stage(
                config,
                dtype,
                quant,
                key.kv_dtype,
                key.arith,
                device=device,
                driver=driver,
                threads=key.threads,
                memory_bytes=memory_bytes,
                tick=tick,
                drive=partial(
                    rehearse,
                    on_any_thread=device == "cpu" and not driver and key.threads == 1,
                    set_up=lambda: set_compute_threads(key.threads),
                ),
            )

        stage = await self._host.measure(measure, on_progress, place)
        figure = Figure(stage=stage, measured_at_s=time.time())
        self._cache.put(key, figure)
        return figure

    def _told(self, figures: Sequence[Figure]) -> list[DeviceMeasured]:
        """Tell of each device."""
        return [
            DeviceMeasured(
                name=device.name,
                memory_bytes=n_bytes,
                seconds=_seconds(figure.stage),
                is_steady=figure.stage.is_steady,
            )
            for device, n_bytes, figure in zip(
                self._orders.devices, self._orders.device_bytes(), figures, strict=True
            )
        ]

    async def _gather_s(self, message: MeasureStage, asker: str) -> float | None:
        """Return what it takes all devices to join the parts of a row; None where they cannot."""
        devices = self._orders.devices
        if any(device.kind != "cpu" or device.isa == kernels.NONE for device in devices):
            return None
        key = self._subject(message, asker)[-1]
        known_s = self._cache.gather_s(key, len(devices))
        if self._cache.keeps_gather(key, len(devices)) and not message.again:
            return known_s
        before = ProcessorUse.now()
        try:
            gather_s = measuring.rounded(await self._host.measure_together(measure_gather))
        except (ConfigurationError, LostShardError, BusyError):
            return known_s
        is_disturbed = before.disturbed(ProcessorUse.now())
        self._cache.put_gather(key, len(devices), gather_s, keeps=not is_disturbed)
        return gather_s

    async def _is_better_now(self, known: Figure) -> bool:
        """Say whether a figure of a busy machine can be replaced: nobody computes any more."""
        if known.stage.is_steady or self._host.is_busy:
            return False
        before = ProcessorUse.now()
        await asyncio.sleep(LOOK_S)
        return before.quiet(ProcessorUse.now())

    def observe(self, message: StageObserved, asker: str) -> None:
        """Correct the figure that a generation has shown to be wrong.

        A stage that was WRONG_BY times faster than its figure says is proof: the figure is scaled,
        and counts as before. One that was slower may have been disturbed: what is scaled up counts
        for minutes, as every figure of a busy machine. Without a figure nothing is done. Raises
        CheckpointError and UsageError as `measure`.
        """
        if len(self._orders.devices) > 1:
            return  # which of them was slower is not said
        config, *_, key = self._subject(message, asker)
        layers = LayerRange(*message.layers)
        check_layers(config, layers)
        figure = self._cache.get(key)
        if figure is None or not message.compute_s:
            return
        stage = figure.stage
        ratio = message.compute_s / stage.compute_s(layers, config.n_layers)
        if not 1 / WRONG_BY <= ratio <= WRONG_BY:
            stage = structs.replace(stage.scaled(ratio), is_steady=stage.is_steady and ratio < 1)
        if message.step_s is not None:
            stage = structs.replace(stage, step_s=measuring.rounded(message.step_s))
        if stage != figure.stage:
            self._cache.put(key, Figure(stage=stage, measured_at_s=time.time()))

    def known(self, message: MeasureStage) -> StageMeasured:
        """Return the known figure of a model, without the disk. Raises UsageError without one."""
        figures = []
        for place in range(len(self._orders.devices)):
            figure = self._cache.get(self._subject(message, "this node", place)[-1])
            if figure is None:
                raise UsageError("this node is not measured yet", remedy="run `shardnet plan`")
            figures.append(figure)
        key = self._subject(message, "this node")[-1]
        gather_s = self._cache.gather_s(key, len(figures))
        return self._answer(message, figures, None, gather_s)

    def _subject(
        self, message: OfModel, asker: str, place: int = 0
    ) -> tuple[ModelConfig, DType, Quantization | None, FigureKey]:
        check_threads(message.threads, self._orders.most_threads)
        dtype = DType.named(message.dtype)
        config = measuring.read_config(
            message.config,
            f"the config.json that {asker} sent",
            ignore_unknown_config=message.ignore_unknown_config,
        )
        quant = Quantization.named(message.quant)
        device = self._orders.devices[place]
        threads = self._orders.threads_of(place, message.threads)
        key = FigureKey(
            shape=shape_of(config),
            dtype=dtype,
            quant=quant,
            kv_dtype=KvDType(message.kv_dtype),
            arith=device.arith(Arith(message.arith)),
            # Equal groups of cores are measured once.
            device=device.kind if device.cores else device.description,
            isa=device.isa,
            arithmetic=device.arithmetic,
            torch=device.torch,
            threads=threads,
            cores=available_cores(),
            version=__version__,
            host=machine_name(),
        )
        return config, dtype, quant, key

    def _answer(
        self,
        message: MeasureStage,
        figures: Sequence[Figure],
        disk_bytes_per_s: float | None,
        gather_s: float | None,
    ) -> StageMeasured:
        first = figures[0]
        return StageMeasured(
            request=message.request,
            seconds=_seconds(first.stage),
            kernel=first.stage.kernel,
            threads=message.threads or self._orders.threads,
            measured_at_s=first.measured_at_s,
            is_steady=first.stage.is_steady,
            memory_bytes=self._orders.memory_bytes(),
            disk_bytes_per_s=disk_bytes_per_s,
            devices=self._told(figures) if len(figures) > 1 else [],
            gather_s=gather_s,
        )

    async def _disk(self, message: MeasureStage) -> float | None:
        """Return the bytes per second of the checkpoint's disk, None without a checkpoint here."""
        if not message.model:
            return None
        try:
            return await self._disk_jobs.run(
                message.model, lambda: self._find_disk(message.model, again=message.again)
            )
        except (DiskSilentError, BusyError):
            return None

    def _find_disk(self, model: str, *, again: bool) -> float | None:
        """Return what `_disk` does. Blocks."""
        path = find_folder(model)
        if path is None:
            return None
        try:
            number = path.stat().st_dev
        except OSError:
            return None
        if number not in self._disks or again:
            self._disks[number] = measuring.measure_disk(path)
        return self._disks[number]


def _seconds(stage: measuring.StageFigures) -> StageSeconds:
    return convert(stage, StageSeconds, from_attributes=True)


def measure_gather(n_shards: int) -> Sequence[Callable[[], float]]:
    """Return a job for each shard, which gives the seconds of a gather.

    That is the median window, or the fastest where other programs took processors meanwhile. All
    are to be run at once, each on its device's thread. Raises ConfigurationError without the
    compiled library.
    """
    import torch

    from shardnet.model.shards.group import MemoryGroup, SharedMemory

    memory = SharedMemory.create(n_shards)
    ends = [COLUMNS * shard // n_shards for shard in range(n_shards + 1)]

    def job(index: int) -> float:
        group = MemoryGroup(memory, index, n_shards, DEADLINE_S)
        part = torch.zeros(1, ends[index + 1] - ends[index])
        windows = []
        before = ProcessorUse.now()
        for _ in range(WINDOWS):
            began = time.perf_counter()
            for _ in range(GATHERS):
                group.gather(part, ends)
            windows.append((time.perf_counter() - began) / GATHERS)
        group.check()
        is_disturbed = before.disturbed(ProcessorUse.now())
        return min(windows) if is_disturbed else statistics.median(windows)

    return [partial(job, index) for index in range(n_shards)]
