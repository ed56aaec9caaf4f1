"""Reads protobuf's wire format: the fields of one message, one after another.

Knows varints and lengths (protobuf.dev/programming-guides/encoding) and makes no copies: values
with a length are views of the message. Must not know what the fields mean.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10

Value = int | memoryview
"""An integer, or the bytes of a text, a message or a fixed-width number."""


def fields(message: memoryview, most: int) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field, of at most `most`.

    Raises ValueError, which names the offset, for more of them, for a length beyond the end of the
    message, an unterminated varint, and an unknown wire type or a group.
    """
    at = n_fields = 0
    while at < len(message):
        start = at
        n_fields += 1
        if n_fields > most:
            raise ValueError(f"byte {start}: more than {most} fields")
        key, at = _varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire_type == _LENGTH:
            length, at = _varint(message, at)
        elif wire_type in _FIXED_BYTES:
            length = _FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"byte {start}: wire type {wire_type} of field {number} is not known")
        if length > len(message) - at:
            raise ValueError(
                f"byte {start}: field {number} claims {length} bytes, but only "
                f"{len(message) - at} remain"
            )
        yield number, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Read a varint at `at`; return it and its end."""
    value = 0
    for place, byte in enumerate(message[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"byte {at}: an unterminated varint")
