"""What this machine draws: read where something measures it, counted in joules, kept in watts.

Sources measure different things, so each is told by its name. A command of the owner's asks a
socket's plug, and a battery that discharges is the machine's only supply: either counts for the
whole machine, in place of all others. Else RAPL counts a CPU, NVML a GPU. Must not know rings.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec import DecodeError, json
from msgspec.structs import replace

from shardnet.cluster.machine.cards import CardWatch
from shardnet.cluster.machine.programs import ask
from shardnet.cluster.machine.temperature import POWER_SUPPLIES, nvidia_gpu, read_word
from shardnet.errors import ConfigurationError
from shardnet.files import read_own, write_whole
from shardnet.threads import DaemonThreads
from shardnet.wire.framing.schema import Figure
from shardnet.wire.messages.diagnostics import PowerMeter

POWERCAP: Final = Path("/sys/class/powercap")
READ_S: Final = 0.5
"""Interval of the readings of what the system measures."""
PLUG_S: Final = 2.0
"""Pause between two runs of the owner's command."""
PLUG_ANSWER_S: Final = 5.0
"""How long that command may take."""
AGAIN_S: Final = 30.0
"""When to look again where nothing was found, or the command has failed."""
STALE_S: Final = 10.0
"""Watts that were read longer ago are not told."""
KEEP_S: Final = 10.0
"""Usual watts are written to disk so often at most."""
MAX_WATTS: Final = 100_000.0
_GAP_S: Final = 60.0
"""Watts are not taken to have lasted for longer: the machine slept, or nobody answered."""
_LEARN_S: Final = 30.0
"""How long usual watts take to become others."""
_RISE_S: Final = 600.0
"""How long idle ones take to rise: what is loaded or measured meanwhile is not idle."""

ROOT_ONLY: Final = (
    "RAPL, which counts what its CPU draws, is for root alone; `sudo chmod a+r "
    "/sys/class/powercap/intel-rapl:*/energy_uj` lets everybody on that machine read it until its "
    "next start (docs/hardware.md has the rule for udev)"
)
NO_WATTS: Final = "its --power-command prints no watts; its log says what came instead"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one source says: either watts, or joules of counters by their names.

    Each counter stands beside the joules at which it begins again at 0; 0 for never.
    """

    source: str
    watts: float = 0.0
    counters: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def read_rapl(root: Path = POWERCAP) -> Reading | None:
    """Read what CPUs of Intel and AMD count, None where Linux tells of none.

    That of the whole platform, else of CPU packages, and of memory where it is counted apart. What
    reads 0 counts nothing. Raises PermissionError where it is for root alone.
    """
    found: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for zone in root.glob("intel-rapl:*"):
        kind, counter = read_word(zone / "name").partition("-")[0], zone / "energy_uj"
        if kind in ("psys", "package", "dram"):
            if counter.exists() and not os.access(counter, os.R_OK):
                raise PermissionError(counter)
            if joules := _millionths(counter):
                found[kind][zone.name] = joules, _millionths(zone / "max_energy_range_uj")
    if found["psys"]:
        return Reading("RAPL: whole platform", counters=found["psys"])
    words = "and memory" if found["dram"] else "alone"
    counters = found["package"] | found["dram"]
    return Reading(f"RAPL: CPU package {words}", counters=counters) if found["package"] else None


def read_battery(supplies: Path = POWER_SUPPLIES) -> Reading | None:
    """Read what the machine's batteries give, None unless one discharges and says so (Linux)."""
    watts = 0.0
    for each in supplies.glob("*"):
        kind, status = read_word(each / "type"), read_word(each / "status")
        if (kind, status) == ("Battery", "Discharging") and read_word(each / "scope") != "Device":
            amperes, volts = _millionths(each / "current_now"), _millionths(each / "voltage_now")
            watts += _millionths(each / "power_now") or amperes * volts
    return Reading("battery", watts) if watts else None


def _millionths(path: Path) -> float:
    """Read a number of millionths, without a sign, which drivers disagree on; 0 without one."""
    text = read_word(path).removeprefix("-")
    return int(text) / 1e6 if text.isdecimal() else 0.0


