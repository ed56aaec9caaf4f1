"""The shards of a stage as threads of one process, which gather as those of processes do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from shardnet.errors import LostShardError
from shardnet.model.shards.group import MemoryGroup, PythonGather, ShardGroup, SharedMemory

T = TypeVar("T")


class CountingGroup:
    """A group that the library reaches through Python, which counts its gathers."""

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self.index, self.size = group.index, group.size
        self._python = PythonGather(self)
        self.struct = self._python.struct
        self.n_gathers = 0

    def gather(self, part: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """See ShardGroup."""
        self.n_gathers += 1
        return self._group.gather(part, ends)

    def joining(
        self, part: torch.Tensor, whole: torch.Tensor, ends: Sequence[int]
    ) -> Callable[[], None]:
        """See PythonGroup."""

        def join() -> None:
            whole.copy_(self.gather(part, ends))

        return join

    def end_joins(self, n_left: int) -> None:
        """See PythonGroup: none is ever open."""

    def check(self) -> None:
        """See ShardGroup."""
        self._python.raise_error()
        self._group.check()


def on_each_shard(
    n_shards: int,
    work: Callable[[ShardGroup], T],
    wrap: Callable[[MemoryGroup], ShardGroup] = lambda group: group,
) -> list[T]:
    """Call `work` for each shard at once; return what each returns.

    The first exception is raised, and ends the waiting of the others.
    """
    memory = SharedMemory.create(n_shards)

    def run(index: int) -> T:
        torch.set_num_threads(1)
        try:
            return work(wrap(MemoryGroup(memory, index, n_shards)))
        except BaseException:
            memory.fail(index)
            raise

    with ThreadPoolExecutor(n_shards) as pool:
        running = [pool.submit(run, index) for index in range(n_shards)]
        failed = [error for each in running if (error := each.exception()) is not None]
        for error in failed:
            if not isinstance(error, LostShardError):
                raise error
        return [each.result() for each in running]
