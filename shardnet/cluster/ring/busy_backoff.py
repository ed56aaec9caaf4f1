"""Wait for nodes that other heads are using, for a limited time.

Knows that loading ends soon and that a generation may not. Must not know what is built, nor for
whom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from shardnet.errors import BusyError, TakenError

OTHERS_S: Final = 60.0
"""How long building one ring waits for other heads, over all its nodes."""
ASK_EVERY_S: Final = 0.5


class BusyBackoff:
    """Backoff for one ring that is being built. `is_vain` says that waiting is pointless."""

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
        """Wait before the node that answered `error` is asked again.

        A node that was generating when it was first asked is not waited for; one that was loading
        is, and the generation that follows. Raises `error` if waiting is pointless, and once
        OTHERS_S have passed, which the message says.
        """
        if self._ends_s is None:
            if not isinstance(error, TakenError):
                raise error
            self._ends_s = self._now_s() + OTHERS_S
        if self._is_vain():
            raise error
        if self._now_s() >= self._ends_s:
            waited = f"{error.message} (this head has waited {OTHERS_S:.0f} s)"
            raise type(error)(waited, remedy=error.remedy)
        await self._sleep(ASK_EVERY_S)
