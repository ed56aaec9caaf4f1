"""How long is waited: without the time in which this process stood still, and for silent peers.

Decides by times and byte counts; only `deadline` knows the event loop's clock. Must not know what
is waited for.
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


class IdleTimeout:
    """How long a peer has been silent, without blaming it for our own pauses.

    While we read, silence is bytes that do not come. While we have paused reading, it is bytes that
    do not leave though some wait: then each side waits for the other to read.
    """

    def __init__(self, allowed_s: float, now: float) -> None:
        """Allow `allowed_s` seconds of silence, from `now` on. All times are of one clock."""
        self._allowed_s = allowed_s
        self.since = now
        """When something came last, or we began to listen again."""
        self._looked_at = now
        self._unsent_bytes = 0

    def is_over(self, now: float, *, reading: bool, unsent_bytes: int) -> bool:
        """Return whether the silence has lasted too long at `now`.

        To be called several times within the allowed silence: a longer gap means that this process
        itself stood still. `unsent_bytes` are those that the transport still holds.
        """
        stood_still = now - self._looked_at > self._allowed_s / 2
        moving = not reading and (unsent_bytes == 0 or unsent_bytes != self._unsent_bytes)
        self._looked_at = now
        self._unsent_bytes = unsent_bytes
        if stood_still or moving:
            self.since = now
        return now - self.since >= self._allowed_s


class SendTimeout:
    """How long bytes have waited to be sent to a peer that lives, sends, and reads nothing.

    Linux has TCP_USER_TIMEOUT for it, other systems have nothing.
    """

    def __init__(self, allowed_s: float, now: float) -> None:
        """Allow `allowed_s` seconds in which nothing leaves. All times are of one clock."""
        self._allowed_s = allowed_s
        self._since = now
        self._looked_at = now
        self._unsent_bytes = 0

    def is_over(self, now: float, *, unsent_bytes: int) -> bool:
        """Return whether too little has left for too long at `now`.

        To be called as often as `IdleTimeout.is_over`. What is added meanwhile is no progress.
        """
        stood_still = now - self._looked_at > self._allowed_s / 2
        if stood_still or unsent_bytes == 0 or unsent_bytes < self._unsent_bytes:
            self._since = now
        self._looked_at = now
        self._unsent_bytes = unsent_bytes
        return now - self._since >= self._allowed_s
