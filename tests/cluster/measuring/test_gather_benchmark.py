"""Gathers measured over sockets, and peers that are silent, at work, or send rubbish."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace
from support.transport_harness import HARNESSES, OPTIONS, Harness, hello

from shardnet.cluster.measuring import link_benchmark
from shardnet.cluster.measuring.link_benchmark import (
    END,
    LARGE,
    LEAST,
    N_PARTS,
    PART_BYTES,
    SMALL,
    GatherBenchmark,
    figures_of,
)
from shardnet.errors import BusyError, ShardnetError, UsageError
from shardnet.runtime.stage.executor import Executor
from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.link import Link
from shardnet.types import NodeId, WireDType
from shardnet.wire.messages.handshake import MEASURED_RING, PeerRole, Purpose
from shardnet.wire.payloads.parts import PartHeads, ShardPart

T = TypeVar("T")
OF_NO_RING = replace(hello("near", Purpose.PARTS), ring=MEASURED_RING, epoch=0)
OVER_TCP = [harness for name, harness in HARNESSES.items() if name != "memory"]


@dataclass
class Compute:
    """A compute thread, whose node may be at work after some looks."""

    n_looks: int | None = None
    executor: Executor = field(default_factory=lambda: Executor("test-compute"))

    def check_idle(self) -> None:
        if self.n_looks is not None:
            self.n_looks -= 1
            if self.n_looks < 0:
                raise BusyError("it generates")

    def between_sequences(self, job: Callable[[], T]) -> asyncio.Future[T]:
        self.check_idle()
        return self.executor.submit(job)


@dataclass
class Ends:
    """A node that measures, and the far end of the link that it opens."""

    harness: Harness
    near: Compute = field(default_factory=Compute)
    far: Compute = field(default_factory=Compute)
    serve: Callable[[Link], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self.measuring = GatherBenchmark(compute=self.near, dial=self._dial)
        self.answering = GatherBenchmark(compute=self.far, dial=self._dial)
        self.served: asyncio.Task[None] | None = None

    async def _dial(self, node: NodeId) -> Link:
        self.answering.check_hello(OF_NO_RING)
        near, far = await self.harness.pair(purpose=Purpose.PARTS)
        self.served = asyncio.create_task(self._serve(far))
        return near

    async def _serve(self, link: Link) -> None:
        await (self.serve or self.answering.serve)(link)


@asynccontextmanager
async def ends(harness: Harness) -> AsyncIterator[Ends]:
    made = Ends(harness)
    try:
        yield made
        if made.served is not None:
            await made.served
    finally:
        for compute in (made.near, made.far):
            await compute.executor.run(lambda: None)
            compute.executor.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine that runs other tests take its time."""
    for name in ("PART_S", "MOST_S", "LONGEST_S", "GATHER_GIVE_UP_S"):
        monkeypatch.setattr(link_benchmark, name, 60.0)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("harness", OVER_TCP)
def test_two_nodes_measure_their_gathers(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            for _ in range(2):
                found = await both.measuring.measure(NodeId("far"))
                assert found is not None
                assert found.gather_s > 0
                assert found.gather_bytes_per_s > 0
                assert both.served is not None
                await both.served

    harness.run(scenario)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("who", ["near", "far"])
@pytest.mark.parametrize("n_looks", [0, 1, 2, 5])
def test_who_computes_is_not_disturbed(who: str, n_looks: int) -> None:
    """Neither at the beginning, nor where a sequence is opened in the middle of it."""

    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            getattr(both, who).n_looks = n_looks
            assert await both.measuring.measure(NodeId("far")) is None
            getattr(both, who).n_looks = None
            if both.served is not None:
                await both.served
            assert await both.measuring.measure(NodeId("far")) is not None

    HARNESSES["tcp-asyncio"].run(scenario)


def test_a_silent_peer_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_benchmark, "PART_S", 0.05)

    async def silent(link: Link) -> None:
        connection = await link.detach()
        await gone.wait()
        connection.close()

    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            both.serve = silent
            assert await both.measuring.measure(NodeId("far")) is None
            gone.set()

    gone = asyncio.Event()
    HARNESSES["tcp-asyncio"].run(scenario)


@pytest.mark.usefixtures("patience")
def test_a_link_that_takes_too_long_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_benchmark, "MOST_S", 0.0)

    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            assert await both.measuring.measure(NodeId("far")) is None

    HARNESSES["tcp-asyncio"].run(scenario)


