"""A member of a ring of one: work, and what happens when the compute itself is broken."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from support.strategies.wire_strategies import hello

from shardnet.cluster.member import ring_membership
from shardnet.cluster.member.ring_membership import (
    KEEP_S,
    SETTLE_S,
    DataEnd,
    DialData,
    OnBroken,
    RingMembership,
)
from shardnet.errors import (
    LinkClosedError,
    PeerFailedError,
    PeerSilentError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.ring.pipeline import Pipeline
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.handover import Lane
from shardnet.slot_operations import SlotOperation
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import (
    Epoch,
    MicroBatch,
    NodeId,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)
from shardnet.wire.framing.frames import Frame
from shardnet.wire.messages.handshake import Hello, Purpose, read_error


class Panic(BaseException):
    """What a Rust library raises when it panics: no Exception."""


class BrokenCompute:
    """A compute with a bug."""

    def __init__(self) -> None:
        self.was_reset = threading.Event()

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Nothing."""

    def operate(self, operation: SlotOperation) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Note it."""
        self.was_reset.set()

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        raise Panic("a bug of ours")


async def no_dial(address: str, own: DataEnd) -> Link:
    raise AssertionError("a ring of one dials nobody")


def data_hello(rank: int) -> Hello:
    """What a neighbour says on its data link."""
    return hello("n", Purpose.DATA, ring="r", epoch=1, rank=rank)


def membership(
    on_broken: OnBroken,
    n_stages: int = 1,
    rank: int = 0,
    dial: DialData = no_dial,
    now_s: Callable[[], float] = time.monotonic,
) -> RingMembership:
    return RingMembership(
        ring="r",
        epoch=Epoch(1),
        rank=rank,
        addresses=("a:1", "b:2", "c:3")[:n_stages],
        model="/m",
        owner="n",
        owner_name="n",
        dial=dial,
        on_broken=on_broken,
        now_s=now_s,
    )


def idle_pipeline() -> Pipeline:
    return Pipeline(
        epoch=Epoch(1),
        vocab_size=5,
        clock_ns=time.perf_counter_ns,
        on_answered=lambda answered: None,
        on_failed=lambda failed: None,
    )


@pytest.mark.parametrize("loses_head", [False, True])
@pytest.mark.parametrize("keep_s", [KEEP_S, 0.0])
def test_a_bug_in_the_compute_breaks_the_ring_by_name(
    keep_s: float, loses_head: bool, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sequences hold is kept for the next ring, until this one is left or its time is over."""
    monkeypatch.setattr(ring_membership, "HEADLESS_KEEP_S" if loses_head else "KEEP_S", keep_s)

    async def main() -> None:
        compute = BrokenCompute()
        broken: list[ShardnetError] = []
        ended = asyncio.Event()

        def note(error: ShardnetError, silent: NodeId | None) -> None:
            broken.append(error)
            ended.set()

        executor = Executor("test")
        pipeline = idle_pipeline()
        one = membership(note)
        await one.join([Lane(compute, executor)], pipeline)
        group = RowGroup(
            sequence_id=SequenceId(1), slot=SlotId(0), position=0, n_rows=1, n_sampled=1
        )
        pipeline.send(MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=(1,)))
        await ended.wait()
        assert [str(error) for error in broken] == [
            "internal error in rank 0: RuntimeError('Panic: a bug of ours'), a bug of shardnet; "
            "report it, with what that node wrote"
        ]
        assert loses_head or keep_s == 0 or not compute.was_reset.is_set()
        if loses_head:
            one.lose_owner()
        if keep_s:
            assert not compute.was_reset.is_set()
            await one.leave()
        assert await asyncio.to_thread(compute.was_reset.wait, 30)
        await one.leave()
        executor.join()

    asyncio.run(main())
    assert "rank 0 of ring r failed" in logged.getvalue()


@pytest.mark.parametrize(
    ("error", "blamed"), [(PeerSilentError("n1: nothing came"), "n1"), (PeerFailedError("x"), None)]
)
def test_who_fell_silent_is_told_to_the_head_and_no_other_neighbour_takes_it_for_us(
    error: ShardnetError, blamed: str | None
) -> None:
    async def main() -> None:
        told: list[object] = []
        heard: list[Frame] = []
        one = membership(lambda *what: told.append(what), n_stages=3, rank=1)
        at_n1 = SimpleNamespace(node="n1", purpose=Purpose.DATA)
        at_n2 = SimpleNamespace(node="n2", purpose=Purpose.DATA)
        silent = SimpleNamespace(closed=True, peer=at_n1)
        other = SimpleNamespace(closed=False, peer=at_n2, send=heard.append)
        of_parts = SimpleNamespace(node="n2", purpose=Purpose.PARTS)
        handed_over = SimpleNamespace(closed=True, peer=of_parts)
        one._links = cast(Any, [silent, other, handed_over])
        one._break(error)
        assert told == [(error, blamed)]
        assert read_error(heard[0]).code == PeerFailedError.code

    asyncio.run(main())


def test_slots_are_freed_though_whoever_leaves_gives_up_while_something_is_computed() -> None:
    async def main() -> None:
        compute, executor, computed = BrokenCompute(), Executor("test"), threading.Event()
        one = membership(print)
        await one.join([Lane(compute, executor)], idle_pipeline())
        executor.submit(computed.wait)
        leaving = asyncio.create_task(one.leave())
        for _ in range(50):  # until it waits for the thread that computes
            await asyncio.sleep(0)
        assert not one._slots
        leaving.cancel()
        await asyncio.wait([leaving])
        computed.set()
        await one.leave()
        assert await asyncio.to_thread(compute.was_reset.wait, 30)
        executor.join()

    asyncio.run(main())


