"""Progress of long work: from the thread that does it to the event loop.

Knows how often the loop is called, and how the work is cancelled. Must not know what the work is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shardnet.errors import CancelledRequestError, ShardnetError

PROGRESS_EVERY_S = 0.1


class ProgressReporter:
    """Carries progress from a thread to the loop, a few times a second and at the end."""

    def __init__(
        self, on_progress: Callable[[int, int], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._on_progress = on_progress
        self._loop = loop
        self._last_s = 0.0
        self.n_reports = 0
        """Reports so far: a thread that makes none may hang."""
        self._why: ShardnetError | None = None

    def cancel(self, why: ShardnetError | None = None) -> None:
        """Cancel the work: make its next report raise `why`."""
        self._why = why or CancelledRequestError("the work was cancelled")

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Report from the working thread. Raises the error given to `cancel`, if called."""
        self.n_reports += 1
        if self._why is not None:
            raise self._why
        now = time.monotonic()
        if done_bytes >= total_bytes or now - self._last_s >= PROGRESS_EVERY_S:
            self._last_s = now
            self._loop.call_soon_threadsafe(self._on_progress, done_bytes, total_bytes)
