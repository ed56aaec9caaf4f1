"""bitsandbytes' 4-bit floats (NF4, FP4) and 8-bit rows, as transformers stores them.

Knows the keys of their config and the names of their tensors. Must not know files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.quantization.weight_parts import (
    WeightFormat,
    WeightParts,
    coded_tensor,
    whole_row,
)
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.fields import Fields
from shardnet.model.config.panel_form import Code, PanelForm, Scale
from shardnet.model.kernels.codes import Codes

if TYPE_CHECKING:
    from torch import Tensor

MAX_STATE_BYTES: Final = 1 << 14
"""Cap on the JSON beside a weight; it has some 200."""
BLOCK_SIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Consecutive weights that may share a scale."""
_STATES: Final = {
    "nf4": ".weight.quant_state.bitsandbytes__nf4",
    "fp4": ".weight.quant_state.bitsandbytes__fp4",
}
_FP4_STEPS: Final = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
BOOKS: Final[Mapping[str, tuple[float, ...]]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * step / 12 for sign in (1, -1) for step in _FP4_STEPS),
}
"""The values of codes: quantiles of the normal distribution (arXiv 2305.14314), or 1-2-1 floats."""
_IGNORED: Final = (
    "llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload "
    "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype"
)


def read_bitsandbytes(fields: Fields) -> WeightFormat:
    """Read `quantization_config`. Raises UnsupportedModelError for what is not implemented."""
    fields.ignore(*_IGNORED.split())
    given = {}
    for name in ("load_in_4bit", "load_in_8bit"):
        hidden = fields.take(f"_{name}", bool, False)
        given[name] = fields.take(name, bool, hidden)
    if given["load_in_4bit"] == given["load_in_8bit"]:
        raise fields.damaged(
            "quantization_config says neither or both of load_in_4bit and load_in_8bit"
        )
    fields.require("llm_int8_has_fp16_weight", False)
    if given["load_in_8bit"]:
        fields.ignore("bnb_4bit_quant_storage")
        return WeightFormat(
            markers=(".SCB",),
            suffixes=(".weight", ".SCB", ".weight_format"),
            combine=_combine_rows,
        )
    fields.require("bnb_4bit_quant_storage", "uint8")
    return WeightFormat(
        markers=(".weight.absmax",),
        suffixes=(
            ".weight",
            *(f".weight.{kind}" for kind in ("absmax", "quant_map")),
            *(f".weight.nested_{kind}" for kind in ("absmax", "quant_map")),
            *_STATES.values(),
        ),
        combine=_combine_blocks,
    )


def _combine_rows(parts: WeightParts) -> ModelTensor:
    """Combine int8 [N, K] with the largest absolute value of each row, which stands for 127."""
    n_out, n_in = parts.shape
    sources = [
        parts.part(".weight", ("I8",), parts.shape),
        parts.part(".SCB", ("F32",), (n_out,)),
    ]
    if ".weight_format" in parts.parts:
        sources.append(parts.part(".weight_format", ("U8",), (), (1,)))

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        from shardnet.checkpoint.quantization.packed_codes import biased

        weight, largest, *layout = stored
        if layout and layout[0].any():
            raise parts.damaged(".weight_format", "is not 0, the layout by rows")
        return Codes(codes=biased(weight[begin:end]), scales=largest[begin:end, None] / 127)

    form = PanelForm(name="INT8", bits=8, group=whole_row(n_in), scale=Scale.FLOAT32, offset=128)
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)


