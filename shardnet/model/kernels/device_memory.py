"""Turns torch's out-of-memory errors into CapacityError.

Knows how torch reports them. Must not know what the memory was for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardnet.errors import CapacityError


@contextmanager
def capacity_error_for(message: str, *, remedy: str = "") -> Iterator[None]:
    """Raise CapacityError(message, remedy=remedy) if a device runs out of memory inside."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise CapacityError(message, remedy=remedy) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch raised `error` because the device has no memory left.

    Accelerators have an exception class for it; the CPU's allocator has only a message, and so has
    memory of the host that CUDA should pin.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "error: out of memory"))
