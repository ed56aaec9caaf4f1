"""Naming that a device has no more memory, among torch's other failures.

Knows torch's ways to say it. Must not know what the memory was for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardnet.errors import CapacityError


@contextmanager
def memory_named(what: str) -> Iterator[None]:
    """Raise CapacityError, which says `what`, where a device has no memory for what is done."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise CapacityError(what) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch raised `error` because the device has no memory left.

    Accelerators have an exception class for it; the CPU's allocator has only a message, and so has
    memory of the host that CUDA should pin.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "error: out of memory"))
