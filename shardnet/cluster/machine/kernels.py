"""Whether a machine computes with the compiled kernels, and what to say where it does not.

Knows the words by which nodes report it. Must not know how kernels are found. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shardnet.model import kernels

NONE: Final = "none"
"""Reported by a node whose CPU computes without the kernels since they were not built there."""
OFF: Final = "off"
"""Reported by a node whose user has switched them off."""

PLAIN_C: Final = "portable"
"""The instruction set of kernels without vectors, which are many times slower than torch."""
VECTORS: Final = ("avx2", "avx512", "neon", "neon_plain")
"""The other instruction sets of the kernels."""
TEXT: Final = "kernel text"
"""Reported of a device that computes by the kernel text (model/devices)."""

SLOWER: Final = "quantised weights are computed many times slower, others up to twice"
REMEDY: Final = (
    "install a C compiler and then shardnet again, or install it from a wheel that was built on "
    "another machine of this platform"
)

_FOLDER: Final = Path(kernels.__file__).parent


def are_built() -> bool:
    """Say whether the kernels were built when shardnet was installed, without loading them."""
    return (_FOLDER / kernels.LIBRARY).exists()
