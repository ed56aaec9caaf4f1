"""Decode steps of a ring under a profiler: which functions of the product run, in which order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import shardnet
from shardnet.transport.link import Link

PACKAGE = f"{Path(shardnet.__file__).parent}/"

BESIDE = {"AsyncioLink._tick", "Alertness._wake", "Alertness._spin", "_TimerDescriptor._ring"}
"""What timers call, whether steps come or not."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of the product: of its file, from a file, on the loop or beside it."""

    path: str
    function: str
    caller: str
    on_loop: bool


@dataclass
class Trace:
    """The calls of each rank while it `is_recording`, in order.

    The loop calls for a rank what one of its `links` begins, or one of its own objects.
    """

    links: Sequence[Link] = ()
    is_recording: bool = False
    calls: dict[int, list[Call]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and those that begin meanwhile."""
        before, before_of_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_of_threads)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_recording or event != "call" or not _path(frame):
            return
        chain = [frame]
        while (behind := chain[-1].f_back) is not None:
            chain.append(behind)
        own = [each for each in chain if _path(each)]
        root = own[-1]
        if root.f_code.co_qualname in BESIDE:
            return
        thread = threading.current_thread().name
        rank = int(thread[6]) if thread.startswith("stage-") else self._rank_on_loop(root)
        call = Call(
            path=_path(frame),
            function=frame.f_code.co_qualname,
            caller=_path(own[1]) if len(own) > 1 else "",
            on_loop=not thread.startswith("stage-"),
        )
        self.calls.setdefault(rank, []).append(call)

    def _rank_on_loop(self, root: FrameType) -> int:
        """Return the rank of what the loop has called: a link's, a worker's, else the head's."""
        called = root.f_locals.get("self")
        if called in self.links:  # near and far end of the link behind each rank
            place = self.links.index(called)
            return (place + 1) // 2 % (len(self.links) // 2)
        rank: int = getattr(called, "rank", 0)
        return rank


def _path(frame: FrameType) -> str:
    """Return the product's file of a frame, "" for another's."""
    name = frame.f_code.co_filename
    return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else ""
