"""Measuring on the compute thread: not while it works for somebody, and no longer than asked; for
which head's ring the place is kept; and what becomes of orders while a node leaves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from msgspec.structs import replace
from support.rings.stage_forms import FORM

from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.member import stage_host as stage_host_module
from shardnet.cluster.member import stage_loader
from shardnet.cluster.member.refusals import Refusals
from shardnet.cluster.member.ring_membership import DataEnd, RingMembership
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_loader import PreparedStage
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.errors import (
    BusyError,
    DiskSilentError,
    PeerFailedError,
    SupersededError,
    TakenError,
    UsageError,
)
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.transport.link import Link
from shardnet.types import LayerRange, WireDType
from shardnet.wire.messages.stages import LoadStage

AWAY = r"draining|no ring now"
STAGE_ORDER = StageOrder(
    form=FORM,
    folder=Path("/m"),
    layers=LayerRange(0, 1),
    is_tail=True,
)


@dataclass
class Member:
    """What the host asks of its membership."""

    is_busy: bool = False
    model: str = "/m"

    async def leave(self) -> None:
        """Nothing is left."""


def hosted(main: Callable[[StageHost], Any]) -> None:
    async def dial(address: str, own: DataEnd) -> Link:
        raise AssertionError(f"{address} was dialled")

    async def run() -> None:
        host = StageHost(dial=dial, node="own")
        try:
            await main(host)
        finally:
            await host.close()

    asyncio.run(run())


def take_part(host: StageHost, *, is_busy: bool) -> Member:
    membership = Member(is_busy=is_busy)
    host.membership = cast(RingMembership, membership)
    return membership


def test_a_measurement_runs_on_the_compute_thread_and_reports_that_it_lives() -> None:
    async def main(host: StageHost) -> None:
        reports = []

        def job(tick: Callable[[], None]) -> str:
            tick()
            return threading.current_thread().name

        take_part(host, is_busy=False)
        name = await host.measure(job, lambda done, total: reports.append((done, total)))
        assert name.startswith("shardnet-compute")
        assert reports == [(0, 1)]
        await host.wait_for_compute()

    hosted(main)


def test_open_sequences_are_not_disturbed() -> None:
    async def main(host: StageHost) -> None:
        take_part(host, is_busy=True)
        with pytest.raises(BusyError, match="generating with /m"):
            await host.measure(lambda tick: 1, lambda done, total: None)
        with pytest.raises(BusyError, match="generating with /m"):
            await host.wait_for_compute()

    hosted(main)


def test_a_sequence_that_opens_meanwhile_ends_the_measurement() -> None:
    async def main(host: StageHost) -> None:
        membership = take_part(host, is_busy=False)

        def job(tick: Callable[[], None]) -> None:
            tick()
            membership.is_busy = True
            tick()
            raise AssertionError("it went on")

        with pytest.raises(BusyError, match="generating with /m"):
            await host.measure(job, lambda done, total: None)

    hosted(main)


def test_who_gives_up_waiting_ends_the_measurement() -> None:
    """And waits for its end, also when who has given up hangs up then, which cancels once more."""

    async def main(host: StageHost) -> None:
        began, may_end, gave_up = asyncio.Event(), threading.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def job(tick: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(began.set)
            try:
                while True:
                    tick()
            finally:
                may_end.wait(5)
                gave_up.set()

        measuring = asyncio.create_task(host.measure(job, lambda done, total: None))
        await began.wait()
        for _ in range(4):
            measuring.cancel()
            await asyncio.sleep(0)
        assert not measuring.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        assert gave_up.is_set()

    hosted(main)


ORDER = LoadStage(
    request=1,
    ring="r",
    epoch=1,
    rank=0,
    n_stages=1,
    form=FORM,
    layers=(0, 1),
    wire_dtype=WireDType.FLOAT32,
    received_dtype=WireDType.FLOAT32,
    threads=1,
    addresses=["a:1"],
)


async def enter_ring(host: StageHost, owner: str = "head", ring: str = "r") -> RingMembership:
    return await host.enter_ring(
        replace(ORDER, ring=ring),
        owner=owner,
        owner_name=f"{owner} (10.0.0.1:7)",
        on_broken=lambda error, silent: None,
    )


async def load(host: StageHost) -> None:
    await host.load(
        await enter_ring(host),
        STAGE_ORDER,
        sent=WireDType.FLOAT32,
        received=WireDType.FLOAT32,
        threads=1,
        memory_bytes=[1],
        on_progress=lambda done, total: None,
    )


async def prepare(host: StageHost, ring: str = "next", stands_for: str = "") -> None:
    await host.prepare(
        ring,
        "head",
        STAGE_ORDER,
        memory_bytes=[1],
        on_progress=lambda done, total: None,
        stands_for=stands_for,
    )


def loading_never_ends(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Have loading go on until it is told to end. Returns what says that it has begun."""
    began, loop = asyncio.Event(), asyncio.get_running_loop()

    def load_for_ever(
        order: object, memory_bytes: int, report: Callable[[int, int], None], *_: object
    ) -> None:
        loop.call_soon_threadsafe(began.set)
        while True:
            report(0, 1)

    monkeypatch.setattr(stage_loader, "load", load_for_ever)
    return began


