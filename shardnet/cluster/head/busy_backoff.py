"""How long a head waits for nodes that other heads are using, and when it gives up.

Knows that building a ring ends soon, that a generation may not, and that no wait is without an end.
Must not know what is built, nor who asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from shardnet.errors import BusyError, TakenError

OTHERS_S: Final = 60.0
"""How long one ring waits for other heads, over all its nodes."""
ASK_EVERY_S: Final = 0.5


class Turn:
    """The turn of one ring that is being built. `is_vain` tells that waiting has no use."""

    def __init__(
        self,
        is_vain: Callable[[], bool],
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._is_vain = is_vain
        self._now_s = now_s
        self._sleep = sleep
        self._ends_s: float | None = None

    async def wait(self, error: BusyError) -> None:
        """Wait until the node that gave `error` may be asked again.

        A node that was generating when it was first asked is not waited for; one that was loading
        is, and for the generation that follows. Raises `error` where it is not worth it, and with
        how long it was waited when that is over.
        """
        if self._ends_s is None:
            if not isinstance(error, TakenError):
                raise error
            self._ends_s = self._now_s() + OTHERS_S
        if self._is_vain():
            raise error
        if self._now_s() >= self._ends_s:
            raise type(error)(f"{error} (this head has waited {OTHERS_S:.0f} s)")
        await self._sleep(ASK_EVERY_S)
