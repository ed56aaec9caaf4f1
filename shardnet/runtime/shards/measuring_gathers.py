"""How long shards of one machine take to join the parts of a row.

Knows the memory that they share. Runs on the compute thread of each device at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from shardnet.runtime.processors.processor_use import ProcessorUse

GATHERS = 100
"""Gathers in a window."""
WINDOWS = 5
COLUMNS = 2048
"""Of a row: how many hardly matters, since waking takes longer than copying."""
DEADLINE_S = 10.0


def measure_gather(n_shards: int) -> Sequence[Callable[[], float]]:
    """Return a job for each shard, which gives the seconds of a gather.

    That is the median window, or the fastest where other programs took processors meanwhile. All
    are to be run at once, each on its device's thread. Raises ConfigurationError without the
    compiled library.
    """
    import torch

    from shardnet.model.shards.memory_group import MemoryGroup, SharedMemory

    memory = SharedMemory.create(n_shards)
    ends = [COLUMNS * shard // n_shards for shard in range(n_shards + 1)]

    def job(index: int) -> float:
        group = MemoryGroup(memory, index, n_shards, DEADLINE_S)
        part = torch.zeros(1, ends[index + 1] - ends[index])
        windows = []
        before = ProcessorUse.now()
        for _ in range(WINDOWS):
            began = time.perf_counter()
            for _ in range(GATHERS):
                group.gather(part, ends)
            windows.append((time.perf_counter() - began) / GATHERS)
        group.check()
        is_disturbed = before.disturbed(ProcessorUse.now())
        return min(windows) if is_disturbed else statistics.median(windows)

    return [partial(job, index) for index in range(n_shards)]
