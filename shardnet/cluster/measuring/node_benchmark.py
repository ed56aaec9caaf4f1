"""Measure how fast this node is with a model, once.

Knows when to measure and when a known figure is valid. Must not plan, nor know what other nodes
measure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from shardnet import __version__
from shardnet.cluster.machine.profile import available_cores, machine_name
from shardnet.cluster.measuring.figure_cache import Figure, FigureCache, FigureKey
from shardnet.cluster.measuring.measurement import WRONG_BY
from shardnet.cluster.measuring.rehearsal import rehearse
from shardnet.cluster.member.order_checks import check_threads
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, DiskSilentError, UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.quantization import Quantization
from shardnet.runtime.loading.loading import check_layers, set_compute_threads
from shardnet.runtime.loading.model_facts import find_folder
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.runtime.stage.measuring import (
    StageFigures,
    measure_disk,
    measure_stage,
    read_config,
    rounded,
)
from shardnet.types import Arith, DType, KvDType, LayerRange
from shardnet.wire.messages.measurements import (
    MeasureStage,
    StageMeasured,
    StageObserved,
    StageSeconds,
)

LOOK_S: Final = 0.05
"""How long the processors are watched before a figure of a busy machine is measured again."""


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
        config, dtype, quantization, key = self._subject(message, asker)
        kv_dtype, arith = KvDType(message.kv_dtype), Arith(key.arith)
        known = self._cache.get(key)
        disk = await self._disk(message)
        figure = known
        if message.again or known is None or await self._is_better_now(known):
            memory_bytes = self._orders.free_bytes()
            device = self._orders.device.kind

            def measure(tick: Callable[[], None]) -> StageFigures:
                return measure_stage(
                    config,
                    dtype,
                    quantization,
                    kv_dtype,
                    arith,
                    device=device,
                    threads=key.threads,
                    memory_bytes=memory_bytes,
                    tick=tick,
                    drive=partial(
                        rehearse,
                        on_any_thread=device == "cpu" and key.threads == 1,
                        set_up=lambda: set_compute_threads(key.threads),
                    ),
                )

            stage = await self._host.measure(measure, on_progress)
            figure = Figure(stage=stage, measured_at_s=time.time())
            self._cache.put(key, figure)
        assert figure is not None
        return _answer(message, figure, key.threads, self._orders.memory_bytes(), disk)

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
        config, *_, key = self._subject(message, asker)
        layers = LayerRange(*message.layers)
        check_layers(config, layers)
        figure = self._cache.get(key)
        if figure is None or not message.compute_s:
            return
        stage = figure.stage
        ratio = message.compute_s / stage.compute_s(layers, config.n_layers)
        if not 1 / WRONG_BY <= ratio <= WRONG_BY:
            stage = replace(stage.scaled(ratio), is_steady=stage.is_steady and ratio < 1)
        if message.step_s is not None:
            stage = replace(stage, step_s=rounded(message.step_s))
        if stage != figure.stage:
            self._cache.put(key, Figure(stage=stage, measured_at_s=time.time()))

    def known(self, message: MeasureStage) -> StageMeasured:
        """Return the known figure of a model, without the disk. Raises UsageError without one."""
        *_, key = self._subject(message, "this node")
        figure = self._cache.get(key)
        if figure is None:
            raise UsageError("this node is not measured yet", remedy="run `shardnet plan`")
        return _answer(message, figure, key.threads, self._orders.memory_bytes(), None)

    def _subject(
        self, message: MeasureStage | StageObserved, asker: str
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
            self._orders.device.arith(Arith(message.arith)),
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
            step_s=stage.step_s,
        ),
        kernel=stage.kernel,
        threads=threads,
        measured_at_s=figure.measured_at_s,
        is_steady=stage.is_steady,
        memory_bytes=memory_bytes,
        disk_bytes_per_s=disk_bytes_per_s,
    )
