"""What some tests need of the machine."""

from __future__ import annotations

import pytest

from shardnet.model.kernels.library import Isa, native_kernels

_NATIVE = native_kernels()
HAS_VECTORS = _NATIVE is not None and _NATIVE.isa is not Isa.PORTABLE
"""Whether the library computes by itself: in plain C it does so only if asked to."""

needs_library = pytest.mark.skipif(
    _NATIVE is None, reason="needs the compiled library, which is not used here"
)

needs_vectors = pytest.mark.skipif(
    not HAS_VECTORS, reason="needs the compiled library with vectors, which is not used here"
)
