"""Masks over the vocabulary: written in the shortest of three forms, and read.

Knows docs/protocol.md section 11, "masks". Must not know what a mask was made from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardnet.constraints import MaskForm, TokenMask

_ID = np.dtype("<u4")
_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")


def pack_mask(bits: bytes, n_tokens: int) -> TokenMask:
    """Write a mask of `n_tokens` bits, little-endian in each byte, in the shortest form.

    `bits` has at least that many; those behind do not count.
    """
    n_bytes, n_last = divmod(n_tokens, 8)
    last = bits[n_bytes : n_bytes + 1]
    bits = bits[:n_bytes] + bytes([last[0] & (1 << n_last) - 1]) if n_last else bits[:n_bytes]
    n_allowed = int.from_bytes(bits, "little").bit_count()
    if _ID.itemsize * n_allowed <= len(bits):
        return TokenMask(MaskForm.ALLOWED, _set_bits(np.frombuffer(bits, np.uint8)).tobytes())
    if _ID.itemsize * (n_tokens - n_allowed) <= len(bits):
        forbidden = _set_bits(~np.frombuffer(bits, np.uint8))
        return TokenMask(MaskForm.FORBIDDEN, forbidden[forbidden < n_tokens].tobytes())
    return TokenMask(MaskForm.BITS, bits)


def forbidden_tokens(mask: TokenMask, n_columns: int) -> NDArray[np.bool_]:
    """Return for each of `n_columns` token ids whether it is forbidden. Ids beyond are ignored."""
    if mask.form is MaskForm.BITS:
        bits = np.unpackbits(np.frombuffer(mask.data, np.uint8), bitorder="little")[:n_columns]
        forbidden = np.ones(n_columns, np.bool_)
        np.equal(bits, 0, out=forbidden[: len(bits)])
        return forbidden
    ids = np.frombuffer(mask.data, _ID)
    listed = np.zeros(n_columns, np.bool_)
    listed[ids[ids < n_columns]] = True
    return listed if mask.form is MaskForm.FORBIDDEN else ~listed


def _set_bits(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the places of the 1 bits, ascending. Fast where few bytes have any."""
    places = np.flatnonzero(data)
    rows, columns = np.nonzero(_BITS_OF_BYTE[data[places]])
    return (8 * places[rows] + columns).astype(_ID)
