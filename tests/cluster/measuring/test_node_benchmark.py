"""A node's own figures: measured once, told while it generates, within the memory it may use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.measuring import node_benchmark
from shardnet.cluster.measuring.figure_cache import FigureCache
from shardnet.cluster.measuring.node_benchmark import NodeBenchmark
from shardnet.cluster.member.ring_membership import DataEnd, RingMembership
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders, stage_devices
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    UnsupportedModelError,
    UsageError,
)
from shardnet.model.kernels.library import native_kernels
from shardnet.runtime.loading import measuring as measuring_stages
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.transport.link import Link
from shardnet.types import DType
from shardnet.wire.messages.measurements import MeasureStage, StageMeasured, StageObserved

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
    n_groups: int = 1,
) -> None:
    async def dial(address: str, own: DataEnd) -> Link:
        raise AssertionError(f"{address} was dialled")

    async def run() -> None:
        device = Device(kind="cpu", description="cpu", dtypes=(DType.FLOAT32,), isa=isa)
        groups = [device]
        if n_groups > 1:
            groups = [replace(device, index=index, cores=(0,)) for index in range(n_groups)]
        host = StageHost(dial=dial, devices=stage_devices(groups))
        disk = DiskJobs("test")
        orders = StageOrders(
            host=host,
            sharing=cast(Sharing, None),  # measuring fetches nothing
            budget=MemoryBudget(
                device=groups[0], others=tuple(groups[1:]), asked_bytes=memory_bytes
            ),
            asked_threads=1,
            local_nodes=LocalNodes(folder / "run"),
            watch=lambda control, on_lost: lambda: None,
            latest=lambda control: control,
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


def test_equal_groups_of_cores_are_measured_once_and_their_gathers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_benchmark, "GATHERS", 5)

    async def first(figures: NodeBenchmark, host: StageHost) -> None:
        answer = await measure(figures, ask(threads=0))
        assert [device.name for device in answer.devices] == ["cpu:0", "cpu:1"]
        assert answer.seconds == answer.devices[0].seconds == answer.devices[1].seconds
        in_all = sum(device.memory_bytes for device in answer.devices)
        assert in_all == pytest.approx(answer.memory_bytes, rel=0.01)
        assert (answer.gather_s is not None) == (native_kernels() is not None)
        known = figures.known(ask(threads=0))
        assert [device.seconds for device in known.devices] == [answer.seconds] * 2
        assert known.gather_s == answer.gather_s
        figures.observe(
            StageObserved(
                request=1, config=json.dumps(CONFIG), dtype="float32", threads=0,
                layers=(0, 1), compute_s=1e-6,
            ),
            "anna",
        )  # fmt: skip
        assert figures.known(ask(threads=0)).seconds == answer.seconds

    measuring(tmp_path, first, memory_bytes=1 << 28, n_groups=2)


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


def observed(compute_s: float, **changes: Any) -> StageObserved:
    fields = {"config": json.dumps(CONFIG), "dtype": "float32", "threads": 1, "layers": (0, 1)}
    return StageObserved(request=5, compute_s=compute_s, **(fields | changes))


def test_a_figure_of_a_busy_machine_is_measured_again_as_soon_as_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_busy = True
    monkeypatch.setattr(measuring_stages, "WINDOW_S", 0.005)
    monkeypatch.setattr(measuring_stages, "_is_steady", lambda times: True)
    monkeypatch.setattr(ProcessorUse, "disturbed", lambda before, later: is_busy)
    monkeypatch.setattr(ProcessorUse, "quiet", lambda before, later: not is_busy)

    async def main(figures: NodeBenchmark, host: StageHost) -> None:
        nonlocal is_busy
        first = await measure(figures, ask())
        assert not first.is_steady
        assert (await measure(figures, ask())).measured_at_s == first.measured_at_s
        is_busy = False
        second = await measure(figures, ask())
        assert second.is_steady
        assert second.seconds.step_s > 0
        assert (await measure(figures, ask())).measured_at_s == second.measured_at_s

    measuring(tmp_path, main)


def test_a_generation_corrects_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the direction of slow for minutes alone: the machine may have been busy."""
    monkeypatch.setattr(measuring_stages, "WINDOW_S", 0.005)
    monkeypatch.setattr(ProcessorUse, "disturbed", lambda before, later: False)
    monkeypatch.setattr(measuring_stages, "_is_steady", lambda times: True)

    async def main(figures: NodeBenchmark, host: StageHost) -> None:
        figures.observe(observed(1.0), "anna")  # of what was never measured nothing is learned
        before = (await measure(figures, ask())).seconds
        stage_s = before.embed_s + before.layer_s
        figures.observe(observed(stage_s * 1.4), "anna")
        assert figures.known(ask()).seconds == before
        figures.observe(observed(stage_s / 100, step_s=0.00123), "anna")
        told = figures.known(ask())
        assert told.is_steady
        assert told.seconds.step_s == 0.0012
        for name in ("layer_s", "layer_256_s", "embed_s", "head_s"):
            assert getattr(told.seconds, name) == pytest.approx(
                getattr(before, name) / 100, rel=0.1
            )
        figures.observe(observed(stage_s), "anna")
        assert figures.known(ask()).seconds.layer_s == pytest.approx(before.layer_s, rel=0.1)
        assert not figures.known(ask()).is_steady
        with pytest.raises(UsageError, match="the model has 2"):
            figures.observe(observed(1.0, layers=(0, 3)), "anna")

    measuring(tmp_path, main)
