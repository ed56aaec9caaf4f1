"""CRC-32 by the compiled library: zlib's number, whatever the bytes and how many."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.model.kernels import checksum
from shardnet.model.kernels.checksum import crc32


@given(st.binary(max_size=300), st.integers(0, 3))
def test_it_is_the_crc_of_zlib(data: bytes, begin: int) -> None:
    """Where it begins does not matter either."""
    view = memoryview(bytearray(data))[begin:]
    assert crc32(view) == zlib.crc32(view)


@pytest.mark.parametrize("n_bytes", [63, 64, 65, 127, 128, 143, 1 << 20, (1 << 20) + 17])
def test_long_ones_too(n_bytes: int) -> None:
    data = bytearray(i * i % 251 for i in range(n_bytes))
    assert crc32(memoryview(data)) == zlib.crc32(data)


def test_without_the_library_zlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "native_kernels", lambda: None)
    data = bytearray(range(200))
    assert crc32(memoryview(data)) == zlib.crc32(data)
