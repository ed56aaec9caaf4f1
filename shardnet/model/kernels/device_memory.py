"""Turns torch's out-of-memory errors into CapacityError.

Knows how torch, numpy and Python report them. Must not know what the memory was for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from shardnet.errors import CapacityError

_WORDS: Final = (
    "can't allocate memory",
    "error: out of memory",
    "backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@contextmanager
def capacity_error_for(message: str, *, remedy: str = "") -> Iterator[None]:
    """Raise CapacityError(message, remedy=remedy) if a device runs out of memory inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(message, remedy=remedy) from error


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Say whether `error` says that the device has no memory left.

    CUDA has an exception class for it; the CPU's allocator has only a message, and so have Apple's
    GPUs, cuBLAS, and memory of the host that CUDA should pin.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in _WORDS)
