"""Owners for a node's tasks: one that fails is named in one line, and ends alone.

A task group ends with its first failure, and the node with its group. Must not know what the tasks
do.
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
    """Run what `start` begins to its end. Returns whether it ended by itself.

    A failure is said in one line that names `what`, and is no error here. What is no
    Exception, like a panic of a library, is a failure as well.
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
    """Jobs that one part of the node has begun in `tasks`, a group that outlives the part."""

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
    """Run a part of the node until it ends by itself; start it again when it has failed."""
    while True:
        if await supervised(start, what, log):
            return
        await asyncio.sleep(restart_s)
