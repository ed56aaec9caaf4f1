"""A pool of threads that share the pieces of a job with the calling thread.

Knows which thread takes which piece and what happens when one fails. Must not know what a piece is.
For work that releases the GIL: reading, checksums, packing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait as wait_for
from typing import TypeVar

from shardnet.threads import DaemonThreads

Item = TypeVar("Item")


class WorkerPool:
    """The calling thread and its helper threads, which end with this object."""

    def __init__(self, n_threads: int, name: str) -> None:
        """Make `n_threads - 1` helper threads; the calling thread is one of `n_threads`."""
        self._n_helpers = n_threads - 1
        self._helpers = DaemonThreads(max(1, self._n_helpers), name)

    def run(
        self,
        work: Callable[[Item], None],
        pieces: Iterable[Item],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `work` once for each piece, in about this order, on whichever thread is free.

        `alive` is called on the calling thread after each of its pieces. The first exception of
        `alive` or `work` is raised once all threads have stopped; the remaining pieces are dropped.
        """
        waiting = deque(pieces)

        def help_out() -> None:
            for piece in _taken_from(waiting):
                work(piece)

        helping = [self._helpers.submit(help_out) for _ in range(self._n_helpers)]
        try:
            for piece in _taken_from(waiting):
                work(piece)
                alive()
        finally:
            waiting.clear()  # after a failure here, helpers stop early
            wait_for(helping)
        # Popped: an error that knows this frame would keep its future, and so itself.
        while helping:
            helping.pop().result()


def _taken_from(waiting: deque[Item]) -> Iterator[Item]:
    """Yield pieces until none is left."""
    while waiting:
        try:
            piece = waiting.popleft()
        except IndexError:  # another thread was faster
            return
        yield piece
