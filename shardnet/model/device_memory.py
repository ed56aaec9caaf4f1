"""Telling a device that has no more memory from torch's other failures.

Knows torch's ways to say it. Must not know what the memory was for.
"""

from __future__ import annotations

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch raised `error` because the device has no memory left.

    Accelerators have an exception class for it; the CPU's allocator has only a message, and so has
    memory of the host that CUDA should pin.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "error: out of memory"))
