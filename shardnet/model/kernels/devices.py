"""What torch's devices can and cannot do, and the calls that each kind has of its own.

Knows cpu, cuda (NVIDIA's, and AMD's as ROCm shows them) and mps (Apple's), and how each says that
its memory is full. Must not know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.errors import CapacityError

_WORDS: Final = (
    "can't allocate memory",
    "error: out of memory",
    "backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def where_float64(tensor: Tensor) -> Tensor:
    """Return `tensor` where float64 can be computed: on its device, or on the CPU for MPS."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def synchronize(device: torch.device) -> None:
    """Wait until all is computed that was launched on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def release_cached() -> None:
    """Return the memory to the system that torch keeps of GPUs and does not use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def multiplies_packed(device: torch.device) -> bool:
    """Whether kernels of ours multiply packed weights on `device`; else they are unpacked once."""
    return device.type == "cpu"


def why_unusable(device: torch.device) -> str:
    """Say why torch cannot compute on a GPU that it finds: one line, "" where it can."""
    try:
        if computes(device, torch.float32):
            return ""
        F.linear(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device)).cpu()
    except (RuntimeError, TypeError, AssertionError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "it computes wrong numbers"


@cache
def table_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the float32 of each byte of an 8-bit float `dtype`, which `device` may lack: [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


@cache
def table_of_numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return `numbers` on `device`: made once, so that no product waits for a copy."""
    return torch.tensor(numbers, device=device)


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a linear of `dtype` on `device` gives what float64 gives, as nearly as it can."""
    numbers = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(n, 64, generator=numbers).to(dtype) for n in (5, 96))
    try:
        found = F.linear(rows.to(device), weight.to(device)).cpu().double()
    except (RuntimeError, TypeError):  # it has no such dtype, or no kernel for it
        return False
    return torch.allclose(found, rows.double() @ weight.double().T, rtol=2e-2, atol=2e-2)


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