def _combine_blocks(parts: WeightParts) -> ModelTensor:
    """Combine 4-bit codes, two in each byte, the first in the high half, with scales of blocks.

    Blocks are of consecutive weights, whatever the rows. With double quantisation the scales are
    uint8, looked up in a table, multiplied by the scale of their own block, and shifted.
    """
    n_out, n_in = parts.shape
    kind = next((kind for kind, suffix in _STATES.items() if suffix in parts.parts), "nf4")
    n_weights = n_out * n_in
    n_bytes = -(-n_weights // 2)
    is_nested = ".weight.nested_absmax" in parts.parts
    n_blocks = math.prod(parts.parts[".weight.absmax"].shape)
    block = next((size for size in BLOCK_SIZES if -(-n_weights // size) == n_blocks), None)
    if block is None:
        raise parts.damaged(".weight.absmax", f"has {n_blocks} scales for {n_weights} weights")
    sources = [
        parts.part(".weight", ("U8",), (n_bytes, 1), (1, n_bytes), (n_bytes,)),
        parts.part(".weight.absmax", ("U8",) if is_nested else ("F32",), (n_blocks,)),
        parts.part(".weight.quant_map", ("F32",), (16,)),
        _state_part(parts, _STATES[kind]),
    ]
    if is_nested:
        n_outer = parts.parts[".weight.nested_absmax"].shape
        sources.append(parts.part(".weight.nested_absmax", ("F32",), (math.prod(n_outer),)))
        sources.append(parts.part(".weight.nested_quant_map", ("F32",), (256,)))
    expected = {"quant_type": kind, "blocksize": block, "shape": [n_out, n_in]}
    size = math.gcd(block, n_in)

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> Codes:
        import torch

        weight, largest, book, state, *nested = stored
        if not torch.equal(book, torch.tensor(BOOKS[kind])):
            raise parts.damaged(".weight.quant_map", f"is not the table of {kind}")
        said = _read_state(parts, _STATES[kind], state, expected)
        raw = weight.flatten()[begin * n_in // 2 : -(-end * n_in // 2)]
        codes = torch.stack((raw >> 4, raw & 15), -1).flatten()[: (end - begin) * n_in]
        first = begin * n_in // block
        some = largest[first : -(-end * n_in // block)]
        if nested:
            some = _outer_scales(parts, some, first, said, nested)
        starts = torch.arange(begin * n_in, end * n_in, size)
        return Codes(
            codes=codes.view(end - begin, n_in),
            scales=some[starts // block - first].view(end - begin, -1),
        )

    form = PanelForm(
        name=kind.upper(),
        bits=4,
        group=size,
        scale=Scale.FLOAT32,
        book=BOOKS[kind],
        code=Code.FLOAT_BOOK,
    )
    return coded_tensor(parts.name, parts.shape, sources, form=form, rows=rows)


def _state_part(parts: WeightParts, suffix: str) -> Any:
    state = parts.parts.get(suffix)
    shape = state.shape if state is not None else ()
    if state is not None and (len(shape) != 1 or shape[0] > MAX_STATE_BYTES):
        raise parts.damaged(suffix, f"has shape {list(shape)}, expected one axis")
    return parts.part(suffix, ("U8",), shape)


def _read_state(
    parts: WeightParts, suffix: str, state: Tensor, expected: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Parse the JSON beside a weight; raise CheckpointError if it does not fit the tensors."""
    try:
        said = json.loads(bytes(state.tolist()))
    except (ValueError, RecursionError) as error:
        raise parts.damaged(suffix, f"is not readable as JSON ({error})") from error
    if not isinstance(said, dict) or any(said.get(key) != expected[key] for key in expected):
        raise parts.damaged(suffix, f"does not say {json.dumps(dict(expected))}")
    return said


def _outer_scales(
    parts: WeightParts,
    some: Tensor,
    first: int,
    said: Mapping[str, Any],
    nested: Sequence[Tensor],
) -> Tensor:
    """Compute the scales `some`, uint8, of blocks from number `first` on, which are quantised."""
    import torch

    block, offset = said.get("nested_blocksize", 256), said.get("nested_offset")
    outer, table = nested
    places = torch.arange(first, first + some.shape[0])
    if block not in BLOCK_SIZES or not isinstance(offset, float) or not math.isfinite(offset):
        raise parts.damaged(".weight.nested_absmax", "belongs to no nested_blocksize and offset")
    if some.shape[0] and int(places[-1]) // block >= outer.shape[0]:
        raise parts.damaged(".weight.nested_absmax", "has too few scales")
    return table[some.int()] * outer[places // block] + offset
