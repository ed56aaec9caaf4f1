"""Rotary positions: tables of cosines and sines for one context length, and the rotation of heads.

Knows every kind of scaling (transformers, modeling_rope_utils.py). Must not know families.

Two kinds depend on the length of the sequence. transformers changes its tables while a sequence
grows, but leaves cached keys unchanged. Here the tables are computed once, from the requested
context: up to the training length they equal transformers', in a longer context they are those of a
sequence that fills it (docs/models.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardnet.model.arithmetic.elementary import cosine_sine, power
from shardnet.model.arithmetic.row_functions import rotated_heads
from shardnet.model.config.model_config import Rope, RopeKind

_POSITIONS_AT_ONCE: Final = 1024
"""Sines are computed in float64, which the caches should hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Tables of rotary positions: [P, 1, R] each, in the compute dtype, R the rotated columns.

    `sin` includes the sign of rotate_half in transformers. `axes`, int64 [R], are those that the
    columns turn by, None where positions have one. Of some positions `every` are the tables that
    they were selected from.
    """

    cos: Tensor
    sin: Tensor
    axes: Tensor | None = None
    every: Rotary | None = None

    def at(self, positions: Tensor) -> Rotary:
        """Select the rows of `positions`, int64 [T], or [3, T] by axis: tables of [T, 1, R]."""
        if positions.dim() == 1:
            return Rotary(
                cos=self.cos.index_select(0, positions),
                sin=self.sin.index_select(0, positions),
                every=self,
            )
        assert self.axes is not None, "positions have axes"
        rows = positions[self.axes].T[:, None]  # [T, 1, R]
        return Rotary(cos=self.cos.gather(0, rows), sin=self.sin.gather(0, rows), every=self)

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate the first R columns of queries or keys [T, heads, D]; needs tables of T rows."""
        turned = rotated_heads(heads, self.cos, self.sin)
        return self._rotate_in_torch(heads) if turned is None else turned

    def rotate_pairs(self, heads: Tensor) -> Tensor:
        """Rotate as `rotate` where columns that turn together are adjacent: [T, heads, D].

        Afterwards the first ones of all pairs stand before the second ones.
        """
        n_rotated = self.cos.shape[-1]
        pairs = heads[..., :n_rotated].reshape(*heads.shape[:-1], -1, 2)  # [T, heads, R / 2, 2]
        apart = pairs.transpose(-1, -2).flatten(-2)
        if n_rotated < heads.shape[-1]:
            apart = torch.cat((apart, heads[..., n_rotated:]), -1)
        return self.rotate(apart)

    def _rotate_in_torch(self, heads: Tensor) -> Tensor:
        n_rotated = self.cos.shape[-1]
        if n_rotated < heads.shape[-1]:
            rest = heads[..., n_rotated:]
            return torch.cat((self._rotate_in_torch(heads[..., :n_rotated]), rest), -1)
        return torch.addcmul(heads * self.cos, heads.roll(n_rotated // 2, -1), self.sin)


def rotary_tables(
    rope: Rope, head_size: int, context: int, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Compute the tables for positions `[0, context)`, in float32, then rounded to `dtype`.

    They have the same bits on every machine.
    """
    frequencies = rotary_frequencies(rope, head_size, context)  # [R / 2]
    half = len(frequencies)
    cos, sin = torch.empty(2, context, 1, 2 * half, dtype=dtype).unbind(0)
    every = torch.arange(context, dtype=torch.float32)
    for positions in torch.split(every, _POSITIONS_AT_ONCE):
        rows = rotary_rows(rope, frequencies, positions, dtype)
        own = slice(int(positions[0]), int(positions[-1]) + 1)
        cos[own], sin[own] = rows.cos, rows.sin
    axes = torch.tensor(rope.axes * 2, device=device) if rope.axes else None
    return Rotary(cos=cos.to(device), sin=sin.to(device), axes=axes)


def rotary_rows(rope: Rope, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """Compute the tables of `positions` [T], as rotary_tables does, on the CPU."""
    angles = torch.outer(positions.float(), frequencies).double()
    cosines, sines = (part.float() * rope.magnitude for part in cosine_sine(angles))
    cos, sin = torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)
    return Rotary(cos=cos.to(dtype)[:, None], sin=sin.to(dtype)[:, None])


def rotary_frequencies(rope: Rope, head_size: int, context: int) -> Tensor:
    """Compute the rotary frequencies [R / 2] in float32, for sequences of up to `context`.

    In transformers' order of operations: at position 3000 one bit of a frequency is seen.
    """
    n_rotated = rope.rotated(head_size)
    steps = torch.arange(0, n_rotated, 2, dtype=torch.float32) / n_rotated
    powers = power(rope.theta, steps)
    plain = 1.0 / powers
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.PROPORTIONAL:
            n_turning = int(rope.share * head_size) // 2
            turning = plain[:n_turning] / rope.factor
            return torch.cat((turning, torch.zeros(len(plain) - n_turning)))
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.DYNAMIC:
            return 1.0 / power(_dynamic_theta(rope, n_rotated, context), steps)
        case RopeKind.YARN:
            return _yarn(rope, powers)
        case RopeKind.LONGROPE:
            is_long = context > rope.original_max_positions
            factors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
            return 1.0 / (factors * powers)
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)


def _dynamic_theta(rope: Rope, n_rotated: int, context: int) -> float:
    """NTK-aware scaling: the base grows with the ratio of context to training length."""
    length = max(context, rope.original_max_positions) / rope.original_max_positions
    stretch = rope.factor * length - (rope.factor - 1)
    return float(rope.theta * stretch ** (n_rotated / (n_rotated - 2)))


def _yarn(rope: Rope, powers: Tensor) -> Tensor:
    """Keep high frequencies, stretch low ones, with a ramp between (arXiv 2309.00071)."""
    n_rotated = 2 * len(powers)

    def column(rotations: float) -> float:
        """Return the column whose frequency makes `rotations` turns over the training length."""
        ratio = rope.original_max_positions / (rotations * 2 * math.pi)
        return n_rotated * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = column(rope.beta_fast), column(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n_rotated - 1)
    width = high - low or 0.001
    columns = torch.arange(len(powers), dtype=torch.float32)
    kept = 1 - ((columns - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Keep short wavelengths, stretch long ones, with a ramp between unless it has no width."""
    wavelengths = 2 * math.pi / plain
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    if low == high:  # as Llama 4's
        return torch.where(wavelengths > low, plain / rope.factor, plain)
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelengths > low, plain / rope.factor, between)
    return torch.where(wavelengths < high, plain, scaled)
