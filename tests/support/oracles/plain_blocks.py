"""Blocks of packed values by plain formulas, one value at a time: the oracle for what unpacks them.

From the descriptions of ggml's block types (ggml-common.h and ggml-quants.c, github.com/ggml-org).
"""

from __future__ import annotations

import struct
from collections.abc import Callable


def q8_0(block: bytes) -> list[float]:
    """A scale, then 32 signed bytes."""
    (scale,) = struct.unpack("<e", block[:2])
    return [scale * value for value in struct.unpack("<32b", block[2:])]


def q4_0(block: bytes) -> list[float]:
    """A scale, then 16 bytes: the low halves are the first 16 values, the high ones the rest."""
    (scale,) = struct.unpack("<e", block[:2])
    low = [scale * ((byte & 15) - 8) for byte in block[2:]]
    high = [scale * ((byte >> 4) - 8) for byte in block[2:]]
    return low + high


def q4_k(block: bytes) -> list[float]:
    """Two scales, 8 pairs of 6-bit scales and minima in 12 bytes, then 128 bytes."""
    scale, scale_min = struct.unpack("<2e", block[:4])
    sixes, halves = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            factor, least = sixes[group] & 63, sixes[group + 4] & 63
        else:
            factor = (sixes[group + 4] & 15) | (sixes[group - 4] >> 6) << 4
            least = (sixes[group + 4] >> 4) | (sixes[group] >> 6) << 4
        for byte in halves[group // 2 * 32 : group // 2 * 32 + 32]:
            value = byte >> 4 if group % 2 else byte & 15
            values.append(scale * factor * value - scale_min * least)
    return values


def q6_k(block: bytes) -> list[float]:
    """128 bytes of low halves, 64 of high pairs of bits, 16 signed scales, a scale of these."""
    low, high = block[:128], block[128:192]
    factors = struct.unpack("<16b", block[192:208])
    (scale,) = struct.unpack("<e", block[208:])
    values = []
    for at in range(256):
        half, quarter, column = at // 128, at % 128 // 32, at % 32
        byte = low[half * 64 + quarter % 2 * 32 + column]
        four = byte >> 4 if quarter > 1 else byte & 15
        two = high[half * 32 + column] >> 2 * quarter & 3
        values.append(scale * factors[at // 16] * ((four | two << 4) - 32))
    return values


def mxfp4(block: bytes) -> list[float]:
    """The exponent of a power of two, then 16 bytes as Q4_0's; a value is a sign and E2M1."""
    steps = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    scale = 2.0 ** (block[0] - 127)
    fours = [byte & 15 for byte in block[1:]] + [byte >> 4 for byte in block[1:]]
    return [(-scale if four & 8 else scale) * steps[four & 7] for four in fours]


BLOCKS: dict[str, tuple[int, int, Callable[[bytes], list[float]]]] = {
    "MXFP4": (32, 17, mxfp4),
    "Q8_0": (32, 34, q8_0),
    "Q4_0": (32, 18, q4_0),
    "Q4_K": (256, 144, q4_k),
    "Q6_K": (256, 210, q6_k),
}
"""Values and bytes of a block, and its values."""
