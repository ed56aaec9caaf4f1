"""Quantized checkpoints with random integers, and their values by plain formulas.

Packing follows AutoGPTQ (qlinear_cuda.py), AutoAWQ (packing_utils.py, gemv.py), transformers'
finegrained_fp8.py and mxfp4.py, compressed-tensors (pack_quantized.py), bitsandbytes'
functional.py and MLX (quantized.cpp): what each of them writes for one linear.
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
Array = NDArray[Any]

GROUP = 16
FP4_STEPS = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def gptq(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    first: bool = True,
    ordered: bool = True,
    bits: int = 4,
    group: int = GROUP,
    bias: bool = False,
) -> Made:
    """A weight [n, k] in the `first` version of GPTQ's format, or the second."""
    n_groups = -(-k // group)
    values = rng.integers(0, 1 << bits, (k, n))
    zeros = rng.integers(0, 1 << bits, (n_groups, n))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16) * np.float16(16 / 2**bits)
    groups = np.arange(k) // group
    if not ordered:
        groups = rng.permutation(groups)
    weight = scales[groups].astype(np.float32) * (values - zeros[groups]).astype(np.float32)
    stored_zeros = (zeros - 1) % (1 << bits) if first else zeros
    parts = {
        ".qweight": stream(values.T, bits, np.int32).T,
        ".qzeros": stream(stored_zeros, bits, np.int32),
        ".scales": scales,
        ".g_idx": groups.astype(np.int32),
    }
    if bias:
        parts[".bias"] = np.zeros(n, np.float16)
    if ordered and not first:
        del parts[".g_idx"]
    return to_torch(parts), torch.from_numpy(weight.T.copy())


