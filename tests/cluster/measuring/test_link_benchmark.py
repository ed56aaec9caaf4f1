"""Links measured by pings: what is kept, what is refused, and how long a slow link takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.measuring import link_benchmark
from shardnet.cluster.measuring.link_benchmark import (
    FIRST_PAYLOAD_BYTES,
    GOOD_FOR_S,
    PAYLOADS_S,
    QUICK_RATE_BYTES,
    UNSTEADY_GOOD_FOR_S,
    GatherFigures,
    LinkBenchmark,
    best_rate,
)
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import BusyError
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.transport.memory import memory_pair
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PING_BYTES
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose
from shardnet.wire.messages.measurements import LinkMeasured, MeasureLinks
from shardnet.wire.messages.membership import Ping

FAR = NodeId("far")


class Ends:
    """A near node that measures and a far one that answers, and what either is told."""

    def __init__(self) -> None:
        self.pings: list[Ping] = []
        self.near_is_busy = False
        self.far_is_busy = False
        self.n_turns = 0
        self.now_s = 1000.0
        self.gathers: GatherFigures | None = None
        self.control: ControlLink | None = None
        self.figures = LinkBenchmark(
            link_of=lambda node: self.control if node == FAR else None,
            wait_for_compute=self._wait_for_compute,
            measure_gathers=self._measure_gathers,
            now_s=lambda: self.now_s,
        )

    async def measure(
        self, *nodes: str, payload_bytes: int = 0, again: bool = False
    ) -> list[LinkMeasured]:
        ask = MeasureLinks(request=3, nodes=[*nodes], payload_bytes=payload_bytes, again=again)
        answer = await self.figures.measure(ask)
        assert answer.request == 3
        return answer.links

    async def answer(self, control: ControlLink, message: Incoming) -> None:
        assert isinstance(message, Ping)
        if self.far_is_busy and (message.payload or message.as_step):
            raise BusyError("it generates")
        self.pings.append(message)
        control.send(Done(request=message.request))

    async def _measure_gathers(self, node: NodeId) -> GatherFigures | None:
        assert node == FAR
        return self.gathers

    async def _wait_for_compute(self) -> None:
        if self.near_is_busy:
            raise BusyError("we generate")
        self.n_turns += 1


@asynccontextmanager
async def linked() -> AsyncIterator[Ends]:
    def hello(name: str) -> Hello:
        return Hello(purpose=Purpose.CONTROL, role=PeerRole.NODE, node=name, name=name, version="0")

    async def nobody(control: ControlLink, message: Incoming) -> None:
        raise AssertionError(f"{message} was not expected")

    ends = Ends()
    near, far = await memory_pair(hello("near"), hello(FAR))
    ends.control = ControlLink(near, nobody)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ends.control.serve_to_the_end())
        tasks.create_task(ControlLink(far, ends.answer).serve_to_the_end())
        yield ends
        await asyncio.gather(near.close(), far.close())


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time for payloads of the real size."""
    monkeypatch.setattr(ProcessorUse, "disturbed", lambda before, later: False)
    for name in ("PAYLOADS_S", "GIVE_UP_S", "QUICK_RATE_S"):
        monkeypatch.setattr(link_benchmark, name, 100.0)


@pytest.mark.usefixtures("patience")
def test_a_link_is_measured_once_and_then_known_until_it_is_stale() -> None:
    async def main() -> None:
        async with linked() as ends:
            [first] = await ends.measure(FAR)
            assert first.node == FAR
            assert first.round_trip_s == float(f"{first.round_trip_s:.2g}") > 0
            assert first.bytes_per_s == float(f"{first.bytes_per_s:.2g}") > 0
            n_pings = len(ends.pings)
            ends.now_s += GOOD_FOR_S - 1
            assert await ends.measure(FAR) == [first]
            assert len(ends.pings) == n_pings
            ends.now_s += 2
            await ends.measure(FAR)
            assert len(ends.pings) > n_pings
            n_pings = len(ends.pings)
            ends.gathers = GatherFigures(gather_s=5e-5, gather_bytes_per_s=1e8)
            [last] = await ends.measure(FAR, again=True)
            assert len(ends.pings) > n_pings
            assert (first.gather_s, last.gather_s, last.gather_bytes_per_s) == (None, 5e-5, 1e8)

    asyncio.run(main())