def test_gathers_that_are_given_up_end_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread that exchanges parts raises later is nobody's error."""
    monkeypatch.setattr(link_benchmark, "PART_S", 60.0)
    monkeypatch.setattr(link_benchmark, "GATHER_GIVE_UP_S", 0.3)
    reported: list[dict[str, Any]] = []

    async def silent(link: Link) -> None:
        connection = await link.detach()
        await gone.wait()
        connection.close()

    async def scenario(harness: Harness) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        async with ends(harness) as both:
            both.serve = silent
            assert await both.measuring.measure(NodeId("far")) is None
            await both.near.executor.run(lambda: None)  # the exchange has ended
            gone.set()
        gc.collect()
        await asyncio.sleep(0)

    gone = asyncio.Event()
    HARNESSES["tcp-asyncio"].run(scenario)
    assert reported == []


def test_a_node_that_nobody_can_dial_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_benchmark, "GATHER_GIVE_UP_S", 0.01)

    async def dial(node: NodeId) -> Link:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        measuring = GatherBenchmark(compute=Compute(), dial=dial)
        assert await measuring.measure(NodeId("far")) is None

    asyncio.run(scenario())


def part_of(kind: int, shard: int, number: int, following: int) -> bytes:
    """A part as it travels without TLS."""
    payload = bytes([following]) + bytes(PART_BYTES[kind] - 1)
    width = len(payload) // 4
    part = ShardPart(
        number=number, shard=shard, dtype=WireDType.FLOAT32, n_rows=1, width=width, payload=payload
    )
    return PartHeads(0, is_checked=True).packed(part, 1) + payload


async def gone(connection: DirectConnection) -> None:
    """Read until the other end is gone, and close."""
    scratch = memoryview(bytearray(1 << 16))
    try:
        while True:
            connection.flush()
            if not connection.receive(scratch):
                await asyncio.sleep(0.001)
    except ShardnetError:
        connection.close()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    "rubbish",
    [b"\xff" * 8192, part_of(LARGE, 1, 0, END), part_of(SMALL, 0, 0, END), b""],
    ids=["noise", "another size", "another shard", "an end"],
)
def test_a_peer_that_sends_rubbish_has_no_figures(rubbish: bytes) -> None:
    async def serve(link: Link) -> None:
        connection = await link.detach()
        if rubbish:
            connection.send(rubbish)
            await gone(connection)
        else:
            connection.close()

    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            both.serve = serve
            assert await both.measuring.measure(NodeId("far")) is None

    HARNESSES["tcp-asyncio"].run(scenario)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    "asked",
    [
        part_of(SMALL, 0, 0, 7),
        b"".join(part_of(SMALL, 0, number, SMALL) for number in range(sum(N_PARTS.values()) + 9)),
        b"\0" * 65536,
    ],
    ids=["another kind", "too many", "noise"],
)
def test_nobody_is_answered_what_does_not_exist_or_without_end(asked: bytes) -> None:
    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            near, far = await harness.pair(purpose=Purpose.PARTS)
            serving = asyncio.create_task(both.answering.serve(far))
            connection = await near.detach()
            connection.send(asked)
            await gone(connection)
            await serving
            both.answering.check_hello(OF_NO_RING)  # it is free again

    HARNESSES["tcp-asyncio"].run(scenario)


def test_one_node_at_a_time_and_nobody_else_is_answered() -> None:
    async def scenario(harness: Harness) -> None:
        async with ends(harness) as both:
            near, far = await harness.pair(OPTIONS, Purpose.PARTS)
            serving = asyncio.create_task(both.answering.serve(far))
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="measures gathers with another one"):
                both.answering.check_hello(OF_NO_RING)
            near.abort("test")
            await serving
            for wrong in ({"role": PeerRole.CLIENT}, {"epoch": 1}, {"rank": 2}):
                with pytest.raises(UsageError, match="expected a node that measures gathers"):
                    both.answering.check_hello(replace(OF_NO_RING, **wrong))

    HARNESSES["tcp-asyncio"].run(scenario)


def test_time_and_rate_are_told_apart() -> None:
    small, large = (PART_BYTES[kind] for kind in (SMALL, LARGE))
    found = figures_of(50e-6 + small / 118e6, 50e-6 + large / 118e6)
    assert found.gather_s == pytest.approx(50e-6)
    assert found.gather_bytes_per_s == pytest.approx(118e6, rel=0.02)
    odd = figures_of(1e-3, 1e-4)  # small ones were disturbed
    assert 0 < odd.gather_s <= 1e-3
    assert odd.gather_bytes_per_s > 0
    assert min(N_PARTS.values()) >= LEAST
