"""Resizes pictures as Pillow does, bit by bit: makers' processors resize with it.

Knows arrays of bytes [H, W, C]. Each axis is filtered by itself, in 22 bits of fixed point, and
rounded to bytes before the other (Pillow, Resample.c).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BITS: Final = 22
_ROWS_AT_ONCE: Final = 16
"""Output rows of one matmul: more would multiply with more zeros."""


class Filter(enum.Enum):
    """A filter of Pillow, by its number in processors' configs."""

    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3

    @property
    def support(self) -> float:
        """How many pixels it reaches to each side, where nothing is made smaller."""
        return {Filter.LANCZOS: 3.0, Filter.BILINEAR: 1.0, Filter.BICUBIC: 2.0}[self]

    def weigh(self, distance: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weigh pixels by their distance from the centre."""
        import numpy as np

        x = np.abs(distance)
        if self is Filter.BILINEAR:
            return np.maximum(1.0 - x, 0.0)
        if self is Filter.BICUBIC:
            near = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1
            far = (((x - 5) * x + 8) * x - 4) * -0.5
            return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
        inside = (distance >= -3.0) & (distance < 3.0)
        return np.where(inside, np.sinc(distance) * np.sinc(distance / 3), 0.0)


def resize(picture: NDArray[np.uint8], height: int, width: int, kind: Filter) -> NDArray[np.uint8]:
    """Resize a picture [H, W, C] to [height, width, C].

    Pillow 12 and newer begin with the axis where that saves more, older ones with the width: that
    changes bytes by 1 or 2 where it is seen at all.
    """
    less = picture.shape[0] - height
    if less > 0 and 2 * (picture.shape[1] - width) < less:
        return _resize_width(_resize_height(picture, height, kind), width, kind)
    return _resize_height(_resize_width(picture, width, kind), height, kind)


def _resize_width(picture: NDArray[np.uint8], width: int, kind: Filter) -> NDArray[np.uint8]:
    turned = _resize_height(picture.transpose(1, 0, 2), width, kind)
    return turned.transpose(1, 0, 2)


def _resize_height(picture: NDArray[np.uint8], n_out: int, kind: Filter) -> NDArray[np.uint8]:
    """Resize the first axis of [N, M, C]."""
    import numpy as np

    n_in, *others = picture.shape
    if n_in == n_out:
        return picture
    flat = picture.reshape(n_in, -1)
    firsts, weights = _taps(n_in, n_out, kind)
    out = np.empty((n_out, flat.shape[1]), np.uint8)
    for begin in range(0, n_out, _ROWS_AT_ONCE):
        rows = range(begin, min(begin + _ROWS_AT_ONCE, n_out))
        low = min(firsts[row] for row in rows)
        high = max(firsts[row] + len(weights[row]) for row in rows)
        band = np.zeros((len(rows), high - low))
        for place, row in enumerate(rows):
            start = firsts[row] - low
            band[place, start : start + len(weights[row])] = weights[row]
        sums = band @ flat[low:high].astype(np.float64)  # whole numbers below 2 ** 53: exact
        sums += 1 << (_BITS - 1)
        sums *= 2.0**-_BITS
        out[rows.start : rows.stop] = np.floor(sums, out=sums).clip(0, 255)
    return out.reshape(n_out, *others)


def _taps(n_in: int, n_out: int, kind: Filter) -> tuple[list[int], Sequence[NDArray[np.float64]]]:
    """Return for each output the first input that counts, and whole weights of it and the next."""
    import numpy as np

    scale = n_in / n_out
    stretch = max(scale, 1.0)
    support = kind.support * stretch
    firsts: list[int] = []
    weights: list[NDArray[np.float64]] = []
    for place in range(n_out):
        centre = (place + 0.5) * scale
        begin = max(int(centre - support + 0.5), 0)
        end = min(int(centre + support + 0.5), n_in)
        distances = np.arange(begin, end, dtype=np.float64) - centre + 0.5
        own = kind.weigh(distances * (1.0 / stretch))
        total = sum(own.tolist())
        scaled = own * (1.0 / total if total else 1.0) * (1 << _BITS)
        firsts.append(begin)
        weights.append(np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)))
    return firsts, weights
