"""Measure this node's links over their control links: round trip and bandwidth, and gathers.

Knows how to measure one link within a second or two, and for how long a figure is valid. Must not
know which links a plan needs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import asdict, replace

from shardnet.cluster.measuring.gather_benchmark import GatherFigures
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.rtt_probe import N_PINGS, ping
from shardnet.cluster.placement.figures import LinkSpeed
from shardnet.errors import ShardnetError
from shardnet.runtime.loading.measuring import rounded
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PING_BYTES
from shardnet.wire.messages.measurements import LinkMeasured, LinksMeasured, MeasureLinks

GOOD_FOR_S: Final = 300.0
"""A figure of a link is measured again when it is older."""
UNSTEADY_GOOD_FOR_S: Final = 30.0
"""The same, of a figure that was taken while other programs kept this machine busy."""

N_ROUND_TRIPS: Final = 9
PAUSE_S: Final = 0.003
"""Pause between two round trips, so that cores go idle as they do between steps of a ring."""
ROUND_TRIPS_S: Final = 0.5
"""Time limit of the round trips of a slow link, of which at least three are measured."""

FIRST_PAYLOAD_BYTES: Final = 16 * 1024
GROWTH: Final = 4
N_PAYLOADS: Final = 3
PAYLOADS_S: Final = 1.0
"""Time limit of all payloads: none is sent that is expected to exceed what is left of it."""

GIVE_UP_S: Final = 10.0
"""A link that takes longer to measure has no figure."""

QUICK_RATE_BYTES: Final = 256 * 1024
QUICK_RATE_S: Final = 1.0
"""Payload and time limit of the quick measurement of a link, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    speed: LinkSpeed
    payload_bytes: int
    at_s: float


@dataclass(kw_only=True, eq=False, repr=False)
class LinkBenchmark:
    """Measures links and keeps the figures by peer.

    `link_of` returns the link to a node. `wait_for_compute` waits for the compute thread, and
    raises BusyError while sequences are open here; then only known figures are returned.
    `measure_gathers` measures gathers with a node, None where that is not possible now. `now_s` is
    a monotonic clock.
    """

    link_of: Callable[[NodeId], ControlLink | None]
    wait_for_compute: Callable[[], Awaitable[None]]
    measure_gathers: Callable[[NodeId], Awaitable[GatherFigures | None]]
    now_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._known: dict[NodeId, _Known] = {}
        self._measuring = asyncio.Lock()

    async def measure(self, message: MeasureLinks) -> LinksMeasured:
        """Measure links to the nodes of `message` without a fresh figure; return all figures."""
        rows = []
        for name in message.nodes:
            node = NodeId(name)
            async with self._measuring:
                speed = await self._speed(node, message.payload_bytes, again=message.again)
            if speed is not None:
                rows.append(LinkMeasured(node=node, **asdict(speed)))
        return LinksMeasured(request=message.request, links=rows)

    async def quick_rate(self, node: NodeId) -> float | None:
        """Return about how many bytes per second the link to a node carries, for people.

        That is the known figure, else a quick measurement that is not kept. None if there is no
        link, the peer computes, or it takes longer than QUICK_RATE_S.
        """
        known, control = self._known.get(node), self.link_of(node)
        if known is not None or control is None:
            return known.speed.bytes_per_s if known is not None else None
        noise = os.urandom(QUICK_RATE_BYTES)
        try:
            async with asyncio.timeout(QUICK_RATE_S), self._measuring:
                empty_s = min([await ping(control) for _ in range(N_PINGS)])
                rate = await best_rate(
                    lambda size: ping(control, noise[:size]),
                    empty_s,
                    QUICK_RATE_BYTES,
                    time.perf_counter,
                )
        except (ShardnetError, TimeoutError):
            return None
        return rounded(rate)

    async def _speed(self, node: NodeId, payload_bytes: int, *, again: bool) -> LinkSpeed | None:
        known, control = self._known.get(node), self.link_of(node)
        if control is None:
            return None
        payload_bytes = max(FIRST_PAYLOAD_BYTES, min(payload_bytes, MAX_PING_BYTES))
        if known is not None and not again:
            good_for_s = GOOD_FOR_S if known.speed.is_steady else UNSTEADY_GOOD_FOR_S
            is_fresh = self.now_s() - known.at_s < good_for_s
            if is_fresh and known.payload_bytes >= payload_bytes:
                return known.speed
        try:
            async with asyncio.timeout(GIVE_UP_S):
                speed = await measure_link(control, self.wait_for_compute, payload_bytes)
        except (ShardnetError, TimeoutError):  # gone, at work, or far too slow
            return known.speed if known is not None else None
        figures = await self.measure_gathers(node)
        if figures is not None:
            speed = replace(speed, **asdict(figures))
        self._known[node] = _Known(speed=speed, payload_bytes=payload_bytes, at_s=self.now_s())
        return speed


async def measure_link(
    control: ControlLink, wait_for_compute: Callable[[], Awaitable[None]], payload_bytes: int
) -> LinkSpeed:
    """Measure a link, to two significant digits.

    Half of the round trip is what a hop takes: from loop to loop, and to the compute thread, which
    sends what it made by itself. The way back from that thread is measured too, and left out. The
    bandwidth is that of payloads up to `payload_bytes`,
    which is at least `FIRST_PAYLOAD_BYTES`, or of smaller ones where those take too long.
    It is not steady where other programs kept this machine busy.

    Raises LinkError when the link ends, BusyError when either end computes for somebody.
    """

    async def round_trip() -> None:
        await ping(control, as_step=True)
        await wait_for_compute()

    before = ProcessorUse.now()
    there_and_back_s = statistics.median(await _repeat(round_trip))
    plain_s = statistics.median(await _repeat(lambda: ping(control)))
    noise = os.urandom(payload_bytes)
    rate = await best_rate(
        lambda size: ping(control, noise[:size]), plain_s, payload_bytes, time.perf_counter
    )
    is_steady = not before.disturbed(ProcessorUse.now())
    trip_s = plain_s + max(0.0, there_and_back_s - plain_s) / 2
    return LinkSpeed(round_trip_s=rounded(trip_s), bytes_per_s=rounded(rate), is_steady=is_steady)


async def _repeat(once: Callable[[], Awaitable[object]]) -> Sequence[float]:
    """Time several round trips in seconds, after one to warm up."""
    await once()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < N_ROUND_TRIPS:
        await asyncio.sleep(PAUSE_S)
        sent = time.perf_counter()
        await once()
        times.append(time.perf_counter() - sent)
        if len(times) >= 3 and time.perf_counter() - began > ROUND_TRIPS_S:
            break
    return times


async def best_rate(
    send: Callable[[int], Awaitable[float]],
    empty_s: float,
    payload_bytes: int,
    now_s: Callable[[], float],
) -> float:
    """Send payloads, each larger than the last one, and return the best rate of the largest.

    `send` takes a size in bytes and returns the seconds of the round trip, which takes `empty_s`
    without a payload. The rate is in bytes per second.
    """
    size = FIRST_PAYLOAD_BYTES
    ends_s = now_s() + PAYLOADS_S
    best, n_sent = 0.0, 0
    while n_sent < N_PAYLOADS:
        took_s = await send(size)
        rate = size / max(took_s - empty_s, took_s / 10)
        best, n_sent = max(best, rate), n_sent + 1
        larger, left_s = min(size * GROWTH, payload_bytes), ends_s - now_s()
        if larger > size and larger / rate + empty_s < left_s:
            size, best, n_sent = larger, 0.0, 0
        elif took_s > left_s:
            break
    return best
