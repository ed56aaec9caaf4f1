"""What a plan says of a narrower wire: measured once, kept, given up, or not to be had."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_llama

from shardnet.cluster.machine.folders import cache_dir
from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.placement.figures import LinkSpeed, StageSpeed
from shardnet.cluster.planning import wire_loss
from shardnet.cluster.planning.placing import make_plan
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.wire_loss import WireLoss
from shardnet.runtime.loading.model_facts import identify
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice, NarrowWire

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def plan_of(
    folder: Path, *, layers: str = "02", wire: str = "int8", bytes_per_s: float = 0.0
) -> Plan:
    """A plan whose stages begin at `layers`, over links that are measured if a speed is given."""
    starts = [int(layer) for layer in layers]
    names = "abcd"[: len(starts)]
    nodes = [
        NodeInfo(
            node=name,
            name=name,
            address=f"{name}:1",
            version="0",
            device="cpu",
            memory_bytes=2**30,
            memory_free_bytes=2**30,
            cores=1,
            threads=1,
            dtypes=["float32"],
            host_id="h",
        )
        for name in names
    ]
    measured = Measured()
    if bytes_per_s:
        speed = StageSpeed(layer_s=1e-3, layer_256_s=1e-2, embed_s=0.0, head_s=0.0)
        link = LinkSpeed(round_trip_s=0.0, bytes_per_s=bytes_per_s)
        measured = Measured(
            speeds={NodeId(name): speed for name in names},
            links={(NodeId(a), NodeId(b)): link for a in names for b in names if a != b},
        )
    choice = ModelChoice(
        model=str(folder),
        nodes=[node.address for node in nodes],
        layers=list(zip(starts, [*starts[1:], 4], strict=True)),
        wire_dtype=wire,
        threads=1,
    )
    return make_plan(choice, identify(folder), nodes, measured)


class Measurer:
    """WireLoss in a folder, and what it did."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = cache
        self.log: list[str] = []
        self.measured: list[Any] = []
        self.progress: list[tuple[int, int]] = []
        measure = wire_loss.measure_wire_loss

        def note(facts: Any, dtype: Any, borders: Any, progress: Any, parts: Any) -> Any:
            self.measured.append({layer: wire.value for layer, wire in borders.items()})
            return measure(facts, dtype, borders, progress, parts)

        monkeypatch.setattr(wire_loss, "measure_wire_loss", note)

    def narrow(self, *plans: Plan) -> list[NarrowWire]:
        """Ask for these one after the other, of one node."""

        async def main() -> list[NarrowWire]:
            errors = WireLoss(cache=self.cache, threads=lambda: 1, log=self.log.append)
            try:
                return [
                    await errors.narrow(plan, lambda *report: self.progress.append(report))
                    for plan in plans
                ]
            finally:
                errors.close()

        return asyncio.run(main())


@pytest.fixture
def measurer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurer:
    return Measurer(tmp_path / "cache", monkeypatch)


def test_an_error_is_measured_once_for_model_borders_and_dtypes(
    folder: Path, measurer: Measurer
) -> None:
    (first,) = measurer.narrow(plan_of(folder))
    assert first.error is not None
    assert first.error.n_rows == 64
    assert (first.row_bytes, first.exact_row_bytes) == (48 + 4, 4 * 48)
    assert (first.saves_ms, first.why) == (None, "")
    assert measurer.progress[-1][0] == measurer.progress[-1][1] > 0
    (again,) = measurer.narrow(plan_of(folder))
    assert again == first
    assert measurer.measured == [{2: "int8"}]
    measurer.narrow(plan_of(folder, layers="013"), plan_of(folder, wire="float16"))
    assert measurer.measured[1:] == [{1: "int8", 3: "int8"}, {2: "float16"}]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"key": 1, "error": 2}', b"[" * 9999])
def test_a_spoilt_file_is_measured_again(folder: Path, measurer: Measurer, content: bytes) -> None:
    (first,) = measurer.narrow(plan_of(folder))
    (path,) = measurer.cache.rglob("*.json")
    whole = path.read_bytes()
    path.write_bytes(content)
    assert measurer.narrow(plan_of(folder)) == [first]
    assert path.read_bytes() == whole
    assert len(measurer.measured) == 2