def test_a_node_that_leaves_does_not_wait_until_it_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head that gave the order learns why nothing comes of it."""

    async def main(host: StageHost) -> None:
        began = loading_never_ends(monkeypatch)
        first, second = asyncio.create_task(load(host)), asyncio.create_task(load(host))
        await began.wait()
        async with asyncio.timeout(60):
            await host.close()
        for order in (first, second):
            with pytest.raises(PeerFailedError, match="this node is leaving"):
                await order

    hosted(main)


def test_a_ring_does_not_wait_for_a_stage_that_is_only_made_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it comes while the files of that stage are looked at, before they are loaded."""

    async def main(host: StageHost) -> None:
        looked, loop, may_look = asyncio.Event(), asyncio.get_running_loop(), threading.Event()
        began = loading_never_ends(monkeypatch)

        def part(order: StageOrder) -> None:
            loop.call_soon_threadsafe(looked.set)
            may_look.wait(30)

        host.loaded = cast(
            LoadedStage,
            SimpleNamespace(part=part, lacks=lambda order: [], kept=[], moves=None, parts=()),
        )
        preparing = asyncio.create_task(prepare(host))
        await looked.wait()
        entering = asyncio.create_task(enter_ring(host))
        await asyncio.sleep(0)
        may_look.set()
        assert await entering is host.membership
        with pytest.raises(TakenError, match="ring r came before it was ready"):
            await preparing
        assert not began.is_set()
        host.loaded = None

    hosted(main)


def test_a_ring_is_freed_while_a_stage_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes minutes, after which the head would have given the order up long ago."""

    async def main(host: StageHost) -> None:
        began = loading_never_ends(monkeypatch)
        ours = await enter_ring(host)
        preparing = asyncio.create_task(prepare(host))
        await began.wait()
        async with asyncio.timeout(60):
            assert await host.unload("head", ours.ring)
        with pytest.raises(TakenError, match="ring r was freed before it was ready"):
            await preparing
        assert host.membership is None

    hosted(main)


def test_a_ring_that_is_due_does_not_wait_for_what_stands_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node leaves, and its head would give up before a neighbour's layers are loaded."""

    async def main(host: StageHost) -> None:
        began = loading_never_ends(monkeypatch)
        standing_by = asyncio.create_task(prepare(host, "instead", stands_for="bert"))
        await began.wait()
        due = asyncio.create_task(prepare(host))
        async with asyncio.timeout(60):
            with pytest.raises(TakenError, match="ring next comes first"):
                await standing_by
        due.cancel()
        with pytest.raises(asyncio.CancelledError):
            await due

    hosted(main)


def test_a_node_that_has_left_refuses_by_name() -> None:
    async def main(host: StageHost) -> None:
        await host.close()
        with pytest.raises(PeerFailedError, match="this node is leaving"):
            await load(host)
        with pytest.raises(PeerFailedError, match="this node is leaving"):
            await host.measure(lambda tick: 1, lambda done, total: None)
        with pytest.raises(PeerFailedError, match="this node is leaving"):
            await host.wait_for_compute()

    hosted(main)


def test_while_one_head_loads_another_one_is_refused_at_once_and_told_for_whom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(host: StageHost) -> None:
        began = loading_never_ends(monkeypatch)
        loading = asyncio.create_task(load(host))
        await began.wait()
        async with asyncio.timeout(60):
            with pytest.raises(TakenError, match=r"loading /m for head \(10\.0\.0\.1:7\); wait"):
                await enter_ring(host, owner="other")
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    hosted(main)


