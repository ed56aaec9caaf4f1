"""Sine, cosine, powers and logarithms from sums and products of float64 alone.

Every machine rounds those alike, and no two C libraries, compilers and instruction sets have the
same sine. What comes of it is off by about 1e-15, and meant to be rounded to float32. Must not know
what it is for.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch
from torch import Tensor

_LN2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
"""The first has zeros at its end: times an exponent it is exact."""
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_TERMS = 18
_MAX_ANGLE = 2.0**30


def cosine_sine(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of float64 `angles`, of at most 2 ** 30 in size."""
    assert angles.dtype is torch.float64
    assert not angles.numel() or angles.abs().max() <= _MAX_ANGLE
    turns = torch.round(angles * (1 / (_HALF_PI[0])))
    rest = angles
    for part in _HALF_PI:
        rest = rest - turns * part
    square = rest * rest
    even, odd = torch.zeros_like(rest), torch.zeros_like(rest)
    for term in range(_TERMS, -1, -2):
        sign = -1.0 if term // 2 % 2 else 1.0
        even = even * square + sign / math.factorial(term)
        odd = odd * square + sign / math.factorial(term + 1)
    odd = odd * rest
    quarter = turns.to(torch.int64) & 3
    swaps = (quarter & 1).bool()
    cosine, sine = torch.where(swaps, odd, even), torch.where(swaps, even, odd)
    cosine = torch.where((quarter == 1) | (quarter == 2), -cosine, cosine)
    return cosine, torch.where(quarter >= 2, -sine, sine)


def natural_logarithm(numbers: Tensor) -> Tensor:
    """Return the logarithm of positive, finite float64 numbers."""
    assert numbers.dtype is torch.float64
    mantissas, exponents = torch.frexp(numbers)  # exact
    is_low = mantissas < math.sqrt(0.5)
    mantissas = torch.where(is_low, mantissas * 2, mantissas)
    powers = exponents.to(torch.float64) - is_low.to(torch.float64)
    ratio = (mantissas - 1) / (mantissas + 1)
    square = ratio * ratio
    series = torch.zeros_like(ratio)
    for term in range(27, 0, -2):
        series = series * square + 1.0 / term
    return powers * _LN2[0] + (2 * ratio * series + powers * _LN2[1])


def exponential(numbers: Tensor) -> Tensor:
    """Return e to the power of float64 numbers between -700 and 700."""
    assert numbers.dtype is torch.float64
    powers = torch.round(numbers * (1 / _LN2[0]))
    rest = (numbers - powers * _LN2[0]) - powers * _LN2[1]
    series = torch.zeros_like(rest)
    for term in range(_TERMS, -1, -1):
        series = series * rest + 1.0 / math.factorial(term)
    scale = ((powers.to(torch.int64) + 1023) << 52).view(torch.float64)
    return series * scale


_STEPS: Final = 256
"""A power of two, at which `many_exponentials` looks up roots of 2."""


def many_exponentials(numbers: Tensor) -> Tensor:
    """Return what `exponential` does, to the last bits, in half of its time."""
    assert numbers.dtype is torch.float64
    steps = (numbers * (_STEPS / _LN2[0])).round_()
    rest = numbers - steps * (_LN2[0] / _STEPS)
    rest -= steps * (_LN2[1] / _STEPS)
    series = rest * (1 / 24)
    for term in (1 / 6, 1 / 2, 1.0):
        series.add_(term).mul_(rest)
    whole = steps.to(torch.int64)
    series.add_(1.0).mul_(_roots(numbers.device).take(whole & (_STEPS - 1)))
    whole >>= _STEPS.bit_length() - 1
    whole += 1023
    whole <<= 52
    return series.mul_(whole.view(torch.float64))


@functools.cache
def _roots(device: torch.device) -> Tensor:
    """Return 2 to the power of n / _STEPS for every n below _STEPS."""
    steps = torch.arange(_STEPS, dtype=torch.float64, device=device)
    return exponential(steps * ((_LN2[0] + _LN2[1]) / _STEPS))


def power(base: float, exponents: Tensor) -> Tensor:
    """Return a positive `base` to the power of `exponents`: float32, in their shape."""
    logarithm = natural_logarithm(torch.tensor(base, dtype=torch.float64))
    return exponential(exponents.to(torch.float64) * logarithm).to(torch.float32)
