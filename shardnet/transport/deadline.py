"""A deadline that does not count the time in which this process itself stood still.

Knows the event loop's clock. Must not know what is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_LOOKS: Final = 8
"""How often in its time a deadline looks whether the loop has stood still."""


@asynccontextmanager
async def deadline(limit_s: float) -> AsyncIterator[None]:
    """Allow what is done inside `limit_s` seconds, as asyncio.timeout does.

    After a suspend, or where a machine has stalled, the loop sees the end of the time before it
    reads what has come meanwhile. A pause of more than twice an eighth of the time is ours, and
    that much is added. Raises TimeoutError.
    """
    loop = asyncio.get_running_loop()
    tick_s = limit_s / _LOOKS
    async with asyncio.timeout(limit_s) as timeout:
        looked_at = loop.time()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal looked_at, timer
            now = loop.time()
            late_s, looked_at = now - looked_at - tick_s, now
            ends = timeout.when()
            if late_s > tick_s and ends is not None and not timeout.expired():
                timeout.reschedule(ends + late_s)
            timer = loop.call_later(tick_s, look)

        timer = loop.call_later(tick_s, look)
        try:
            yield
        finally:
            timer.cancel()
