"""What some tests need of the machine."""

from __future__ import annotations

import pytest

from shardnet.model.kernels.library import native_kernels

needs_library = pytest.mark.skipif(
    native_kernels() is None, reason="needs the compiled library, which is not used here"
)
