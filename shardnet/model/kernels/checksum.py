"""CRC-32 by the compiled library where it can, by zlib elsewhere: the same number.

Knows csrc/checksum.c. Must not know what the bytes are.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Final

from shardnet.model.kernels.library import native_kernels

_FOLDED_BYTES: Final = 16
_MIN_BYTES: Final = 64
_FROM_ZERO: Final = 0xFFFFFFFF
"""What zlib takes a CRC to be before which there was nothing but a remainder of 0."""


def crc32(view: memoryview) -> int:
    """Return the CRC-32 of bytes that can be written to, as zlib has it; off Python's lock."""
    native = native_kernels()
    if native is None or not native.can_fold or len(view) < _MIN_BYTES:
        return zlib.crc32(view)
    folded = ctypes.create_string_buffer(_FOLDED_BYTES)
    fold = native.function("shardnet_fold", ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p)
    fold(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view), folded)
    rest = view[len(view) // _FOLDED_BYTES * _FOLDED_BYTES :]
    return zlib.crc32(rest, zlib.crc32(folded.raw, _FROM_ZERO))
