"""Random rows in the blocks of any GGUF type, and matrices of a model in many types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from support.models.gguf_files import Pack

Array = NDArray[Any]

_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
"""Where a block has float16, by type; others have one at its beginning."""
_CENTRES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q4_1": -7.5, "Q5_1": -15.5}
"""How many times the scale the minimum is, for weights around zero."""


def random_rows(kind: str, n_rows: int, n_in: int, seed: int, size: float = 0.05) -> Array:
    """Rows [N, bytes] of random blocks, whose values are about `size`."""
    number = gguf.GGMLQuantizationType[kind]
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[number]
    shape = (n_rows, n_in // n_values)
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (*shape, n_bytes), dtype=np.uint8)
    spread = generator.uniform(0.8, 1.2, (*shape, 1))
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(119, 121, shape)
    elif kind == "NVFP4":
        blocks[..., :4] = generator.integers(0, 0x18, (*shape, 4))
    else:
        _put_scales(kind, blocks, np.ones((*shape, 1)))
        values = dequantize(blocks.reshape(n_rows, -1), number)
        _put_scales(kind, blocks, size * spread / values.std())
    return blocks.reshape(n_rows, -1)


def _put_scales(kind: str, blocks: Array, scales: Array) -> None:
    halves = scales.astype(np.float16)
    if kind == "IQ1_M":  # four bits in each of four words
        words = blocks[..., 48:56].view(np.uint16)
        words &= 0x0FFF
        words |= (halves.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
        return
    places = _SCALES.get(kind, (0,))
    blocks[..., places[0] : places[0] + 2] = halves.view(np.uint8)
    if len(places) > 1:
        minimums = (_CENTRES[kind] * scales).astype(np.float16)
        blocks[..., places[1] : places[1] + 2] = minimums.view(np.uint8)


def packed_and_plain(kinds: Mapping[str, str]) -> tuple[Pack, Pack]:
    """Two ways to store the same weights: packed, and the float32 that they mean.

    `kinds` are types by a part of a tensor's name; the first part that is in a name counts.
    """

    def packed(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
        kind = next((kinds[part] for part in kinds if part in name), None)
        if kind is None or values.ndim < 2:
            return values, None
        n_in = values.shape[-1]
        rows = random_rows(kind, values.size // n_in, n_in, seed=sum(name.encode()))
        number = gguf.GGMLQuantizationType[kind]
        return rows.reshape(*values.shape[:-1], -1), number

    def plain(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
        rows, number = packed(name, values)
        return (rows, None) if number is None else (dequantize(rows, number), None)

    return packed, plain