@pytest.mark.usefixtures("patience")
def test_a_figure_of_a_busy_machine_is_known_for_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with linked() as ends:
            monkeypatch.setattr(ProcessorUse, "disturbed", lambda before, later: True)
            [first] = await ends.measure(FAR)
            assert not first.is_steady
            ends.now_s += UNSTEADY_GOOD_FOR_S - 1
            assert await ends.measure(FAR) == [first]
            monkeypatch.setattr(ProcessorUse, "disturbed", lambda before, later: False)
            ends.now_s += 2
            [second] = await ends.measure(FAR)
            assert second.is_steady

    asyncio.run(main())


@pytest.mark.usefixtures("patience")
def test_a_step_waits_for_both_compute_threads_and_payloads_grow_to_the_real_size() -> None:
    async def main() -> None:
        async with linked() as ends:
            await ends.measure(FAR, payload_bytes=300_000)
            steps = [ping for ping in ends.pings if ping.as_step]
            assert ends.n_turns == len(steps) > 3
            sizes = [len(ping.payload) for ping in ends.pings if ping.payload]
            assert sizes == sorted(sizes)
            assert (sizes[0], sizes[-1]) == (FIRST_PAYLOAD_BYTES, 300_000)
            n_pings = len(ends.pings)
            await ends.measure(FAR, payload_bytes=200_000)
            assert len(ends.pings) == n_pings, "a figure of larger payloads does"
            await ends.measure(FAR, payload_bytes=2**32 - 1)
            assert max(len(ping.payload) for ping in ends.pings) == MAX_PING_BYTES

    asyncio.run(main())


@pytest.mark.usefixtures("patience")
def test_a_glance_tells_what_is_known_or_looks_and_keeps_nothing() -> None:
    async def main() -> None:
        async with linked() as ends:
            glanced = await ends.figures.quick_rate(FAR)
            assert glanced is not None
            assert glanced > 0
            assert max(len(ping.payload) for ping in ends.pings) <= QUICK_RATE_BYTES
            assert not any(ping.as_step for ping in ends.pings)
            [measured] = await ends.measure(FAR)
            n_pings = len(ends.pings)
            assert await ends.figures.quick_rate(FAR) == measured.bytes_per_s
            assert len(ends.pings) == n_pings
            assert await ends.figures.quick_rate(NodeId("nobody")) is None

    asyncio.run(main())


def test_a_glance_at_a_node_that_generates_shows_nothing() -> None:
    async def main() -> None:
        async with linked() as ends:
            ends.far_is_busy = True
            assert await ends.figures.quick_rate(FAR) is None

    asyncio.run(main())


@pytest.mark.parametrize("busy", ["near_is_busy", "far_is_busy"])
@pytest.mark.usefixtures("patience")
def test_who_generates_is_not_disturbed_and_tells_what_was_known(busy: str) -> None:
    async def main() -> None:
        async with linked() as ends:
            setattr(ends, busy, True)
            assert await ends.measure(FAR, "stranger") == []
            setattr(ends, busy, False)
            [known] = await ends.measure(FAR)
            setattr(ends, busy, True)
            assert await ends.measure(FAR, again=True) == [known]

    asyncio.run(main())


@given(
    rate=st.floats(1e3, 1e10),
    empty_s=st.floats(1e-5, 0.3),
    payload_bytes=st.integers(FIRST_PAYLOAD_BYTES, MAX_PING_BYTES),
)
def test_a_slow_link_costs_little_more_than_the_time_there_is(
    rate: float, empty_s: float, payload_bytes: int
) -> None:
    now_s, sizes = 0.0, list[int]()

    async def send(size: int) -> float:
        nonlocal now_s
        sizes.append(size)
        took_s = empty_s + size / rate
        now_s += took_s
        return took_s

    found = asyncio.run(best_rate(send, empty_s, payload_bytes, lambda: now_s))
    assert max(sizes) <= payload_bytes
    first_s = empty_s + FIRST_PAYLOAD_BYTES / rate
    assert now_s <= PAYLOADS_S + 2 * max(first_s, empty_s)
    if empty_s < 5 * max(sizes) / rate:
        assert found == pytest.approx(rate, rel=0.01)
    if payload_bytes / rate + empty_s < PAYLOADS_S / 20:
        assert max(sizes) == payload_bytes