def test_a_place_is_free_when_it_is_taken_back_or_its_head_is_gone() -> None:
    async def main(host: StageHost) -> None:
        first = await enter_ring(host)
        await host.leave_ring(first)
        second = await enter_ring(host, owner="other")
        await host.leave_ring(first)  # it comes late
        assert host.membership is second
        host.head_lost("another")
        with pytest.raises(TakenError):
            await enter_ring(host)
        host.head_lost(second.ring)
        third = await enter_ring(host)
        assert host.membership is third

    hosted(main)


def test_a_head_that_gives_up_its_ring_does_not_end_the_one_that_came_first() -> None:
    """Its order to free the stage may wait while this node joins the ring of another head."""

    async def main(host: StageHost) -> None:
        ours = await enter_ring(host)
        await host.leave_ring(ours)
        async with asyncio.timeout(60):
            async with host._changing:  # as while a stage is freed
                entering = asyncio.create_task(enter_ring(host, owner="other", ring="theirs"))
                freeing = asyncio.create_task(host.unload("head", ours.ring))
                await asyncio.sleep(0)
            theirs = await entering
            assert not await freeing
        assert host.membership is theirs
        with pytest.raises(TakenError, match="for other"):
            await host.load(
                ours,
                STAGE_ORDER,
                sent=WireDType.FLOAT32,
                received=WireDType.FLOAT32,
                threads=1,
                memory_bytes=[1],
                on_progress=lambda done, total: None,
            )

    hosted(main)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_what_has_come_for_a_ring_is_not_taken_by_the_next_one(is_prepared: bool) -> None:
    """A sequence that has left before it was opened has the number of one of another head."""

    async def main(host: StageHost) -> None:
        moves = mock.Mock()
        stage = SimpleNamespace(
            order=STAGE_ORDER, fits=lambda order: True, moves=moves, parts=(), compute=mock.Mock()
        )
        stage.compute.is_lost = False
        host.loaded = cast(LoadedStage, stage)
        if is_prepared:
            host._prepared = PreparedStage(
                ring="r", order=STAGE_ORDER, stage=host.loaded, stands_for=""
            )
        await load(host)
        host.loaded = None
        assert moves.forget.call_count == (0 if is_prepared else 1)

    hosted(main)


def test_only_a_standby_is_dropped_where_a_node_rests() -> None:
    """What is ready for a ring to come is needed there soon, or dropped by its head."""

    async def main(host: StageHost) -> None:
        stage = cast(
            LoadedStage, SimpleNamespace(parts=(), weight_bytes_by_place={0: 7}, moves=None)
        )
        for stands_for, left in (("bert", 0), ("", 7)):
            host._prepared = PreparedStage(
                ring="r", order=STAGE_ORDER, stage=stage, stands_for=stands_for
            )
            await host.drop_standby()
            assert host.weight_bytes == left

    hosted(main)


def test_a_node_that_drains_takes_its_own_orders_alone() -> None:
    """Requests that it leads still may need another ring."""

    async def main(host: StageHost) -> None:
        host.refusals.is_draining = True
        with pytest.raises(PeerFailedError, match="this node is draining"):
            await enter_ring(host)
        assert await enter_ring(host, owner="own") is host.membership

    hosted(main)


def test_a_member_that_drains_or_rests_goes_on_for_the_head_of_its_ring() -> None:
    """Its ring loses another node, and needs this one in the next; it stands by for nobody."""

    async def main(host: StageHost) -> None:
        for is_draining, rests in ((True, ""), (False, "memory is short")):
            host.refusals.is_draining, host.refusals.rests = False, ""
            former = await enter_ring(host, owner="head")
            host.refusals.is_draining, host.refusals.rests = is_draining, rests
            former.revoke(PeerFailedError("another node was lost"))
            assert await enter_ring(host, owner="head", ring="next") is host.membership
            with pytest.raises(PeerFailedError, match=AWAY):
                await enter_ring(host, owner="other")
            with pytest.raises(PeerFailedError, match=AWAY):
                await prepare(host, "later", stands_for="bert")
            await host.unload("head")
            with pytest.raises(PeerFailedError, match=AWAY):
                await enter_ring(host, owner="head")

    hosted(main)


