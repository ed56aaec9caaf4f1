"""How far the clock of another node is ahead of this one's.

Knows how two clocks are compared over a link whose delay is not known. Must not know what they
time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink
from shardnet.wire.messages.activity import ClockRead, ReadClock

N_READINGS: Final = 5
"""The quickest of so many counts: what made the others slow took time one way only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """At `at_us` of our clock another one was `ahead_us` ahead, or at most `within_us` off that."""

    at_us: int
    ahead_us: float
    within_us: float


async def compare_clock(control: ControlLink) -> ClockOffset:
    """Compare the clock of a peer's stage with that of ours. Raises what ControlLink.ask raises."""
    readings = [await _read(control) for _ in range(N_READINGS)]
    return min(readings, key=lambda reading: reading.within_us)


async def _read(control: ControlLink) -> ClockOffset:
    asked_us = now_us()
    read = await control.ask(ReadClock(request=control.next_request()), ClockRead)
    answered_us = now_us()
    under_way_us = (answered_us - asked_us) - (read.sent_us - read.received_us)
    return ClockOffset(
        at_us=answered_us,
        ahead_us=clock_ahead(asked_us, read.received_us, read.sent_us, answered_us),
        within_us=max(0, under_way_us) / 2,
    )


def same_clock() -> ClockOffset:
    """Return the offset of our own clock."""
    return ClockOffset(at_us=now_us(), ahead_us=0, within_us=0)


def now_us() -> int:
    """Read the clock by which stages are timed."""
    return time.perf_counter_ns() // 1000


def clock_ahead(asked: float, received: float, sent: float, answered: float) -> float:
    """Return how far the clock of a peer is ahead of ours, as NTP finds it (RFC 5905, section 8).

    `asked` and `answered` are read from our clock, `received` and `sent` from the peer's. However
    long the peer takes for its answer, the error is half the difference of both ways.
    """
    return ((received - asked) + (sent - answered)) / 2


def ahead_at(moment_us: float, before: ClockOffset, after: ClockOffset) -> float:
    """Return how far a clock was ahead at a moment of our clock, between two comparisons.

    The crystals of two machines part by up to 100 us in a second; they do so evenly.
    """
    span_us = after.at_us - before.at_us
    if span_us <= 0:
        return before.ahead_us
    share = min(1.0, max(0.0, (moment_us - before.at_us) / span_us))
    return before.ahead_us + share * (after.ahead_us - before.ahead_us)
