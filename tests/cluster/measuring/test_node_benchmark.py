"""A node's own figures: measured once, told while it generates, within the memory it may use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.measuring.figure_cache import FigureCache
from shardnet.cluster.measuring.node_benchmark import NodeBenchmark
from shardnet.cluster.ring.ring_membership import RingMembership
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.cluster.ring.stage_orders import StageOrders
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    UnsupportedModelError,
    UsageError,
)
from shardnet.transport.link import Link
from shardnet.types import DType
from shardnet.wire.messages.measurements import MeasureStage, StageMeasured

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 200,
}


@dataclass
class Member:
    """What the host asks of its membership."""

    is_busy: bool
    model: str = "/m"

    async def leave(self) -> None:
        """Nothing is left."""


def ask(**changes: Any) -> MeasureStage:
    fields = {"config": json.dumps(CONFIG), "dtype": "float32", "threads": 1, "model": ""}
    return MeasureStage(request=4, **(fields | changes))


def measuring(
    folder: Path,
    main: Callable[[NodeBenchmark, StageHost], Awaitable[None]],
    memory_bytes: int | None = None,
    isa: str = "avx2",
) -> None:
    async def dial(address: str, membership: RingMembership) -> Link:
        raise AssertionError(f"{address} was dialled")

    async def run() -> None:
        host, disk = StageHost(dial=dial), DiskJobs("test")
        device = Device(kind="cpu", description="cpu", dtypes=(DType.FLOAT32,), isa=isa)
        orders = StageOrders(
            host=host,
            sharing=cast(Sharing, None),  # measuring fetches nothing
            budget=MemoryBudget(device=device, asked_bytes=memory_bytes),
            asked_threads=1,
            local_nodes=LocalNodes(folder / "run"),
            watch=lambda control, on_lost: lambda: None,
            log=print,
        )
        figures = NodeBenchmark(
            host=host, orders=orders, disk=disk, cache=FigureCache(folder, print)
        )
        try:
            await main(figures, host)
        finally:
            await host.close()
            disk.close()

    asyncio.run(run())


async def measure(figures: NodeBenchmark, message: MeasureStage) -> StageMeasured:
    return await figures.measure(message, "anna", lambda done, total: None)


def generate(host: StageHost) -> None:
    host.membership = cast(RingMembership, Member(is_busy=True))


def test_what_is_known_is_told_also_by_a_node_that_generates(tmp_path: Path) -> None:
    async def first(figures: NodeBenchmark, host: StageHost) -> None:
        with pytest.raises(UsageError, match="not measured yet"):
            figures.known(ask())
        answer = await measure(figures, ask())
        assert answer.request == 4
        assert answer.seconds.layer_s > 0
        assert answer.memory_bytes > 0
        generate(host)
        assert (await measure(figures, ask())).seconds == answer.seconds
        assert figures.known(ask()).measured_at_s == answer.measured_at_s
        strange = ask(config=json.dumps(CONFIG | {"logit_scale": 0.1}))
        with pytest.raises(UnsupportedModelError, match=r"logit_scale = 0\.1 is not known"):
            figures.known(strange)
        figures.known(structs.replace(strange, ignore_unknown_config=True))
        for other in (ask(again=True), ask(threads=2), ask(dtype="bfloat16")):
            with pytest.raises(BusyError, match="generating with /m"):
                await measure(figures, other)

    async def later(figures: NodeBenchmark, host: StageHost) -> None:
        generate(host)
        assert (await measure(figures, ask())).seconds.layer_s > 0

    async def without_kernels(figures: NodeBenchmark, host: StageHost) -> None:
        with pytest.raises(UsageError, match="not measured yet"):
            figures.known(ask())

    measuring(tmp_path, first)
    measuring(tmp_path, later)
    measuring(tmp_path, without_kernels, isa=kernels.NONE)


def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path) -> None:
    async def main(figures: NodeBenchmark, host: StageHost) -> None:
        with pytest.raises(CheckpointError, match=r"config\.json that anna sent"):
            await measure(figures, ask(config="{"))
        with pytest.raises(UsageError, match="'int3' is no dtype"):
            await measure(figures, ask(dtype="int3"))
        with pytest.raises(CapacityError, match="only 0 MiB are free here"):
            await measure(figures, ask())

    measuring(tmp_path, main, memory_bytes=1000)


def test_the_disk_is_told_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(2**20))

    async def main(figures: NodeBenchmark, host: StageHost) -> None:
        answer = await measure(figures, ask(model=str(folder)))
        assert answer.disk_bytes_per_s is not None
        assert answer.disk_bytes_per_s > 0
        elsewhere = await measure(figures, ask(model=str(tmp_path / "none")))
        assert elsewhere.disk_bytes_per_s is None

    measuring(tmp_path, main)
