from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import until

from shardnet.model.kernels.library import native_kernels
from shardnet.runtime.processors import alertness
from shardnet.runtime.processors.alertness import (
    LEAD_NS,
    REST_FACTOR,
    SHORT_NS,
    SPIN_NS,
    Alertness,
    CpuLatency,
    Waits,
)
from shardnet.runtime.stage import executor
from shardnet.runtime.stage.executor import Executor


class Alarm:
    """An alarm that rings when it is told to."""

    def __init__(self) -> None:
        self.set_to: list[int] = []
        self.is_closed = False
        self.ring: Callable[[], None] = lambda: None

    def __call__(self, call: Callable[[], None]) -> Alarm:
        self.ring = call
        return self

    def set(self, after_ns: int) -> None:
        self.set_to.append(after_ns)

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """A clock that is set by hand."""

    now_ns = 1

    def read(self) -> int:
        return self.now_ns


class Ring:
    """What an alertness sees of a ring whose steps come at times of our own."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.alarm = Alarm()
        self.n_stirred = 0
        self.alert = Alertness(
            stir=self._stir,
            make_alarm=self.alarm,
            latency=CpuLatency(folder / "missing"),
            clock_ns=self.clock.read,
        )

    def _stir(self) -> None:
        self.n_stirred += 1

    def step(self, took_ns: int, *, hands_over: bool = False) -> None:
        self.alert.sent(hands_over=hands_over)
        self.clock.now_ns += took_ns
        self.alert.arrived()


async def n_turns_of_spinning(ring: Ring, turn_ns: int) -> int:
    """Let the loop go round while it spins; each turn takes so long. Returns how many it was."""
    turns = 0
    while ring.alert.is_spinning:
        ring.clock.now_ns += turn_ns
        turns += 1
        assert turns < 1000
        await asyncio.sleep(0)
    return turns


def test_the_next_wait_is_guessed_from_the_last_ones_but_not_from_the_shortest() -> None:
    waits = Waits()
    for took in (900, 500, 800):
        waits.add(took)
    assert waits.early_ns is None  # too few
    waits.add(700)
    assert waits.early_ns == 700
    for took in range(2000, 2008):
        waits.add(took)
    assert waits.early_ns == 2001  # what is long ago counts no more


def test_it_wakes_up_shortly_before_a_step_and_spins_no_longer_than_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        ring = Ring(tmp_path)
        for _ in range(8):
            ring.step(SHORT_NS - 1)
        for _ in range(6):
            ring.step(SHORT_NS)
        assert ring.alarm.set_to == []  # the last steps came so soon that it does not pay
        ring.step(SHORT_NS)
        ring.alert.sent(hands_over=False)
        assert ring.alarm.set_to == [SHORT_NS - LEAD_NS]

        ring.alarm.ring()
        assert await n_turns_of_spinning(ring, SPIN_NS // 10) == 10  # the step does not come
        assert (ring.alert.n_spins, ring.alert.n_met) == (1, 0)
        ring.alarm.ring()
        assert not ring.alert.is_spinning  # it rests
        ring.clock.now_ns += REST_FACTOR * SPIN_NS
        ring.alarm.ring()
        ring.alert.arrived()
        assert await n_turns_of_spinning(ring, 1000) == 1  # the step came
        assert (ring.alert.n_spins, ring.alert.n_met) == (2, 1)

        ring.clock.now_ns += 10**9
        ring.alarm.ring()
        assert not ring.alert.is_spinning  # nothing is awaited
        assert ring.n_stirred == 0
        ring.alert.sent(hands_over=True)
        ring.alarm.ring()
        assert ring.n_stirred == 1  # the compute thread is to be awake as well
        ring.alert.close()
        assert await n_turns_of_spinning(ring, 1000) == 1
        assert ring.alarm.is_closed

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="its alarm is Linux's")
def test_the_kernels_alarm_rings_once_and_never_after_its_end() -> None:
    async def main() -> None:
        rung = asyncio.Event()
        alarm = alertness.kernel_alarm(rung.set)
        alarm.set(10**12)
        alarm.set(1_000)  # from any thread, in place of what was set before
        async with asyncio.timeout(10):
            await rung.wait()
        rung.clear()
        alarm.set(1)
        alarm.close()
        alarm.set(1)
        alarm.close()
        await asyncio.sleep(0)
        assert not rung.is_set()

    asyncio.run(main())


def test_the_processors_latency_is_held_while_steps_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alertness, "HOLD_S", 0.01)
    device = tmp_path / "device"
    device.write_bytes(b"")

    async def main() -> None:
        latency = CpuLatency(device)
        latency.hold()
        latency.hold()
        assert latency.is_held
        assert device.read_bytes() == alertness.MOST_US.to_bytes(4, sys.byteorder)
        await until(lambda: not latency.is_held)  # no step comes any more
        latency.hold()
        latency.close()
        assert not latency.is_held
        refused = CpuLatency(tmp_path / "missing")
        refused.hold()
        assert not refused.is_held

    asyncio.run(main())


@pytest.mark.skipif(native_kernels() is None, reason="without the compiled library it sleeps")
def test_a_thread_that_was_stirred_spins_until_a_job_comes_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "_HAND_OVER_NS", 10**11)

    async def main() -> None:
        thread = Executor("stirred")
        ended = asyncio.Event()
        try:
            await thread.run(threading.get_ident)
            for n_begun in range(1, 4):  # a job ends its spinning, which would last far longer
                thread.stir(10**12)
                thread.post(lambda: 1, lambda _: ended.set(), lambda error: None)
                thread.let_begin()
                assert thread.n_begun == n_begun
                async with asyncio.timeout(10):
                    await ended.wait()
                ended.clear()
            assert thread.is_idle
            thread.stir(1)
            assert await thread.run(threading.get_ident) != threading.get_ident()
        finally:
            thread.join()

    asyncio.run(main())


class Kernel32:
    """Windows' library: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def GetCurrentProcess(self) -> None:
        pass

    def SetThreadExecutionState(self, flags: int) -> None:
        self.told.append(("busy", flags))

    def SetProcessInformation(self, _: object, kind: int, state: bytes, size: int) -> None:
        self.told.append((kind, state.hex(" ", 4), size))


def test_windows_is_told_of_work_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel32, now = Kernel32(), [1000.0]
    monkeypatch.setattr(alertness, "library", lambda name: kernel32)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    latency = CpuLatency(tmp_path / "missing")
    latency.hold()
    alertness.work_at_full_speed()
    assert kernel32.told == [], "no other system has such calls"
    monkeypatch.setattr("sys.platform", "win32")
    for now[0] in (1001.0, 1002.0, 1021.0, 1022.0):
        latency.hold()
    assert kernel32.told == [("busy", 1)] * 2
    alertness.work_at_full_speed()
    assert kernel32.told[2:] == [(4, "01000000 01000000 00000000", 12)]
