"""Apple's GPUs: the kernel text as a Metal library, compiled and launched by torch.

Never compiled by Apple's compiler, never run: no such machine was at hand. Metal has no raw
pointers: a kernel is given whole buffers. Must not know what is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardnet.errors import ConfigurationError
from shardnet.model.drivers.driver import (
    THREADS,
    Argument,
    Array,
    Buffer,
    Driver,
    Kernel,
    no_memory,
)
from shardnet.model.kernels.devices import is_out_of_memory

_SIGNATURE = re.compile(r"KERNEL (\w+)\(([^)]*)WHERE\)")
_NUMBER = re.compile(r"\b(uint32_t|float) (\w+)(?=\s*(,|$))")


def as_metal(text: str) -> str:
    """Turn a kernel's numbers into references to constants, as Metal wants them."""

    def kernel(found: re.Match[str]) -> str:
        given = _NUMBER.sub(r"constant \1 &\2", found[2].rstrip())
        return f"KERNEL {found[1]}({given} WHERE)"

    return _SIGNATURE.sub(kernel, text)


class MetalDriver(Driver):
    """Apple's GPU. See Driver. One thread at a time may use it."""

    dialect = "metal"
    name = "metal"

    def __init__(self) -> None:
        """Take the GPU. Raises ConfigurationError where there is none."""
        if not torch.backends.mps.is_available():
            raise ConfigurationError(
                "--device metal: torch finds no GPU of Apple's here", remedy="use --device cpu"
            )
        self.description = "metal (Apple's GPU)"
        self.n_launches = self.n_waits = 0

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """See Driver."""
        try:
            library: Any = torch.mps.compile_shader(as_metal(text))
            return {name: getattr(library, name) for name in names}
        except (RuntimeError, SyntaxError, AttributeError) as error:
            why = " ".join(str(error).split())[:400]
            raise ConfigurationError(f"{self.description} compiles no kernel: {why}") from error

    def empty(self, n_bytes: int) -> Buffer:
        """See Driver."""
        try:
            return torch.empty(max(4, n_bytes), dtype=torch.uint8, device="mps")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise no_memory(self.description, n_bytes) from error

    def upload(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        given = torch.from_numpy(array.reshape(-1).view(np.uint8))
        buffer[offset : offset + array.nbytes].copy_(given)

    def download(self, buffer: Buffer, array: Array, offset: int = 0) -> None:
        """See Driver."""
        self.n_waits += 1
        taken = buffer[offset : offset + array.nbytes].cpu()
        array.reshape(-1).view(np.uint8)[:] = taken.numpy()

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """See Driver."""
        target[at[1] : at[1] + n_bytes].copy_(source[at[0] : at[0] + n_bytes])

    def launch(
        self, kernel: Kernel, groups: tuple[int, int], arguments: Sequence[Argument]
    ) -> None:
        """See Driver."""
        self.n_launches += 1
        given = [each if torch.is_tensor(each) else each.item() for each in arguments]
        threads = (groups[0] * THREADS, groups[1], 1)
        kernel(*given, threads=threads, group_size=(THREADS, 1, 1))

    @property
    def free_bytes(self) -> int:
        """See Driver."""
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
