"""Choose the event loop: uvloop where it exists, else asyncio's own.

On Windows that is the proactor loop, the only one there that can start processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from shardnet.errors import ShardnetError, first_error
from shardnet.windows import Handle, library

T = TypeVar("T")
_SIO_UDP_CONNRESET: Final = 0x9800000C


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None for asyncio's own."""
    if sys.platform == "win32":
        return windows_loop(asyncio.ProactorEventLoop)
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return None
    return uvloop.new_event_loop


def windows_loop(base: type[asyncio.AbstractEventLoop]) -> type[asyncio.AbstractEventLoop]:
    """Return `base` with datagram endpoints that keep receiving after a port was unreachable.

    Windows reports that as an error of the next receive, and the loop would stop reading the
    socket.
    """

    class WindowsLoop(base):  # type: ignore[misc, valid-type]  # chosen by the caller
        async def create_datagram_endpoint(self, *given: Any, **named: Any) -> Any:
            made = await super().create_datagram_endpoint(*given, **named)
            _ignore_unreachable(made[0].get_extra_info("socket").fileno())
            return made

    return WindowsLoop


def _ignore_unreachable(descriptor: int) -> None:
    """Turn off Windows' errors for datagrams that reached no port, if that is possible."""
    off, size = ctypes.c_uint32(0), ctypes.c_uint32()
    socket, code = Handle(descriptor), ctypes.c_uint32(_SIO_UDP_CONNRESET)
    ioctl, told = library("ws2_32").WSAIoctl, ctypes.byref(size)
    ioctl(socket, code, ctypes.byref(off), 4, None, 0, told, None, None)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new event loop, and close the loop.

    Ctrl-C cancels `main` and then raises KeyboardInterrupt, as `asyncio.run` does.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Run tasks side by side. Raises the first ShardnetError of them, which cancels the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        known, others = group.split(ShardnetError)
        if known is None or others is not None:
            raise
        raise first_error(known) from None


@asynccontextmanager
async def at_most(wait_s: float | None) -> AsyncIterator[None]:
    """Do what is in the body for so long; whatever it waits for then is given up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            yield


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def shielded(running: asyncio.Future[T]) -> T:
    """Wait for `running`, which goes on if the caller is cancelled; what it raises then is unheard.

    `asyncio.shield` alone forgets `running` then: its exception is reported as never retrieved.
    """
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(unheard)
        raise


def unheard(done: asyncio.Future[Any]) -> None:
    """Take what work raised that nobody waits for: it would be reported as never retrieved."""
    if not done.cancelled():
        done.exception()


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled, and raise the cancellation afterwards.

    Repeated cancellations do not end it either. For work that always ends, like an undo or the
    making of a datagram endpoint: uvloop leaks an endpoint whose making is cancelled, and can then
    never close itself.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        unheard(task)
        raise cancelled
    return task.result()
