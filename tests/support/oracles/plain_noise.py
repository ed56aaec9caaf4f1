"""The noise that sampling adds, on Python's own numbers."""

from __future__ import annotations

import math

MASK = 2**32 - 1


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, as the paper writes it."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        high_a, low_a = divmod(0xD2511F53 * a, 2**32)
        high_c, low_c = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = (k + 0x9E3779B9) & MASK, (m + 0xBB67AE85) & MASK
    return [a, b, c, d]


def plain_noise(seed: int, position: int, sample_index: int, token_id: int) -> float:
    counter = [position, sample_index, token_id // 4, 0]
    word = plain_philox(counter, [seed & MASK, seed >> 32])[token_id % 4]
    return -math.log(-math.log((word + 0.5) * 2.0**-32))
