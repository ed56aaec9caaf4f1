"""Attention in float32 in the order that docs/exactness.md gives, each block computed apart.

Written from that page with numpy, whose operators round once each: what the library computes has
these bits. Axes: Q queries, P positions, D columns of a key, V of a value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
KEYS, PARTS = 128, 16


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: the sum of float64 is rounded to odd before it is narrowed."""
    product, added = a.astype(np.float64) * b, np.asarray(c, np.float64)
    total = product + added
    other = total - product
    missing = (product - (total - other)) + (added - other)
    bits = total.view(np.int64)
    is_even = (missing != 0) & (bits & 1 == 0)
    odd = np.where(is_even, bits + np.where((missing > 0) == (total > 0), 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def polynomial(x: Floats, *factors: float) -> Floats:
    """Sum the powers of x by their factors, the highest first."""
    total = np.full_like(x, factors[0])
    for factor in factors[1:]:
        total = fused(total, x, np.float32(factor))
    return total


def exponential(x: Floats) -> Floats:
    """e^x within [-87.3, 88]."""
    x = np.clip(x, np.float32(-87.3), np.float32(88)).astype(np.float32)
    shifted = fused(x, np.float32(1.44269504), np.float32(12582912))
    whole = shifted - np.float32(12582912)
    rest = fused(whole, np.float32(2.12194440e-4), fused(whole, np.float32(-0.693359375), x))
    y = polynomial(rest, 0.00019899334, 0.0013933688, 0.008333298, 0.041666463, 0.16666667, 0.5)
    y = fused(y, rest * rest, rest) + np.float32(1)
    power = whole.astype(np.int32) + 127
    return y * (power << 23).view(np.float32)


def hyperbolic_tangent(x: Floats) -> Floats:
    """Tanh, by its series near 0."""
    square, one, two = x * x, np.float32(1), np.float32(2)
    y = polynomial(
        square, 0.0035921280, -0.0088632355, 0.021869488, -0.053968254, 0.13333333, -0.33333333
    )
    far = one - two / (one + exponential(two * x))
    return np.where(square < np.float32(0.25), fused(y * square, x, x), far)


def attended(
    queries: Floats,
    keys: Floats,
    values: Floats,
    first: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Floats | None = None,
) -> Floats:
    """Attend with queries [Q, D] over positions `[first, P)` of keys and values: [Q, V]."""
    end, n = len(keys), len(queries)
    factor = np.float32(scale) / np.float32(soft_cap) if soft_cap else np.float32(scale)
    blocks = []
    for begin in reversed(range(first // KEYS * KEYS, end, KEYS)):  # none needs another
        seen = slice(max(first, begin), min(end, begin + KEYS))
        block = _block(queries * factor, keys[seen], values[seen], seen.start - begin, soft_cap)
        blocks.append(block)
    best = np.full((n, 1), -np.inf, np.float32) if sinks is None else sinks[:, None]
    total = np.zeros((n, PARTS + values.shape[1]), np.float32)
    total[:, 0] = sinks is not None
    for largest, own in reversed(blocks):
        most = np.maximum(best, largest)
        total = fused(own, exponential(largest - most), total * exponential(best - most))
        best = most
    sums = total[:, :PARTS]
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    return total[:, PARTS:] * (np.float32(1) / sums)


def _block(
    queries: Floats, keys: Floats, values: Floats, begin: int, soft_cap: float
) -> tuple[Floats, Floats]:
    """Return the largest score [Q, 1] of a block, and its 16 sums and its outputs side by side."""
    scores = np.zeros((len(queries), len(keys)), np.float32)
    for column in range(queries.shape[1]):
        scores = fused(keys[None, :, column], queries[:, column, None], scores)
    if soft_cap:
        scores = np.float32(soft_cap) * hyperbolic_tangent(scores)
    largest = scores.max(1, keepdims=True)
    weights = exponential(scores - largest)
    total = np.zeros((len(queries), PARTS + values.shape[1]), np.float32)
    for place in range(len(keys)):
        weight = weights[:, place, None]
        total[:, (begin + place) % PARTS, None] += weight
        total[:, PARTS:] = fused(weight, values[place, None], total[:, PARTS:])
    return largest, total
