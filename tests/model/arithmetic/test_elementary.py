"""Sine, cosine, powers and logarithms of sums and products, against Python's of the C library."""

from __future__ import annotations

import hashlib
import math

import torch

from shardnet.model.arithmetic.elementary import (
    cosine_sine,
    exponential,
    many_exponentials,
    natural_logarithm,
    power,
)
from shardnet.model.config.model_config import Rope, RopeKind
from shardnet.model.layers.rotary import rotary_tables


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_they_are_near_those_of_the_c_library() -> None:
    angles = doubles(*(n * 0.37 - 90 for n in range(500)), 0.0, 1e-30, 131071.5, 1e6, -1e6)
    cosines, sines = cosine_sine(angles)
    for angle, cosine, sine in zip(angles.tolist(), cosines, sines, strict=True):
        assert abs(cosine - math.cos(angle)) < 4e-16
        assert abs(sine - math.sin(angle)) < 4e-16
    numbers = doubles(*(1.07**n for n in range(-300, 300)), 1.0, 0.7071067811865475, 8193.0)
    for number, found in zip(numbers.tolist(), natural_logarithm(numbers), strict=True):
        assert math.isclose(found, math.log(number), rel_tol=4e-16, abs_tol=4e-16)
    small = doubles(*(n * 0.17 - 50 for n in range(600)))
    for number, found in zip(small.tolist(), exponential(small), strict=True):
        assert math.isclose(found, math.exp(number), rel_tol=5e-16)
    low = doubles(*(-n * 0.7 for n in range(1000)), -1e-300)
    for number, found in zip(low.tolist(), many_exponentials(low), strict=True):
        assert math.isclose(found, math.exp(number), rel_tol=6e-16)
    shares = torch.arange(0, 128, 2) / 128
    for share, found in zip(shares.tolist(), power(500000.0, shares), strict=True):
        assert found == torch.tensor(500000.0**share, dtype=torch.float64).float()


def test_rotary_tables_are_these_bits_on_every_machine() -> None:
    """The digest was made on x86-64; sums and products of float64 round alike everywhere."""
    rope = Rope(kind=RopeKind.DEFAULT, theta=500000.0)
    tables = rotary_tables(rope, 64, 3000, torch.float32, torch.device("cpu"))
    digest = hashlib.sha256()
    for table in (tables.cos, tables.sin):
        digest.update(table.contiguous().numpy().tobytes())
    assert digest.hexdigest() == (
        "29bb5069e829f45c6e3028f2e7a4f59bf7db82f5646cc03e5b68d2494460b7f4"
    )
