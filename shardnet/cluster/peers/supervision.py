"""Run a node's tasks so that one that fails is logged in one line, and ends alone.

In a bare task group the first failure would end the group, and so the node. Must not know what the
tasks do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from shardnet.errors import first_error, where

RESTART_S = 5.0
"""How long a part that failed stays down before it is started again."""

_log = logging.getLogger(__name__)


async def supervised(
    start: Callable[[], Coroutine[Any, Any, object]], what: str, log: Callable[[str], None]
) -> bool:
    """Run the coroutine that `start` makes. Return whether it ended without a failure.

    A failure is logged in one line that names `what`, and not raised. A BaseException, like a panic
    of a library, counts as a failure too, unless it is a cancellation or an exit.
    """
    try:
        await start()
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        log(f"{what} failed: {cause!r} in {where(cause)}, a bug of shardnet; please report it")
        _log.debug("in full:", exc_info=error)
        return False
    return True


class SupervisedJobs:
    """The jobs of one part of the node, run in `tasks`, a group that outlives the part."""

    def __init__(self, tasks: asyncio.TaskGroup, log: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._log = log
        self._running: set[asyncio.Task[bool]] = set()

    def begin(
        self, start: Callable[[], Coroutine[Any, Any, object]], what: str
    ) -> asyncio.Task[bool]:
        """Run a job as `supervised` does, in a task of its own."""
        task = self._tasks.create_task(supervised(start, what, self._log), name=what)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Cancel the jobs that run, and wait for their ends."""
        running = [*self._running]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def kept_running(
    start: Callable[[], Coroutine[Any, Any, object]],
    what: str,
    log: Callable[[str], None],
    *,
    restart_s: float = RESTART_S,
) -> None:
    """Run a part of the node, and restart it `restart_s` seconds after each failure."""
    while True:
        if await supervised(start, what, log):
            return
        await asyncio.sleep(restart_s)