def awq(rng: np.random.Generator, n: int, k: int, *, group: int = GROUP) -> Made:
    """A weight [n, k] in AWQ's gemm version."""
    values, zeros, scales, weight = awq_values(rng, n, k, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each 4 bits hold
    parts = {
        ".qweight": packed(values.T, order),
        ".qzeros": packed(zeros.T, order),
        ".scales": scales.T,
    }
    return to_torch(parts), weight


def awq_gemv(rng: np.random.Generator, n: int, k: int, *, group: int) -> Made:
    """A weight [n, k] in AWQ's gemv version, which has room for more groups."""
    values, zeros, scales, weight = awq_values(rng, n, k, group)
    width = 8 * {32: 4, 64: 2}.get(group, 1)
    wide = np.zeros((2, n, -(-zeros.shape[1] // width) * width))
    wide[:, :, : zeros.shape[1]] = zeros, scales
    parts = {
        ".qweight": packed(values, range(8)),
        ".qzeros": packed(wide[0].astype(int), range(8)),
        ".scales": wide[1].astype(np.float16),
    }
    return to_torch(parts), weight


def awq_values(
    rng: np.random.Generator, n: int, k: int, group: int
) -> tuple[Array, Array, Array, torch.Tensor]:
    values = rng.integers(0, 16, (n, k))
    zeros = rng.integers(0, 16, (n, -(-k // group)))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    at = np.arange(k) // group
    weight = scales[:, at].astype(np.float32) * (values - zeros[:, at]).astype(np.float32)
    return values, zeros, scales, torch.from_numpy(weight)


def packed(values: Array, order: Any) -> NDArray[np.int32]:
    """Put 8 neighbours of a row into one integer, the one that `order` names first lowest."""
    made = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for place, which in enumerate(order):
        made |= values[:, which::8].astype(np.uint32) << np.uint32(4 * place)
    return made.view(np.int32)


def stream(values: Array, bits: int, kind: Any = np.uint8) -> Array:
    """Write the numbers of each row one behind the other, `bits` bits each, the lowest first."""
    each = values[..., None] >> np.arange(bits) & 1
    rows = np.packbits(each.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little")
    return np.ascontiguousarray(rows).view(kind)


def to_torch(parts: dict[str, Array]) -> Parts:
    return {suffix: torch.from_numpy(np.ascontiguousarray(part)) for suffix, part in parts.items()}


def fp8(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    scales: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = GROUP,
) -> Made:
    """A weight [n, k] of float8 with a scale per block of GROUP, per row, or one."""
    weight = torch.from_numpy(rng.uniform(-2, 2, (n, k)).astype(np.float32))
    narrow = weight.to(dtype)
    shapes = {"block": (-(-n // group), -(-k // group)), "row": (n, 1), "one": ()}
    factors = np.asarray(rng.uniform(0.05, 0.1, shapes[scales]), np.float32)
    wide = factors
    if scales == "block":
        wide = factors.repeat(group, 0).repeat(group, 1)[:n, :k]
    suffix = ".weight_scale_inv" if scales == "block" else ".weight_scale"
    parts = {".weight": narrow, suffix: torch.from_numpy(factors)}
    if scales == "one":
        parts[".input_scale"] = torch.tensor(0.5)
    return parts, narrow.float() * torch.from_numpy(np.broadcast_to(wide, (n, k)).copy())


def mxfp4(rng: np.random.Generator, experts: int, n: int, k: int) -> Made:
    """Expert weights: stored [experts, n, k], meant [experts, k, n]."""
    blocks = rng.integers(0, 256, (experts, n, k // 32, 16), dtype=np.uint8)
    exponents = rng.integers(120, 124, (experts, n, k // 32), dtype=np.uint8)
    weight = np.empty((experts, k, n), np.float32)
    for e, o, i in np.ndindex(experts, n, k):
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        four = byte >> 4 if i % 2 else byte & 15
        sign = -1 if four & 8 else 1
        weight[e, i, o] = sign * FP4_STEPS[four & 7] * 2.0 ** (int(exponents[e, o, i // 32]) - 127)
    parts = {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(exponents)}
    return parts, torch.from_numpy(weight)


def fp4_values(codes: Array) -> NDArray[np.float32]:
    """The values of 4-bit floats (E2M1), whose highest bit is the sign."""
    return np.asarray([*FP4_STEPS, *(-step for step in FP4_STEPS)], np.float32)[codes]


def integers(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    bits: int,
    group: int | None,
    symmetric: bool = True,
    packed: bool = True,
    ordered: bool = True,
) -> Made:
    """A weight [n, k] as compressed-tensors stores integers; a `group` of None is a channel."""
    half = 1 << bits - 1
    values = rng.integers(-half, half, (n, k))
    n_groups = 1 if group is None else -(-k // group)
    zeros = rng.integers(-half, half, (n, n_groups)) * (not symmetric)
    factors = torch.from_numpy(rng.uniform(0.01, 0.02, zeros.shape) * 8 / half).bfloat16()
    at = np.arange(k) // (group or k)
    if not ordered:
        at = rng.permutation(at)
    weight = factors.float()[:, at] * torch.from_numpy(values - zeros[:, at]).float()
    parts = {".weight": values.astype(np.int8), ".weight_zero_point": zeros.astype(np.int8)}
    if packed:
        rows = np.zeros((-(-n // (32 // bits)) * (32 // bits), n_groups), int)
        rows[:n] = zeros + half
        parts = {
            ".weight_packed": stream(values + half, bits, np.int32),
            ".weight_shape": np.asarray([n, k]),
            ".weight_zero_point": stream(rows.T, bits, np.int32).T,
        }
    if symmetric and packed:
        del parts[".weight_zero_point"]
    if not ordered:
        parts[".weight_g_idx"] = at.astype(np.int32)
    return to_torch(parts) | {".weight_scale": factors}, weight


def nvfp4(rng: np.random.Generator, n: int, k: int) -> Made:
    """A weight [n, k] of compressed-tensors' 4-bit floats in groups of 16."""
    codes = rng.integers(0, 16, (n, k))
    scales = torch.from_numpy(rng.uniform(1, 400, (n, k // 16))).to(torch.float8_e4m3fn)
    divisor = torch.tensor([9000.0])
    wide = (scales.float() / divisor).repeat_interleave(16, 1)
    parts = {
        ".weight_packed": torch.from_numpy(stream(codes, 4)),
        ".weight_scale": scales,
        ".weight_global_scale": divisor,
        ".input_global_scale": torch.tensor([2.0]),
    }
    return parts, torch.from_numpy(fp4_values(codes)) * wide


def modelopt(rng: np.random.Generator, n: int, k: int, *, kind: str = "nvfp4") -> Made:
    """A weight [n, k] as Model Optimizer writes it: nvfp4, fp8 with one scale, or mxfp8."""
    if kind == "nvfp4":
        parts, meant = nvfp4(rng, n, k)
        factor = torch.tensor(0.7e-4)
        stored = {".weight": parts[".weight_packed"], ".weight_scale": parts[".weight_scale"]}
        stored |= {".weight_scale_2": factor, ".input_scale": torch.tensor(0.5)}
        return stored, meant * 9000.0 * factor
    parts, meant = fp8(rng, n, k, scales="one")
    codes, scale = parts[".weight"], torch.tensor(0.01)
    if kind == "fp8":
        return {".weight": codes, ".weight_scale": scale}, codes.float() * scale
    exponents = torch.from_numpy(rng.integers(119, 123, (n, -(-k // 32)), dtype=np.uint8))
    wide = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)[:, :k]
    return {".weight": codes, ".weight_scale": exponents}, codes.float() * wide


def bnb_blocks(rng: np.random.Generator, n: int, k: int, *, kind: str, nested: bool) -> Made:
    """A weight [n, k] of bitsandbytes' 4-bit floats in blocks of 64."""
    codes = rng.integers(0, 16, n * k)
    n_blocks = -(-n * k // 64)
    fp4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]
    book = torch.tensor(NF4 if kind == "nf4" else fp4) / (1 if kind == "nf4" else 12)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    parts = {
        ".weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))[:, None],
        ".weight.quant_map": book,
    }
    if nested:
        table = torch.linspace(-1, 1, 256)
        outer = torch.from_numpy(rng.uniform(0.1, 0.2, -(-n_blocks // 256)).astype(np.float32))
        largest = torch.from_numpy(rng.integers(0, 256, n_blocks, dtype=np.uint8))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = table[largest.int()] * outer[torch.arange(n_blocks) // 256] + 0.25
        parts |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": table}
    else:
        scales = largest = torch.from_numpy(rng.uniform(0.1, 0.2, n_blocks).astype(np.float32))
    blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts |= {".weight.absmax": largest, f".weight.quant_state.bitsandbytes__{kind}": blob}
    return parts, (book[codes] * scales[torch.arange(n * k) // 64]).view(n, k)


def bnb_rows(rng: np.random.Generator, n: int, k: int) -> Made:
    """A weight [n, k] of bitsandbytes' 8-bit integers."""
    values = torch.from_numpy(rng.integers(-127, 128, (n, k)).astype(np.int8))
    largest = torch.from_numpy(rng.uniform(0.1, 0.5, n).astype(np.float32))
    parts = {".weight": values, ".SCB": largest, ".weight_format": torch.tensor(0).byte()}
    return parts, values.float() * (largest / 127)[:, None]


def mlx(
    rng: np.random.Generator,
    n: int,
    k: int,
    *,
    bits: int,
    group: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Made:
    """A weight [n, k] as MLX stores integers: scale * integer + bias."""
    values = rng.integers(0, 1 << bits, (n, k))
    scales, biases = (
        torch.from_numpy(rng.uniform(low, 0.02, (n, k // group)) * 16 / 2**bits).to(dtype)
        for low in (0.01, -0.3)
    )
    at = torch.arange(k) // group
    weight = scales.float()[:, at] * torch.from_numpy(values) + biases.float()[:, at]
    words = torch.from_numpy(stream(values, bits, np.uint32))
    return {".weight": words, ".scales": scales, ".biases": biases}, weight.float()


def mlx_floats(rng: np.random.Generator, n: int, k: int, *, mode: str) -> Made:
    """A weight [n, k] as MLX stores narrow floats: their scales are bytes."""
    bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    codes[codes & 127 == 127] = 0  # no number, in E4M3
    low, high = (120, 124) if group == 32 else (8, 40)
    scales = torch.from_numpy(rng.integers(low, high, (n, k // group), dtype=np.uint8))
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    if bits == 4:
        values = torch.from_numpy(fp4_values(codes))
    wide = (
        scales.view(torch.float8_e4m3fn).float() if group == 16 else 2.0 ** (scales.float() - 127)
    )
    words = torch.from_numpy(stream(codes, bits, np.uint32))
    return {".weight": words, ".scales": scales}, values * wide.repeat_interleave(group, 1)


def quantized(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    make: Callable[[int, int], Made],
    also: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Write `source` with the linears of its layers quantized; return what all of it means.

    `config` is the `quantization_config`, or MLX's `quantization`. Weights in `also` are quantized
    as well.
    """
    folder.mkdir()
    raw = json.loads((source / "config.json").read_text())
    said = {"quantization_config": config}
    if "quant_method" not in config:
        said["quantization"] = config
    (folder / "config.json").write_text(json.dumps(raw | said))
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name and name not in also:
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = make(*tensor.shape)
        stem = name.removesuffix(".weight")
        stored |= {stem + suffix: part.clone() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    return meant