def test_a_seat_that_is_left_while_it_connects_keeps_no_link() -> None:
    async def main() -> None:
        node = hello("n")
        near, far = await memory_pair(node, node)
        dialled, answer = asyncio.Event(), asyncio.Event()

        async def dial(address: str, own: DataEnd) -> Link:
            dialled.set()
            await answer.wait()
            return near

        one = membership(print, n_stages=2, dial=dial)
        joining = asyncio.create_task(one.join([Lane(BrokenCompute(), Executor("test"))], None))
        await dialled.wait()
        await one.leave()
        answer.set()
        with pytest.raises(PeerFailedError, match="this node left ring r while its links"):
            await joining
        with pytest.raises(LinkClosedError):
            await far.receive()
        assert near.closed

    asyncio.run(main())


def test_a_neighbour_that_comes_while_a_seat_is_left_is_turned_away() -> None:
    """Nobody would close its link."""

    async def main() -> None:
        closing, may_close = asyncio.Event(), asyncio.Event()

        class Slow:
            """The link to the stage behind, whose last words take a while."""

            peer = data_hello(1)

            async def close(self) -> None:
                closing.set()
                await may_close.wait()

        async def dial(address: str, own: DataEnd) -> Link:
            return cast(Link, Slow())

        one = membership(print, n_stages=2, dial=dial)
        joining = asyncio.create_task(one.join([Lane(BrokenCompute(), Executor("test"))], None))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(one.leave())
        await closing.wait()
        before = data_hello(rank=1)
        with pytest.raises(UsageError, match="opened a data link here"):
            one.check_hello(before)
        may_close.set()
        await leaving
        with pytest.raises(PeerFailedError, match="this node left ring r while its links"):
            await joining

    asyncio.run(main())


def test_a_seat_that_is_left_while_it_waits_for_its_neighbour_says_so() -> None:
    """A cancellation would be nobody's error: the head's ring would seem to be connected."""

    async def main() -> None:
        node = hello("n")
        near, far = await memory_pair(node, node)
        dialled = asyncio.Event()

        async def dial(address: str, own: DataEnd) -> Link:
            dialled.set()
            return near

        one = membership(print, n_stages=2, dial=dial)
        joining = asyncio.create_task(one.join([Lane(BrokenCompute(), Executor("test"))], None))
        await dialled.wait()
        await asyncio.sleep(0)  # it has the link now, and waits for the other one
        leaving = asyncio.create_task(one.leave())
        with pytest.raises(PeerFailedError, match="this node left ring r while its links"):
            await joining
        await asyncio.gather(leaving, far.close())

    asyncio.run(main())


def test_a_seat_that_is_left_before_its_work_begins_is_not_kept_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        alertness = mock.Mock()
        monkeypatch.setattr(ring_membership, "Alertness", lambda **_: alertness)
        data = data_hello(rank=0)
        (before, here), (there, after) = [await memory_pair(data, data) for _ in range(2)]

        async def dial(address: str, own: DataEnd) -> Link:
            return there

        one, executor = membership(print, n_stages=3, rank=1, dial=dial), Executor("test")
        one.may_spin = lambda: True
        one.accept(here)
        await one.join([Lane(BrokenCompute(), executor)], None)
        await one.leave()
        alertness.close.assert_called()
        await asyncio.gather(before.close(), after.close())
        executor.join()

    asyncio.run(main())


def test_a_ring_forms_until_its_first_step_or_until_none_has_come_for_some_seconds() -> None:
    async def main() -> None:
        now_s, executor = 100.0, Executor("test")
        one = membership(print, now_s=lambda: now_s)
        now_s += 1000  # loading may take long
        assert one.is_forming
        await one.join([Lane(BrokenCompute(), executor)], idle_pipeline())
        now_s += SETTLE_S - 1
        assert one.is_forming
        one.last_step = StepId(1)
        assert not one.is_forming
        one.last_step = StepId(0)
        now_s += 1
        assert not one.is_forming
        await one.leave()
        executor.join()

    asyncio.run(main())


def test_a_ring_whose_head_is_gone_before_it_stands_is_over() -> None:
    async def main() -> None:
        one, executor = membership(print), Executor("test")
        one.lose_owner()
        assert one.is_over
        assert not one.is_forming
        standing = membership(print)
        await standing.join([Lane(BrokenCompute(), executor)], idle_pipeline())
        standing.lose_owner()  # its links tell
        assert not standing.is_over
        await standing.leave()
        executor.join()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ring", "epoch", "rank"), [("x", 1, 2), ("r", 2, 2), ("r", 1, 0), ("r", 1, 1)]
)
def test_only_the_stage_before_may_send_here(ring: str, epoch: int, rank: int) -> None:
    async def main() -> None:
        before = hello("n", Purpose.DATA, ring=ring, epoch=epoch, rank=rank)
        one = membership(print, n_stages=3, rank=0)
        with pytest.raises(UsageError, match="expected rank 2 of ring r epoch 1"):
            one.check_hello(before)
        parts = hello("n", Purpose.PARTS, ring="r", epoch=1, rank=2)
        with pytest.raises(UsageError, match="opened a parts link here"):
            one.check_hello(parts)

    asyncio.run(main())