def test_a_former_head_may_lead_again_when_who_took_its_place_is_lost() -> None:
    """That one may not have told it: then it would be refused, and nobody could say why."""
    refusals = Refusals(node="own")
    refusals.supersede("anna", 70000, "bert")
    of_bert, of_carl = (
        cast(RingMembership, SimpleNamespace(owner=owner)) for owner in ("bert", "carl")
    )
    with pytest.raises(SupersededError):
        refusals.check_not_superseded("anna", 2, of_bert)
    refusals.check_not_superseded("anna", 70001, of_bert)
    for left in (None, of_carl):  # bert gave up, and may have told nobody
        refusals.check_not_superseded("anna", 2, left)
    refusals.head_lost("carl")
    with pytest.raises(SupersededError):
        refusals.check_not_superseded("anna", 2, of_bert)
    refusals.head_lost("bert")
    refusals.check_not_superseded("anna", 2, of_bert)


def test_a_head_that_thinks_again_takes_its_own_place() -> None:
    """And what still is on the way for its former ring comes to nothing."""

    async def main(host: StageHost) -> None:
        former = await enter_ring(host)
        await enter_ring(host, ring="s")
        with pytest.raises(PeerFailedError, match="no member of ring r any more"):
            await host.load(
                former,
                STAGE_ORDER,
                sent=WireDType.FLOAT32,
                received=WireDType.FLOAT32,
                threads=1,
                memory_bytes=[1],
                on_progress=lambda done, total: None,
            )
        with pytest.raises(UsageError, match="ring s was asked to connect before its stage"):
            await host.join("s", 1)

    hosted(main)


def test_a_load_that_hangs_on_a_disk_ends_by_name_and_the_node_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    begun: list[Callable[[], object]] = []

    def hang(*_: object) -> None:
        begun.pop()()
        answers.wait(60)

    monkeypatch.setattr(stage_loader, "load", hang)
    monkeypatch.setattr(stage_host_module, "CLOSE_S", 0.05)

    async def silent(host: StageHost) -> None:
        begun.append(lambda: None)
        with pytest.raises(DiskSilentError, match="/m: the disk does not answer"):
            await load(host)
        assert await host.measure(lambda tick: 7, lambda done, total: None) == 7

    async def leaving(host: StageHost) -> None:
        began, loop = asyncio.Event(), asyncio.get_running_loop()
        begun.append(lambda: loop.call_soon_threadsafe(began.set))
        order = asyncio.create_task(load(host))
        await began.wait()
        async with asyncio.timeout(30):
            await host.close()
        with pytest.raises(PeerFailedError, match="this node is leaving"):
            await order

    try:
        hosted(leaving)
        monkeypatch.setattr(stage_loader, "LOAD_SILENCE_S", 0.05)
        hosted(silent)
    finally:
        answers.set()


@pytest.mark.parametrize("stands_for", ["", "bert"])
def test_what_is_made_ready_for_a_head_goes_with_it(stands_for: str) -> None:
    """Nobody else would have it freed: not a standby, nor what was for the head's next plan.

    Also where another head has asked for such a stage in vain meanwhile.
    """
    lost: list[Callable[[PeerFailedError], None]] = []

    def watch(control: object, on_lost: Any) -> Callable[[], None]:
        lost.append(on_lost)
        return lambda: lost.remove(on_lost)

    async def main() -> None:
        stage = SimpleNamespace(order=STAGE_ORDER, weight_bytes=1, room_blocks=1, load_s=0.0)
        stage.kernel, stage.exact_rows = "", 1
        stage.arithmetic, stage.shares_blocks, stage.room_states = "", False, 0
        stage.parts, stage.tables = (), ()
        host = mock.Mock(prepare=mock.AsyncMock(return_value=(stage, False)))
        host.weight_bytes_by_device = [0]
        sharing = mock.Mock(folder=mock.AsyncMock(return_value=Path("/m")))
        sharing.adapters.fetch = mock.AsyncMock(return_value=())
        orders = StageOrders(
            host=host,
            sharing=sharing,
            budget=MemoryBudget(
                device=Device(kind="cpu", description="cpu", dtypes=()), asked_bytes=1
            ),
            asked_threads=1,
            local_nodes=mock.Mock(list=list),
            watch=cast(Any, watch),
            latest=lambda control: control,
            log=lambda line: None,
        )
        order = replace(ORDER, rank=1, n_stages=2, layers=(1, 2), addresses=["a:1", "b:1"])
        await orders.load_for(mock.Mock(), replace(order, beside=True, stands_for=stands_for))
        host.prepare.side_effect = BusyError("sequences are open")
        with pytest.raises(BusyError):
            await orders.load_for(mock.Mock(), replace(order, ring="s", beside=True))
        for on_lost in lost:
            on_lost(PeerFailedError("the head is lost"))
        host.drop_prepared.assert_called_once_with("r")

    asyncio.run(main())
