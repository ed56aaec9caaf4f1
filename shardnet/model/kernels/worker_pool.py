"""Threads that do the pieces of a job together with the thread that has it.

Knows who takes which piece and what happens when one fails. Must not know what a piece is. For work
that is off Python's lock: reading, summing up, packing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TypeVar

Piece = TypeVar("Piece")


class Crew:
    """The calling thread and its helpers, who end with this object."""

    def __init__(self, n_threads: int, name: str) -> None:
        """`n_threads` work, the calling one among them."""
        self._n_helpers = n_threads - 1
        self._helpers = ThreadPoolExecutor(max(1, self._n_helpers), thread_name_prefix=name)

    def do(
        self,
        work: Callable[[Piece], None],
        pieces: Iterable[Piece],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `work` once for each piece, in about this order: whoever is free takes the next one.

        `alive` is called here after each piece that was done here. What it or `work` raises ends
        the job, once nobody works any more.
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
            waiting.clear()  # where this failed, helpers need not go on
            wait_for(helping)
        # Popped: an error that knows this frame would keep its future, and so itself.
        while helping:
            helping.pop().result()


def _taken_from(waiting: deque[Piece]) -> Iterator[Piece]:
    """Give what nobody else has taken."""
    while waiting:
        try:
            piece = waiting.popleft()
        except IndexError:  # another thread was faster
            return
        yield piece
