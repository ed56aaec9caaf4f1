"""Writes packed weights to the cache on a background thread, while the next ones are packed.

Knows the order of writes, and when writing stops early. Must not know files: pack_cache.py does. A
file gets its name only when it is complete.

Queued tensors are those the stage computes with, so the queue takes no memory. They must not be
modified, and are released with this object: then the stage is gone and its memory is needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Final

from torch import Tensor

from shardnet.model.config.panel_form import Quantization
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.threads import DaemonThreads

_REPORT_S: Final = 0.1
"""The longest time between two calls of `alive`."""
_EXIT_S: Final = 1.0
"""How long the end of the process waits for a write that stops."""
_LOWEST_PRIORITY: Final = 19


class PackWriter:
    """Writes packed weights one after the other. As a context manager it stops on an error."""

    def __init__(self, packs: PackCache | None) -> None:
        """Write to `packs`; with None nothing is written."""
        self._packs = packs
        self._thread: DaemonThreads | None = None
        self._writing: deque[Future[None]] = deque()
        self._stop = threading.Event()
        weakref.finalize(self, _end, self._stop, self._writing)

    def __enter__(self) -> PackWriter:
        """Return self."""
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        """Keep writing in the background, or after an error stop and drop unfinished files."""
        if error is not None:
            self._stop.set()
            self.finish()

    def put(self, names: Sequence[str], kind: Quantization, packed: Tensor) -> None:
        """Queue packed weights for writing."""
        if self._packs is None:
            return
        if self._thread is None:
            self._thread = DaemonThreads(1, "shardnet-packs-put", niceness=_LOWEST_PRIORITY)
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        job = self._thread.submit(_write, self._packs, names, kind, packed, self._stop)
        self._writing.append(job)

    def finish(self, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the queue is empty. An exception that `alive` raises ends the waiting."""
        while self._writing:
            wait_for([self._writing[0]], _REPORT_S)
            if self._writing[0].done():
                self._writing.popleft().result()
            alive()


def _end(stop: threading.Event, writing: deque[Future[None]]) -> None:
    """Stop writing; at the end of the process give it a moment to delete what is unfinished."""
    stop.set()
    if not threading.main_thread().is_alive():
        wait_for(writing, _EXIT_S)


class _Stopped(Exception):
    """Aborts the writing of a file."""


def _write(
    packs: PackCache,
    names: Sequence[str],
    kind: Quantization,
    packed: Tensor,
    stop: threading.Event,
) -> None:
    """Write packed weights to the cache. Holds no reference to the writer, so it can be freed."""

    def alive() -> None:
        if stop.is_set() or not threading.main_thread().is_alive():  # do not delay program exit
            raise _Stopped

    try:
        alive()
        packs.put(names, kind, packed, alive)
    except _Stopped:
        return