def test_a_file_of_another_plan_is_not_believed(folder: Path, measurer: Measurer) -> None:
    measurer.narrow(plan_of(folder))
    (path,) = measurer.cache.rglob("*.json")
    path.write_bytes(path.read_bytes().replace(b'"borders":[[2', b'"borders":[[1'))
    measurer.narrow(plan_of(folder))
    assert len(measurer.measured) == 2


def test_without_room_to_keep_it_the_error_is_told_all_the_same(
    folder: Path, measurer: Measurer
) -> None:
    measurer.cache.write_text("a file where the folder should be")
    (found,) = measurer.narrow(plan_of(folder))
    assert found.error is not None
    assert "is not kept" in measurer.log[0]


def test_what_the_links_save_less_what_rounding_takes(
    folder: Path, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hops of 140 bytes fewer, and 0.1 ms to round on each."""
    monkeypatch.setattr(wire_loss, "measure_rounding_s", lambda *_: 1e-4)
    slow, fast = measurer.narrow(
        plan_of(folder, layers="013", bytes_per_s=1e4),
        plan_of(folder, layers="013", bytes_per_s=1e9),
    )
    assert slow.saves_ms == pytest.approx(2 * 140 / 1e4 * 1e3 - 0.2)
    assert fast.saves_ms == pytest.approx(-0.2, abs=1e-3)


@pytest.mark.parametrize(
    ("layers", "wire", "why"),
    [("0", "int8", "one stage, so nothing crosses"), ("02", "bfloat16", "nothing is rounded")],
)
def test_where_nothing_is_rounded_nothing_is_measured(
    tmp_path: Path, measurer: Measurer, layers: str, wire: str, why: str
) -> None:
    import torch

    folder = make_llama(tmp_path / "llama", dtype=torch.bfloat16)
    plan = plan_of(folder, layers=layers, wire=wire)
    plan = make_plan_in(plan, "bfloat16")
    (found,) = measurer.narrow(plan)
    assert (found.error, found.saves_ms) == (None, 0.0)
    assert why in found.why
    assert measurer.measured == []


def make_plan_in(plan: Plan, dtype: str) -> Plan:
    """The plan for a ring that computes in `dtype`."""
    from msgspec.structs import replace as changed

    choice = changed(plan.choice, dtype=dtype)
    return make_plan(choice, plan.facts, plan.nodes)


def test_a_checkpoint_that_the_head_lacks_is_said(
    folder: Path, tmp_path: Path, measurer: Measurer
) -> None:
    plan = plan_of(folder)
    gone = replace(plan, facts=replace(plan.facts, path=tmp_path / "gone"))
    (found,) = measurer.narrow(gone)
    assert found.error is None
    assert "gone" in found.why
    assert list(tmp_path.rglob("*.json")) == []


def test_a_client_that_goes_away_ends_the_measurement(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is free for the next one as soon as the first says how far it is."""
    began, may_go_on, gave_up = threading.Event(), threading.Event(), threading.Event()
    measure = wire_loss.measure_wire_loss

    def wait_and_report(
        facts: Any, dtype: Any, borders: Any, progress: Callable[[int, int], None], parts: Any
    ) -> Any:
        if began.is_set():
            return measure(facts, dtype, borders, progress, parts)
        began.set()
        may_go_on.wait(DEADLINE_S)
        try:
            progress(1, 2)
        finally:
            gave_up.set()
        raise AssertionError("it was not given up")

    monkeypatch.setattr(wire_loss, "measure_wire_loss", wait_and_report)

    async def main() -> None:
        errors = WireLoss(cache=tmp_path, threads=lambda: 1, log=lambda line: None)
        plan = plan_of(folder)
        asking = asyncio.create_task(errors.narrow(plan, lambda done, total: None))
        await asyncio.to_thread(began.wait, DEADLINE_S)
        asking.cancel()
        asyncio.get_running_loop().call_soon(may_go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert gave_up.is_set()
        found = await errors.narrow(plan, lambda done, total: None)
        assert found.error is not None
        errors.close()

    asyncio.run(main())


def test_the_environment_may_name_the_cache_itself() -> None:
    told = {"SHARDNET_CACHE_DIR": "/s", "XDG_CACHE_HOME": "/c", "HOME": "/h"}
    assert cache_dir(told) == Path("/s")