def read_gpu(index: int) -> Reading | None:
    """Read what one of torch's CUDA devices has drawn, None without NVIDIA's library."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        nvml, device, uuid = nvidia_gpu(index)
        source, n_mj, n_mw = f"NVML: {uuid[:12]}", ctypes.c_ulonglong(), ctypes.c_uint()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(n_mj)) == 0:
            return Reading(source, counters={uuid: (n_mj.value / 1e3, 0.0)})
        if nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(n_mw)) == 0:
            return Reading(source, n_mw.value / 1e3)
    return None


def ask_plug(command: Sequence[str]) -> Reading:
    """Run the owner's command, and read the watts that it prints first.

    On a thread of its own: a process begun from the node's loop copies the tables of all memory,
    which holds up whoever waits for a token. Raises ConfigurationError.
    """
    said = asyncio.run(ask(command, dict(os.environ), answer_s=PLUG_ANSWER_S))[:80].decode(
        "ascii", "replace"
    )
    with contextlib.suppress(ValueError, IndexError):
        watts = float(said.split()[0])
        if 0 <= watts <= MAX_WATTS:
            return Reading("plug", watts)
    raise ConfigurationError(f"it printed {said.strip()!r}, and no watts")


class Meter:
    """Counts what one source says since the first reading; `told` is what it has said last."""

    def __init__(self, source: str, idle_w: float | None = None, busy_w: float | None = None):
        self.told = PowerMeter(
            source=source, joules=0, counted_s=0, age_s=0, idle_w=idle_w, busy_w=busy_w
        )
        self.read_at_s = -math.inf
        self._last = Reading(source)

    def take(self, reading: Reading, now_s: float, is_busy: bool | None) -> None:
        """Count a reading. The stage here computed in a ring since the last one if it `is_busy`,
        and did nothing if that is False.
        """
        last, span_s, told = self._last, now_s - self.read_at_s, self.told
        self._last, self.read_at_s = reading, now_s
        if not 0 < span_s < _GAP_S:
            self.told = replace(told, watts=None if reading.counters else reading.watts)
            return
        joules = (reading.watts + last.watts) / 2 * span_s
        for name, (counted, most) in reading.counters.items():
            before, _ = last.counters.get(name, (counted, most))
            joules += counted - before if counted >= before else most and most - before + counted
        mean_w, idle_w, busy_w = joules / span_s, told.idle_w, told.busy_w
        if is_busy:
            busy_w = _nearer(busy_w, mean_w, span_s / _LEARN_S)
        elif is_busy is False:
            rises = idle_w is not None and mean_w > idle_w
            idle_w = _nearer(idle_w, mean_w, span_s / (_RISE_S if rises else _LEARN_S))
        self.told = replace(
            told,
            joules=told.joules + joules,
            counted_s=told.counted_s + span_s,
            watts=mean_w if reading.counters else reading.watts,
            idle_w=idle_w,
            busy_w=busy_w,
        )


def _nearer(usual: float | None, now: float, share: float) -> float:
    return now if usual is None else usual + min(1.0, share) * (now - usual)


Usual = dict[str, tuple[Figure | None, Figure | None]]
"""Idle and busy watts by source, to two digits."""


@dataclass(kw_only=True, eq=False, repr=False)
class PowerWatch:
    """Reads again and again what this machine draws.

    `work` tells whether sequences are open on this node's stage, and the last step that it
    computed, None where that says nothing of what the machine does. `cards` are the numbers of its
    NVIDIA GPUs, `command` prints what it draws in watts. What it usually draws is in the file
    `kept`, from one start to the next.
    """

    work: Callable[[], tuple[bool, int] | None]
    cards: Sequence[int]
    command: Sequence[str]
    kept: Path
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    powercap: Path = POWERCAP
    supplies: Path = POWER_SUPPLIES

    def __post_init__(self) -> None:
        self._watches = [CardWatch(index) for index in self.cards]
        self.troubles: list[str] = []
        """What is wrong with the machine's GPUs, and what to do."""
        self.failure = ""
        """Why something that measures this machine cannot be used, "" if there is none."""
        self._threads = DaemonThreads(1, "shardnet-power")
        self._meters: dict[str, Meter] = {}
        self._now: Sequence[Meter] = ()
        self._worked: tuple[bool, int] | None = None
        self._write_at_s = -math.inf

    def meters(self) -> list[PowerMeter]:
        """Describe what measures this machine now."""
        ages_s = [(meter, max(0.0, self.clock() - meter.read_at_s)) for meter in self._now]
        return [
            replace(meter.told, age_s=age_s, watts=meter.told.watts if age_s < STALE_S else None)
            for meter, age_s in ages_s
        ]

    def close(self) -> None:
        """End the thread, once nothing is read any more."""
        self._threads.close()

    async def run(self) -> None:
        """Read again and again, until cancelled."""
        while True:
            # A driver, a disk or a command that hangs keeps nobody waiting but this.
            reading = self._threads.submit(self.read, self.work())
            pause_s = await asyncio.wrap_future(reading)
            await asyncio.sleep(pause_s)

    def read(self, worked: tuple[bool, int] | None) -> float:
        """Read once, and return after how many seconds to read again. May block."""
        readings, now_s, is_busy = self._readings(), self.clock(), None
        self.troubles = [why for watch in self._watches for why in watch.look()]
        if self._worked is not None and worked is not None:
            (was_open, last_step), (is_open, step) = self._worked, worked
            if was_open == is_open == (step != last_step):
                is_busy = is_open
        self._worked = worked
        for source in {reading.source for reading in readings} - self._meters.keys():
            self._meters[source] = Meter(source, *self._usual().get(source, ()))
        for reading in readings:
            self._meters[reading.source].take(reading, now_s, is_busy)
        self._now = [self._meters[reading.source] for reading in readings]
        if now_s >= self._write_at_s:
            self._write_at_s = now_s + KEEP_S
            self._keep()
        return (PLUG_S if self.command else READ_S) if readings or self.cards else AGAIN_S

    def _readings(self) -> list[Reading]:
        had, self.failure = self.failure, ""
        if self.command:
            try:
                return [ask_plug(self.command)]
            except ConfigurationError as error:
                if not had:
                    self.log(f"warning: --power-command: {error}")
                self.failure = NO_WATTS
                return []
        if (battery := read_battery(self.supplies)) is not None:
            return [battery]
        found = [*map(read_gpu, self.cards)]
        try:
            found.insert(0, read_rapl(self.powercap))
        except PermissionError:
            self.failure = ROOT_ONLY
        return [reading for reading in found if reading is not None]

    def _usual(self) -> Usual:
        """Read what was learned, also by other nodes of this machine; nothing of a damaged file."""
        try:
            return json.decode(read_own(self.kept), type=Usual)
        except (OSError, DecodeError):
            return {}

    def _keep(self) -> None:
        """Write what was learned, unless it is there."""
        told = [meter.told for meter in self._meters.values()]
        known = self._usual()
        usual = known | {m.source: (_short(m.idle_w), _short(m.busy_w)) for m in told}
        if usual != known:
            with contextlib.suppress(OSError):
                write_whole(self.kept, json.encode(usual))


def _short(watts: float | None) -> float | None:
    return watts and float(f"{watts:.2g}")
