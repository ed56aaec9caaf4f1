"""Waiting for what no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_FIRST_S, _LONGEST_S, _GROWTH = 0.001, 0.005, 1.01
"""Between looks: what is long in coming, which may take seconds, is looked for less often."""


async def until(is_so: Callable[[], bool]) -> None:
    """Let others go on until something is so."""
    pause_s = _FIRST_S
    while not is_so():
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_S, pause_s * _GROWTH)
