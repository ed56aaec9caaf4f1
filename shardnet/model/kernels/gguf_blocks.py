"""The blocks of GGUF types as codes and scales, by torch: the reference of csrc/blocks.c.

Knows how ggml lays out a block (ggml-common.h and ggml-quants.c in github.com/ggml-org/llama.cpp).
Must not know panels or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from shardnet.model.config.panel_form import GGUF_BLOCK_BYTES
from shardnet.model.kernels.codes import Codes


def gguf_codes(kind: str, rows: Tensor) -> Codes:
    """Read rows uint8 [N, bytes of a row] of the GGUF type `kind` as codes.

    Raises ValueError for rows that are no whole number of blocks.
    """
    block_bytes, read = GGUF_BLOCK_BYTES[kind], _READERS[kind]
    if rows.shape[1] % block_bytes:
        raise ValueError(f"rows of {rows.shape[1]} bytes: a block of {kind} has {block_bytes}")
    return read(rows.reshape(rows.shape[0], -1, block_bytes))


def _float16(blocks: Tensor, at: int) -> Tensor:
    """Read a float16 of each block: [N, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _halves(packed: Tensor) -> Tensor:
    """Split bytes [..., n]: the low halves, then the high halves [..., 2 n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """Split bytes [..., n] into bits [..., 8 n], the lowest first."""
    places = torch.arange(8, dtype=torch.uint8)
    return (packed[..., None] >> places & 1).flatten(-2)


def _joined(codes: Tensor) -> Tensor:
    """Join the codes of blocks [N, blocks, ...] to rows [N, K]."""
    return codes.flatten(1)


def _four(blocks: Tensor) -> Codes:
    return Codes(codes=_joined(_halves(blocks[..., 2:])), scales=_float16(blocks, 0))


def _four_with_minimum(blocks: Tensor) -> Codes:
    return Codes(
        codes=_joined(_halves(blocks[..., 4:])),
        scales=_float16(blocks, 0),
        minimums=_float16(blocks, 2),
    )


def _five(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Codes(codes=_joined(codes), scales=_float16(blocks, 0))


def _five_with_minimum(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Codes(codes=_joined(codes), scales=_float16(blocks, 0), minimums=_float16(blocks, 2))


def _eight(blocks: Tensor) -> Codes:
    return Codes(codes=_joined(blocks[..., 2:] ^ 0x80), scales=_float16(blocks, 0))


def _mxfp4(blocks: Tensor) -> Codes:
    return Codes(codes=_joined(_halves(blocks[..., 1:])), scales=blocks[..., 0])


def _strided(packed: Tensor, bits: int, run: int) -> Tensor:
    """Split bytes [..., n] into codes of `bits`: in runs of `run` bytes, the lowest bits of all
    first."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    parts = [runs >> at & ((1 << bits) - 1) for at in range(0, 8, bits)]
    return torch.stack(parts, -2).flatten(-3)


def _two_level(blocks: Tensor, scale_at: int, codes: Tensor, scales: Tensor) -> Codes:
    return Codes(
        codes=_joined(codes),
        scales=_joined(scales),
        block_scales=_float16(blocks, scale_at)[..., None],
    )


def _q2_k(blocks: Tensor) -> Codes:
    outer = torch.stack((_float16(blocks, 80), _float16(blocks, 82)), -1)
    codes = _strided(blocks[..., 16:80], 2, 32)
    return Codes(codes=_joined(codes), scales=_joined(blocks[..., :16]), block_scales=outer)


def _q3_k(blocks: Tensor) -> Codes:
    high = _strided(blocks[..., :32], 1, 32)  # [..., 256]
    codes = _strided(blocks[..., 32:96], 2, 32) | high << 2
    low = _halves(blocks[..., 96:104])  # [..., 16]
    top = _strided(blocks[..., 104:108], 2, 4)
    return _two_level(blocks, 108, codes, (low | top << 4) - 32)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Split 12 bytes into eight scales and eight minimums of 6 bits: [..., 8] each."""
    first, second, third = (packed[..., at : at + 4] for at in (0, 4, 8))
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, minimums


def _with_minimums(blocks: Tensor, codes: Tensor) -> Codes:
    scales, minimums = _k_scales(blocks[..., 4:16])
    return Codes(
        codes=_joined(codes),
        scales=_joined(scales),
        minimums=_joined(minimums),
        block_scales=torch.stack((_float16(blocks, 0), _float16(blocks, 2)), -1),
    )


def _q4_k(blocks: Tensor) -> Codes:
    return _with_minimums(blocks, _strided(blocks[..., 16:], 4, 32))


def _q5_k(blocks: Tensor) -> Codes:
    high = _strided(blocks[..., 16:48], 1, 32)
    return _with_minimums(blocks, _strided(blocks[..., 48:], 4, 32) | high << 4)


def _q6_k(blocks: Tensor) -> Codes:
    codes = _strided(blocks[..., :128], 4, 64) | _strided(blocks[..., 128:192], 2, 32) << 4
    return _two_level(blocks, 208, codes, blocks[..., 192:208])


def _iq4_xs(blocks: Tensor) -> Codes:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    high = torch.stack([blocks[..., 2:4] >> at & 3 for at in (0, 2, 4, 6)], -1).flatten(-2)
    codes = _halves(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)).flatten(-2)
    return _two_level(blocks, 0, codes, (low | high << 4) - 32)


_READERS: Final[Mapping[str, Callable[[Tensor], Codes]]] = {
    "Q4_0": _four,
    "Q4_1": _four_with_minimum,
    "Q5_0": _five,
    "Q5_1": _five_with_minimum,
    "Q8_0": _eight,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _four,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
