"""What the first shard learns of the processes of the others, which are played here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from support.needs import needs_library

from shardnet.errors import CapacityError, LostShardError
from shardnet.runtime.shards.calls import Failed, Ready, write_message
from shardnet.runtime.shards.processes import ShardProcesses


class Played:
    """Processes of which this test has the other ends of the sockets."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self._killed = threading.Event()

    def __call__(self, theirs: socket.socket, _descriptors: Sequence[int]) -> Played:
        self.ends.append(theirs.dup())
        return self

    def kill(self) -> None:
        self._killed.set()
        for end in self.ends:
            end.close()

    def wait(self) -> int:
        self._killed.wait()
        return 0


def started() -> tuple[ShardProcesses, Played]:
    played = Played()
    processes = ShardProcesses(3, 1 << 16, played)
    processes.start(cast(Callable[..., Any], lambda *_: Ready(exact_rows=0)))  # nobody reads it
    return processes, played


@needs_library
def test_a_shard_that_cannot_be_loaded_says_why() -> None:
    """Though it is marked as lost before it says so, and another one is still loading."""
    processes, played = started()
    error = CapacityError("no memory for layers 0-4")
    processes._memory.fail(2)
    write_message(played.ends[1], Failed(code=error.code, message=error.message, remedy=""))
    with pytest.raises(CapacityError, match="no memory for layers 0-4"):
        processes.await_ready(lambda: None)


@needs_library
def test_all_shards_are_awaited() -> None:
    processes, played = started()
    for end, rows in zip(played.ends, (9, 4), strict=True):
        write_message(end, Ready(exact_rows=rows))
    assert processes.await_ready(lambda: None) == 4
    processes, played = started()
    write_message(played.ends[0], Ready(exact_rows=1))
    processes._memory.fail(2)  # and it says nothing more
    with pytest.raises(LostShardError, match="shard 2 of 3"):
        processes.await_ready(lambda: None)
