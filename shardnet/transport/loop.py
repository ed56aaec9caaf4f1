"""Which event loop shardnet runs on: uvloop where it exists, else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None for asyncio's own."""
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return None
    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new event loop, and close the loop.

    Ctrl-C cancels `main` and then raises KeyboardInterrupt, as `asyncio.run` does.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that may not be cancelled in the middle; a cancellation comes when it is done.

    However often it comes: who asked may give up, and then hang up. For work that ends by itself,
    like taking back what was begun, or making a datagram endpoint: uvloop leaves one open whose
    making was cancelled, and then never closes itself.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # no caller is left to get it
        raise cancelled
    return task.result()
