"""Packs stored weights into panels, and unpacks them, with torch and with the compiled library.

Knows the layout (config/panel_form.py), and how ggml lays out the blocks of GGUF types
(ggml-common.h and ggml-quants.c in github.com/ggml-org/llama.cpp), of which torch's codes are the
reference of csrc/blocks.c. Must not know files, models, nor who stores what:
checkpoint/formats gives rows as `Codes` or as the blocks of a GGUF type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.panel_form import (
    GGUF_BLOCK_BYTES,
    PANEL,
    UNIT,
    UNPACKED_PANELS,
    Code,
    Minimum,
    PanelForm,
    Scale,
)
from shardnet.model.kernels.code_values import code_values, scale_values
from shardnet.model.kernels.codes import Codes, GgufRows, StoredRows
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.packing import (
    look_up_natively,
    pack_blocks_natively,
    pack_codes_natively,
)


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


_QUAD: Final = 4
_PIECE_BYTES: Final = 128 << 20
"""Its last large page is wasted, a hundredth of it at the most."""
_MAX_RESTS: Final = 4
"""Pieces of which weights that find room there still get a part."""
_LINE_BYTES: Final = 64
_DTYPES: Final[Mapping[Code, torch.dtype]] = {
    Code.BFLOAT16: torch.bfloat16,
    Code.FLOAT16: torch.float16,
    Code.FLOAT32: torch.float32,
}
_PLANES: Final[Mapping[int, tuple[tuple[int, int], ...]]] = {
    8: ((8, 0),),
    6: ((4, 0), (2, 4)),
    5: ((4, 0), (1, 4)),
    4: ((4, 0),),
    3: ((2, 0), (1, 2)),
    2: ((2, 0),),
}
"""By the bits of a code: how many bits the lines of a unit hold, from which bit on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """Packed weights of `shape` (N, K): uint8 [panels, blocks, bytes of a block]."""

    packed: Tensor
    form: PanelForm
    shape: tuple[int, int]
    input_order: Tensor | None = None

    def split(self, n_panels: int) -> Iterator[Panels]:
        """Yield the weights `n_panels` panels at a time."""
        left = self.shape[0]
        for some in torch.split(self.packed, n_panels):
            n_out = min(left, some.shape[0] * PANEL)
            left -= n_out
            yield replace(self, packed=some, shape=(n_out, self.shape[1]))

    def to(self, device: torch.device) -> Panels:
        """Move the weights to a device."""
        order = self.input_order
        moved = None if order is None else order.to(device)
        return replace(self, packed=self.packed.to(device), input_order=moved)


