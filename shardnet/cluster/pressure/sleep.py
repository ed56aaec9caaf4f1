"""When a node has its machine sleep, and by which signs it notices that it has slept. Pure.

Must not know time, nor how anything sleeps or is woken.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

AWAKE_S: Final = 60.0
"""A node that was woken stays awake so long at least: whoever woke it has to plan, and to load."""
SUSPENDED_S: Final = 0.5
"""A machine has slept when a clock that counts that is so much ahead of one that does not."""
STOOD_S: Final = 3.0
"""Also one where so much passes between two looks: not every system has both clocks, and a process
can be stopped alone."""

DEFAULT_SLEEP: Final = {
    "darwin": "pmset sleepnow",
    "win32": "rundll32.exe powrprof.dll,SetSuspendState 0,1,0",
}.get(sys.platform, "systemctl suspend")
"""What has this machine sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """How a node sleeps: after `after_s` seconds without use, None for never, by `command`.

    The packet that wakes it goes to `wake_at`, "" for broadcasts in its networks. Others that it
    wakes are waited for `wait_s` seconds.
    """

    after_s: float | None = None
    command: str = DEFAULT_SLEEP
    wake_at: str = ""
    wait_s: float = 90.0


@dataclass(slots=True, kw_only=True)
class SleepPolicy:
    """Decides for a node that sleeps after `after_s` seconds without use, which it had at `used_s`.

    All moments are of one clock that goes on, in seconds.
    """

    after_s: float
    used_s: float

    def look(self, now_s: float, used_s: float) -> bool:
        """Return whether to sleep now; the node was used last at `used_s`."""
        self.used_s = max(self.used_s, used_s)
        return now_s - self.used_s >= self.after_s

    def stay(self, now_s: float) -> None:
        """Stay awake for a while, after a sleep or a try."""
        self.used_s = now_s + max(0.0, AWAKE_S - self.after_s)


@dataclass(slots=True, kw_only=True)
class Doze:
    """Follows a machine that is about to sleep, by looks.

    At the last one, at `looked_s`, a clock that counts sleep was `ahead_s` of one that does not.
    """

    looked_s: float
    ahead_s: float

    def look(self, now_s: float, ahead_s: float) -> float:
        """Take the next look; return for how many seconds it has slept, 0 for not at all."""
        stood_s, suspended_s = now_s - self.looked_s, ahead_s - self.ahead_s
        self.looked_s = now_s
        if suspended_s >= SUSPENDED_S:
            return suspended_s
        return stood_s if stood_s >= STOOD_S else 0.0
