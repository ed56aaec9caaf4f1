"""Whether this machine runs on its battery, as Linux tells it.

Knows one folder. Elsewhere nothing is known, and the machine counts as one on mains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

POWER_SUPPLIES: Final = Path("/sys/class/power_supply")


def runs_on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Return whether a battery of the machine discharges and nothing else gives power."""
    try:
        # Those of a mouse or a headset, which are online as well, say nothing of the machine.
        found = [each for each in supplies.iterdir() if _read(each / "scope") != "Device"]
    except OSError:
        return False
    if any(_read(each / "online") == "1" for each in found):
        return False
    return any(
        _read(each / "type") == "Battery" and _read(each / "status") == "Discharging"
        for each in found
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