class PanelMemory:
    """Memory for packed weights, of which many lie in one piece.

    Only together do weights smaller than a large page lie in one (docs/adr/0083-large-pages.md),
    and of larger ones each would waste half a page. A piece holds a whole number of the weights
    that it was made for.
    """

    def __init__(self) -> None:
        self._rests: list[Tensor] = []
        """What nobody has yet of the last pieces."""

    def take(self, shape: Sequence[int]) -> Tensor:
        """Return memory for packed weights: uint8 of `shape`, not written yet."""
        n_bytes = math.prod(shape)
        lines_bytes = max(1, -(-n_bytes // _LINE_BYTES)) * _LINE_BYTES
        if n_bytes > _PIECE_BYTES // 2:
            return torch.empty(*shape, dtype=torch.uint8)
        place = next((n for n, rest in enumerate(self._rests) if lines_bytes <= len(rest)), None)
        if place is None:
            piece_bytes = _PIECE_BYTES // lines_bytes * lines_bytes
            rest = torch.empty(piece_bytes, dtype=torch.uint8)
        else:
            rest = self._rests.pop(place)
        own, rest = rest[:n_bytes], rest[lines_bytes:]
        self._rests = [*self._rests, *([rest] if len(rest) else [])][-_MAX_RESTS:]
        return own.view(*shape)


def pack_into(
    packed: Tensor, rows: StoredRows, form: PanelForm, n_threads: int | None = None
) -> None:
    """Pack rows into `packed`, uint8 [panels, blocks, bytes of a block], all of it.

    `n_threads` None takes as many threads as torch. Raises ValueError for rows or memory of another
    size.
    """
    native = native_kernels() if packed.device.type == "cpu" else None
    if isinstance(rows, GgufRows):
        if native is not None:
            pack_blocks_natively(native, rows.type, rows.rows, packed, form, n_threads)
            return
        rows = gguf_codes(rows.type, rows.rows)
    if native is not None:
        pack_codes_natively(native, rows.contiguous(), packed, form, n_threads)
        return
    packed.copy_(_pack(rows, form).view(packed.shape))


def pack_codes(codes: Codes, form: PanelForm) -> Tensor:
    """Pack rows of codes: uint8 [panels, blocks, bytes of a block] on their device."""
    packed = codes.codes.new_empty(form.packed_shape(*codes.codes.shape))
    pack_into(packed, codes, form)
    return packed


def _pack(rows: Codes, form: PanelForm) -> Tensor:
    n_out, n_in = rows.codes.shape
    panels, blocks, _ = form.packed_shape(n_out, n_in)
    n_groups = -(-n_in // form.group)
    header = []
    if form.block:
        assert rows.block_scales is not None, "the form has two levels of scales"
        header.append(_interleave(rows.block_scales, panels, blocks, form.block_scales))
    for entries in (rows.scales, rows.minimums):
        if entries is not None:
            spread = entries.reshape(n_out, n_groups, 1)
            missing = blocks * form.block_groups - n_groups
            spread = F.pad(spread.view(n_out, n_groups), (0, missing)) if missing else spread
            header.append(_interleave(spread, panels, blocks, form.block_groups))
    padding = (0, blocks * form.block_inputs - n_in, 0, panels * PANEL - n_out)
    codes = F.pad(rows.codes, padding).view(panels, PANEL, blocks, -1, UNIT)
    codes = codes.permute(0, 2, 3, 1, 4)  # [panels, blocks, units, 16, 32]
    header.append(_lines(codes, form).reshape(panels, blocks, -1))
    return torch.cat(header, dim=-1)


def _interleave(entries: Tensor, panels: int, blocks: int, n: int) -> Tensor:
    """Interleave [N, blocks x n] numbers by output: bytes [panels, blocks, n x 16 x item size]."""
    n_out = entries.shape[0]
    whole = F.pad(entries.reshape(n_out, blocks * n), (0, 0, 0, panels * PANEL - n_out))
    mixed = whole.view(panels, PANEL, blocks, n).permute(0, 2, 3, 1).contiguous()
    return mixed.view(torch.uint8).view(panels, blocks, -1)


def _lines(codes: Tensor, form: PanelForm) -> Tensor:
    """Pack codes [..., 16, 32] into the lines of units: [..., bytes]."""
    if form.is_float:
        by_input = codes.transpose(-1, -2)  # [..., 32, 16]
        if form.bits == 8:
            return by_input.flatten(-2)
        return (by_input[..., 0::2, :] | by_input[..., 1::2, :] << 4).flatten(-2)
    quads = codes.reshape(*codes.shape[:-1], UNIT // _QUAD, _QUAD).transpose(-2, -3).contiguous()
    lines = [_plane(quads >> low, bits) for bits, low in _PLANES[form.bits]]
    return torch.cat([line.flatten(-3) for line in lines], dim=-1)


def _plane(quads: Tensor, bits: int) -> Tensor:
    """Pack the lowest `bits` of quads [..., 8, 16, 4]: [..., bits, 16, 4]."""
    each = 8 // bits
    parts = (quads & ((1 << bits) - 1)).view(*quads.shape[:-3], bits, each, *quads.shape[-2:])
    line = parts[..., 0, :, :]
    for place in range(1, each):
        line = line | parts[..., place, :, :] << bits * place
    return line


def unpack_whole(parts: Sequence[Panels], dtype: torch.dtype) -> Tensor:
    """Compute the weights of all parts [N, K] in `dtype`, columns in the order of the rows'."""
    first, begin = parts[0].packed, 0
    n_in = parts[0].shape[1]
    whole = torch.empty(sum(p.shape[0] for p in parts), n_in, dtype=dtype, device=first.device)
    for part in parts:
        for some in part.split(UNPACKED_PANELS):
            rows = whole[begin : begin + some.shape[0]]
            begin += some.shape[0]
            if some.input_order is None:
                rows.copy_(unpack(some, dtype))
            else:
                rows[:, some.input_order.long()] = unpack(some, dtype)
    return whole


def unpack(panels: Panels, dtype: torch.dtype) -> Tensor:
    """Compute the weights [N, K] in `dtype`, columns in the form's order of inputs."""
    n_out, n_in = panels.shape
    if panels.form.is_plain:
        return _floats(panels).to(dtype)
    wide = _unpack(panels.packed, panels.form).transpose(1, 2)  # [panels, 16, inputs]
    return wide.reshape(-1, wide.shape[-1])[:n_out, :n_in].to(dtype)


def look_up(panels: Panels, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the rows `ids`, int64 [T], of the weights: [T, K] in `dtype`, for embeddings."""
    native = native_kernels() if panels.packed.device.type == "cpu" else None
    if native is not None and panels.form.bits != 32:
        form, shape = panels.form, panels.shape
        return look_up_natively(native, panels.packed, form, shape, ids).to(dtype)
    panel = panels.packed.index_select(0, ids // PANEL)
    if panels.form.is_plain:
        few = replace(panels, packed=panel, shape=(len(panel) * PANEL, panels.shape[1]))
        places = torch.arange(len(ids), device=ids.device) * PANEL + ids % PANEL
        return _floats(few).index_select(0, places).to(dtype)
    wide = _unpack(panel, panels.form)  # [T, inputs, 16]
    own = wide.gather(2, (ids % PANEL)[:, None, None].expand(-1, wide.shape[1], 1))
    return own[:, : panels.shape[1], 0].to(dtype)


def _floats(panels: Panels) -> Tensor:
    """Read weights of a plain form in their own dtype: [N, K]."""
    n_out, n_in = panels.shape
    each = panels.form.block_inputs
    lines = panels.packed.view(_DTYPES[panels.form.code]).view(-1, -(-n_in // each), PANEL, each)
    return lines.transpose(1, 2).reshape(-1, each * lines.shape[1])[:n_out, :n_in]


def _unpack(packed: Tensor, form: PanelForm) -> Tensor:
    """Compute weights in float32 from panels: [panels, inputs, 16]."""
    panels, blocks, _ = packed.shape
    scales, minimums = _scales(packed, form)  # [panels, blocks, groups, 16]
    codes = _values(packed[..., form.header_bytes :], form).view(
        panels, blocks, form.block_groups, form.group, PANEL
    )
    weight = codes * scales[:, :, :, None]
    if minimums is not None:
        weight += minimums[:, :, :, None]
    return weight.view(panels, -1, PANEL)


def _scales(packed: Tensor, form: PanelForm) -> tuple[Tensor, Tensor | None]:
    """Compute all groups' scales and minimums in float32: [panels, blocks, groups, 16] each."""
    panels, blocks, _ = packed.shape
    at = 2 * PANEL * form.block_scales
    middle = at + PANEL * form.block_groups * form.scale.bytes
    shape = (panels, blocks, form.block_groups, PANEL)
    raw = packed[..., at:middle].contiguous()
    low = scale_values(raw & 15 if form.scale is Scale.NIBBLES else raw, form.scale).view(shape)
    high: Tensor | None = None
    if form.scale is Scale.NIBBLES:
        high = (raw >> 4).float().view(shape)
    elif form.minimum is Minimum.ZERO_POINT:
        high = packed[..., middle : form.header_bytes].float().view(shape)
    elif form.minimum is Minimum.STORED:
        high = scale_values(packed[..., middle : form.header_bytes].contiguous(), form.scale)
        high = high.view(shape)
    low = low * form.factor
    if form.block:
        outer = packed[..., :at].contiguous().view(torch.float16).float()
        outer = outer.view(panels, blocks, form.block_scales, 1, PANEL)
        low = low * outer[:, :, 0]
        return low, None if high is None else high * -outer[:, :, 1]
    if form.minimum is Minimum.ZERO_POINT:
        assert high is not None
        high = -high * low
    return low, high


def _values(body: Tensor, form: PanelForm) -> Tensor:
    """Read codes [panels, blocks, bytes] as float32 [panels, blocks, inputs, 16]."""
    panels, blocks, _ = body.shape
    units = body.contiguous().view(panels, blocks, -1, 64 * form.bits)
    if form.is_float:
        codes = units.view(*units.shape[:-1], -1, PANEL)  # [..., 32 or 16, 16]
        if form.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -2).flatten(-3, -2)
    else:
        lines = units.view(*units.shape[:-1], -1, PANEL, _QUAD)  # [..., lines, 16, 4]
        quads, begin = None, 0
        for bits, low in _PLANES[form.bits]:
            plane = lines[..., begin : begin + bits, :, :]
            parts = [plane >> bits * place & ((1 << bits) - 1) for place in range(8 // bits)]
            part = torch.stack(parts, -3).flatten(-4, -3) << low  # [..., 8, 16, 4]
            quads = part if quads is None else quads | part
            begin += bits
        assert quads is not None
        codes = quads.transpose(-1, -2).flatten(-3, -2)  # [..., 32, 16]
    codes = codes.reshape(panels, blocks, -1, PANEL)
    return code_values(codes, form)
