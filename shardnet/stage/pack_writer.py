"""Writes packed weights to their cache on a thread of its own, while the next ones are packed.

Knows when what is written, and when writing ends early. Must not know files: pack_cache.py does. A
file has its name only when all of it is written, so what is not finished is not there.

What waits to be written is what the stage computes with: it takes no memory besides. It must not be
changed, and it is let go with the object here: then its stage is gone, and its memory is wanted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import Final

from torch import Tensor

from shardnet.model.config.quantization import Quantization
from shardnet.stage.pack_cache import PackCache

_REPORT_S: Final = 0.1
"""Whoever waits is alive at least so often."""
_LOWEST_PRIORITY: Final = 19


class PackWriter:
    """Has packed weights written one after the other. As a context it ends with an error there."""

    def __init__(self, packs: PackCache | None) -> None:
        """With None nothing is written."""
        self._packs = packs
        self._thread: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)

    def __enter__(self) -> PackWriter:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Go on writing, unless there was an error: then nothing unfinished stays."""
        if error is not None:
            self._stop.set()
            self.finish()

    def put(self, names: Sequence[str], kind: Quantization, packed: Tensor) -> None:
        """Have packed weights written when those before them are."""
        if self._packs is None:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, thread_name_prefix="shardnet-packs-put", initializer=_let_others_go_first
            )
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        job = self._thread.submit(_write, self._packs, names, kind, packed, self._stop)
        self._writing.append(job)

    def finish(self, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until all is written, as far as it can be. What `alive` raises ends the waiting."""
        while self._writing:
            wait_for([self._writing[0]], _REPORT_S)
            if self._writing[0].done():
                self._writing.popleft().result()
            alive()


def _let_others_go_first() -> None:
    """Have the calling thread work when nobody else does, where threads can be told."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


class _Stopped(Exception):
    """Ends the writing of a file."""


def _write(
    packs: PackCache,
    names: Sequence[str],
    kind: Quantization,
    packed: Tensor,
    stop: threading.Event,
) -> None:
    """Keep packed weights. It does not know the writer, who may be let go meanwhile."""

    def alive() -> None:
        if stop.is_set() or not threading.main_thread().is_alive():  # a program ends, and may
            raise _Stopped

    try:
        alive()
        packs.put(names, kind, packed, alive)
    except _Stopped:
        return
