"""Who uses a ring."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator


class RingUse:
    """Who uses a ring, and those that replace it."""

    def __init__(self) -> None:
        self.n_users = 0
        self.is_used = asyncio.Event()
        """Set while there is a user."""
        self._used_at_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last use, 0 while there is one."""
        return 0.0 if self.n_users else time.monotonic() - self._used_at_s

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a user within the context."""
        self.n_users += 1
        self.is_used.set()
        try:
            yield
        finally:
            self.n_users -= 1
            if not self.n_users:
                self.is_used.clear()
            self._used_at_s = time.monotonic()
