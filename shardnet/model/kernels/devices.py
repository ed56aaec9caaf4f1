"""What torch's devices can and cannot do, and the calls that each kind has of its own.

Knows cpu, cuda (NVIDIA's, and AMD's as ROCm shows them) and mps (Apple's). Must not know models.
"""

from __future__ import annotations

import torch
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
