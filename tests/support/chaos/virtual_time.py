"""An event loop whose time is virtual: what waits for hours is over at once, and always the same.

It runs real asyncio code that uses neither sockets nor threads. Callbacks run in asyncio's own
order; what a simulation varies is when things happen. A loop that would wait for ever raises
`NothingLeftError`: so a hang is found at once. Two libraries do this and more (seedloop, simloom),
for Python 3.12 on only; shardnet runs on 3.11.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeftError(Exception):
    """Everybody waits, and nothing will ever happen."""


class _Clock:
    """Stands where asyncio has its selector: to wait is to move the clock on."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeftError
        self.now += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Starts at time 0."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._selector.now

    def time_ns(self) -> int:
        """Return the virtual time in nanoseconds."""
        return int(self._selector.now * 1e9)

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no files."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread has anything to say."""


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time; tasks that it leaves behind fail it.

    Raises NothingLeftError, which names who waits, where it would hang.
    """
    loop = VirtualLoop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        left = [repr(task.get_coro()) for task in asyncio.all_tasks(loop)]
        assert not left, f"left behind: {left}"
        assert not problems, problems
        return result
    except NothingLeftError:
        waiting = [repr(task) for task in asyncio.all_tasks(loop)]
        raise NothingLeftError(f"at {loop.time():g} s all wait: {waiting}") from None
    finally:
        _end(loop)


def _end(loop: VirtualLoop) -> None:
    """Cancel what is left after a failure, so that it is not mistaken for another one."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    try:
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except (NothingLeftError, RuntimeError):
        pass  # what refuses to end: the failure itself says why
    finally:
        asyncio.set_event_loop(None)
        loop.close()
