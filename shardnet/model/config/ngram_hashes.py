"""How n-grams of token ids are hashed to rows of a table: which primes, and Qwen 3.8's factors.

Knows the arithmetic of transformers' modeling_qwen4_exp.py. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count, islice
from typing import Final

from shardnet.model.config.model_config import Ngrams

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
OF_LAYER: Final = 10007
"""From the seed of one layer's factors to that of the next one's."""
_BASES: Final = (2, 3, 5, 7)
"""Miller and Rabin's test is exact with these below 3.2e9, far more than a head has rows."""


def head_rows(own: Ngrams, layer: int) -> tuple[int, ...]:
    """Return how many rows each head of the absolute `layer` has: different primes."""
    n, number = own.n_heads, own.layers.index(layer)
    return (
        own.given_rows
        or _primes(own.least_rows, n * len(own.layers))[n * number : n * (number + 1)]
    )


def part_rows(own: Ngrams, layer: int) -> list[int]:
    """Return how many rows each stored part of the table of the absolute `layer` has."""
    n_rows = -(-sum(head_rows(own, layer)) // own.divisor) * own.divisor
    step = -(-n_rows // own.n_parts)
    return [min(step, n_rows - begin) for begin in range(0, n_rows, step)]


def factors(own: Ngrams, layer: int, vocab_size: int) -> Sequence[int]:
    """Return what token ids of the absolute `layer` are multiplied by: the newest one's first."""
    if own.given_factors:
        return own.given_factors
    most = max(1, ((1 << 63) - 1) // vocab_size // 2)
    seed = own.seed + OF_LAYER * own.layers.index(layer)
    return [2 * (_mixed(seed + _GAMMA * (n + 1)) % most) + 1 for n in range(own.longest)]


def _mixed(value: int) -> int:
    """Mix 64 bits (splitmix64)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=8)
def _primes(least: int, n: int) -> tuple[int, ...]:
    """Return the first `n` primes from `least` on."""
    return tuple(islice(filter(_is_prime, count(max(2, least))), n))


def _is_prime(value: int) -> bool:
    if value in _BASES or not all(value % base for base in _BASES):
        return value in _BASES
    odd = value - 1
    while not odd % 2:
        odd //= 2
    return all(_passes(pow(base, odd, value), odd, value) for base in _BASES)


def _passes(power: int, exponent: int, value: int) -> bool:
    """Say whether a power of a base mod `value` is 1, or it or one of its squares is -1."""
    if power == 1:
        return True
    while power != value - 1 and exponent < value // 2:
        power, exponent = power * power % value, 2 * exponent
    return power == value - 1
