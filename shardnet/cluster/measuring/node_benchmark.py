"""Measure how fast this node is with a model, once.

Knows when to measure and when a known figure is valid. Must not plan, nor know what other nodes
measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardnet import __version__
from shardnet.cluster.machine.profile import available_cores, machine_name
from shardnet.cluster.measuring.figure_cache import Figure, FigureCache, FigureKey
from shardnet.cluster.ring.order_checks import check_threads
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.cluster.ring.stage_orders import StageOrders
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, DiskSilentError, UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.quantization import Quantization
from shardnet.runtime.stage.loading import find_folder
from shardnet.runtime.stage.measuring import (
    StageFigures,
    measure_disk,
    measure_stage,
    read_config,
)
from shardnet.types import DType, KvDType
from shardnet.wire.messages.measurements import MeasureStage, StageMeasured, StageSeconds


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
        a config this node cannot read, UsageError for an unknown dtype or more threads than this
        node has cores, CapacityError without the memory to measure in.
        """
        config, dtype, quantization, key = self._subject(message, asker)
        kv_dtype = KvDType(message.kv_dtype)
        figure = None if message.again else self._cache.get(key)
        disk = await self._disk(message)
        if figure is None:
            memory_bytes = self._orders.free_bytes()
            device = self._orders.device.kind

            def measure(tick: Callable[[], None]) -> StageFigures:
                return measure_stage(
                    config,
                    dtype,
                    quantization,
                    kv_dtype,
                    device=device,
                    threads=key.threads,
                    memory_bytes=memory_bytes,
                    tick=tick,
                )

            stage = await self._host.measure(measure, on_progress)
            figure = Figure(stage=stage, measured_at_s=time.time())
            self._cache.put(key, figure)
        return _answer(message, figure, key.threads, self._orders.memory_bytes(), disk)

    def known(self, message: MeasureStage) -> StageMeasured:
        """Return the known figure of a model, without the disk. Raises UsageError without one."""
        *_, key = self._subject(message, "this node")
        figure = self._cache.get(key)
        if figure is None:
            raise UsageError("this node is not measured yet", remedy="run `shardnet plan`")
        return _answer(message, figure, key.threads, self._orders.memory_bytes(), None)

    def _subject(
        self, message: MeasureStage, asker: str
    ) -> tuple[ModelConfig, DType, Quantization | None, FigureKey]:
        check_threads(message.threads, self._orders.most_threads)
        dtype = DType.named(message.dtype)
        config = read_config(
            message.config,
            f"the config.json that {asker} sent",
            ignore_unknown=message.ignore_unknown_config,
        )
        quantization = Quantization.named(message.quant)
        threads = message.threads or self._orders.threads
        key = FigureKey.of(
            config,
            dtype,
            quantization,
            KvDType(message.kv_dtype),
            device=self._orders.device.description,
            isa=self._orders.device.isa,
            torch=self._orders.device.torch,
            threads=threads,
            cores=available_cores(),
            version=__version__,
            host=machine_name(),
        )
        return config, dtype, quantization, key

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
            self._disks[number] = measure_disk(path)
        return self._disks[number]


def _answer(
    message: MeasureStage,
    figure: Figure,
    threads: int,
    memory_bytes: int,
    disk_bytes_per_s: float | None,
) -> StageMeasured:
    stage = figure.stage
    return StageMeasured(
        request=message.request,
        seconds=StageSeconds(
            layer_s=stage.layer_s,
            layer_256_s=stage.layer_256_s,
            embed_s=stage.embed_s,
            head_s=stage.head_s,
        ),
        kernel=stage.kernel,
        threads=threads,
        measured_at_s=figure.measured_at_s,
        is_steady=stage.is_steady,
        memory_bytes=memory_bytes,
        disk_bytes_per_s=disk_bytes_per_s,
    )
