"""Shards on GPUs, which gather by torch.distributed: NCCL there, Gloo on CPUs.

Knows collectives only. Must not know how processes are started. NCCL was never run: Gloo is what
tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardnet.errors import LostShardError
from shardnet.model.shards.group import GatherStruct, PythonGather

DEADLINE_S: Final = 60.0
"""How long a shard waits for another that lives."""


class DistributedGroup:
    """Shard `index` of `size` that meet in a `store` of torch.distributed. Implements ShardGroup.

    `also` checks what else may be known of lost shards, and raises LostShardError.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        size: int,
        device: torch.device,
        also: Callable[[], None] = lambda: None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Meet the other shards, on a GPU with the first gather."""
        self._index = index
        self._size = size
        self._also = also
        self._group = _meet(store, index, size, device, timedelta(seconds=deadline_s))
        self._error: str | None = None
        self._python = PythonGather(self)

    @property
    def index(self) -> int:
        """See ShardGroup."""
        return self._index

    @property
    def size(self) -> int:
        """See ShardGroup."""
        return self._size

    @property
    def struct(self) -> GatherStruct:
        """See ShardGroup."""
        return self._python.struct

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """See ShardGroup. Parts travel as plain bytes, all as wide as the widest."""
        n_rows, own = part.shape
        if own != ends[self._index + 1] - ends[self._index]:
            raise ValueError(f"a part of {own} columns for ends {list(ends)}")
        if self._error is not None:
            return part.new_zeros(n_rows, ends[-1])
        widths = [end - begin for begin, end in pairwise(ends)]
        padded = part.new_zeros(n_rows, max(widths))
        padded[:, :own] = part
        of_all = [torch.empty_like(padded) for _ in widths]
        try:
            self._group.allgather(
                [[each.view(torch.uint8) for each in of_all]], [padded.view(torch.uint8)]
            ).wait()
        except RuntimeError as error:  # a peer ended, or was silent for too long
            self._error = str(error).partition("\n")[0]
        return torch.cat([each[:, :width] for each, width in zip(of_all, widths, strict=True)], 1)

    def check(self) -> None:
        """See ShardGroup."""
        self._also()
        self._python.raise_error()
        if self._error is not None:
            raise LostShardError(
                f"a shard of {self._size} of this stage was lost: {self._error}",
                remedy="the stage is loaded again; if this happens often, see that node's log",
            )


def _meet(store: Any, index: int, size: int, device: torch.device, wait: timedelta) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(store, index, size, options)
    return dist.ProcessGroupGloo(store, index, size, wait)
