"""Quantized checkpoints with random integers, and their values by plain formulas.

Packing follows AutoGPTQ (qlinear_cuda.py), AutoAWQ (packing_utils.py), transformers'
finegrained_fp8.py and mxfp4.py, one element at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
Made = tuple[Parts, torch.Tensor]
"""What is stored, by suffix, and the weight that it means."""

GROUP = 16


def gptq(rng: np.random.Generator, n: int, k: int, *, first: bool, ordered: bool) -> Made:
    """A weight [n, k] in the `first` version of GPTQ's format, or the second."""
    values = rng.integers(0, 16, (k, n))
    zeros = rng.integers(1, 16, (k // GROUP, n))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    groups = np.arange(k) // GROUP if ordered else rng.permutation(np.arange(k) // GROUP)
    weight = np.empty((n, k), np.float32)
    for i in range(k):
        for o in range(n):
            group = groups[i]
            weight[o, i] = np.float32(scales[group, o]) * (values[i, o] - zeros[group, o])
    stored_zeros = zeros - 1 if first else zeros
    parts = {
        ".qweight": packed(values.T, range(8)).T,
        ".qzeros": packed(stored_zeros, range(8)),
        ".scales": scales,
        ".g_idx": groups.astype(np.int32),
    }
    if ordered and not first:
        del parts[".g_idx"]
    return to_torch(parts), torch.from_numpy(weight)


def awq(rng: np.random.Generator, n: int, k: int) -> Made:
    """A weight [n, k] in AWQ's gemm version."""
    values = rng.integers(0, 16, (k, n))
    zeros = rng.integers(0, 16, (k // GROUP, n))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    weight = np.empty((n, k), np.float32)
    for i in range(k):
        for o in range(n):
            group = i // GROUP
            weight[o, i] = np.float32(scales[group, o]) * (values[i, o] - zeros[group, o])
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each 4 bits hold
    parts = {
        ".qweight": packed(values, order),
        ".qzeros": packed(zeros, order),
        ".scales": scales,
    }
    return to_torch(parts), torch.from_numpy(weight)


def packed(values: NDArray[Any], order: Any) -> NDArray[np.int32]:
    """Put 8 neighbours of a row into one integer, the one that `order` names first lowest."""
    rows, columns = values.shape
    made = np.zeros((rows, columns // 8), np.uint32)
    for row in range(rows):
        for column in range(columns // 8):
            for place, which in enumerate(order):
                value = np.uint32(values[row, column * 8 + which])
                made[row, column] |= value << np.uint32(4 * place)
    return made.view(np.int32)


def to_torch(parts: dict[str, NDArray[Any]]) -> Parts:
    return {suffix: torch.from_numpy(np.ascontiguousarray(part)) for suffix, part in parts.items()}


def fp8(rng: np.random.Generator, n: int, k: int, *, scales: str) -> Made:
    """A weight [n, k] of float8 with a scale per block of GROUP, per row, or one."""
    weight = torch.from_numpy(rng.uniform(-2, 2, (n, k)).astype(np.float32))
    narrow = weight.to(torch.float8_e4m3fn)
    shapes = {"block": (-(-n // GROUP), -(-k // GROUP)), "row": (n, 1), "one": ()}
    factors = rng.uniform(0.05, 0.1, shapes[scales]).astype(np.float32)
    exact = narrow.float().clone()
    for row in range(n):
        for column in range(k):
            at = {"block": (row // GROUP, column // GROUP), "row": (row, 0), "one": ()}[scales]
            exact[row, column] *= float(factors[at])
    suffix = ".weight_scale_inv" if scales == "block" else ".weight_scale"
    parts = {".weight": narrow, suffix: torch.from_numpy(np.asarray(factors))}
    if scales == "one":
        parts[".input_scale"] = torch.tensor(0.5)
    return parts, exact


def mxfp4(rng: np.random.Generator, experts: int, n: int, k: int) -> Made:
    """Expert weights: stored [experts, n, k], meant [experts, k, n]."""
    blocks = rng.integers(0, 256, (experts, n, k // 32, 16), dtype=np.uint8)
    exponents = rng.integers(120, 124, (experts, n, k // 32), dtype=np.uint8)
    steps = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    weight = np.empty((experts, k, n), np.float32)
    for e, o, i in np.ndindex(experts, n, k):
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        four = byte >> 4 if i % 2 else byte & 15
        sign = -1 if four & 8 else 1
        weight[e, i, o] = sign * steps[four & 7] * 2.0 ** (int(exponents[e, o, i // 32]) - 127)
    parts = {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(exponents)}
    return parts, torch.from_numpy(weight)


def quantized(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    make: Callable[[int, int], Made],
) -> dict[str, torch.Tensor]:
    """Write `source` with the products of its layers quantized; return what all of it means."""
    folder.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = make(*tensor.shape)
        stem = name.removesuffix(".weight")
        stored |= {stem + suffix: part.clone() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    return meant
