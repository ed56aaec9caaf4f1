"""What torch's devices can and cannot do, and the calls that each kind has of its own.

Knows cpu, cuda (NVIDIA's, and AMD's as ROCm shows them) and mps (Apple's). Must not know models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a linear of `dtype` on `device` gives what float64 gives, as nearly as it can."""
    numbers = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(n, 64, generator=numbers).to(dtype) for n in (5, 96))
    try:
        found = F.linear(rows.to(device), weight.to(device)).cpu().double()
    except (RuntimeError, TypeError):  # it has no such dtype, or no kernel for it
        return False
    return torch.allclose(found, rows.double() @ weight.double().T, rtol=2e-2, atol=2e-2)
