"""The types of GGUF's tensors: their sizes, their values, and the codes they are packed as.

Imports torch only to unpack.

Weights of these types are entries of grids (which the `gguf` package has) with their signs, digits
to the base of three, or ordered otherwise than a form's. Imports numpy and torch only to unpack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.panel_form import GGUF_FORMS, NVFP4, Code, PanelForm, Scale
from shardnet.model.kernels.codes import Codes, GgufRows, PackedWeight, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor


if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[Any]

_BLOCK: Final = 256
_THREE: Final = (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)
_EIGHT: Final = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_ODD: Final = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_EIGHTHS: Final = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0)


def _of_book(name: str, group: int, book: tuple[int, ...], factor: float) -> PanelForm:
    return PanelForm(
        name=name,
        bits=4,
        group=group,
        scale=Scale.INT8,
        block=_BLOCK,
        factor=factor,
        book=book,
        code=Code.BOOK,
    )


CODE_FORMS: Final = {
    form.name: form
    for form in (
        _of_book("IQ2_XXS", 32, _THREE, 1 / 8),
        _of_book("IQ2_XS", 16, _THREE, 1 / 8),
        _of_book("IQ2_S", 16, _THREE, 1 / 8),
        _of_book("IQ3_XXS", 32, _EIGHT, 1 / 4),
        _of_book("IQ3_S", 32, _ODD, 1.0),
        _of_book("IQ1_M", 16, _EIGHTHS, 1 / 8),
        _of_book("IQ1_S", 32, _EIGHTHS, 1 / 8),
        PanelForm(name="TQ1_0", bits=2, group=_BLOCK, offset=1),
        PanelForm(name="TQ2_0", bits=2, group=_BLOCK, offset=1),
        NVFP4,
    )
}
"""By the name of a GGUF type: the form that its rows are unpacked to."""


def codes_of(kind: str, rows: Tensor) -> Codes:
    """Unpack `rows` of the type `kind`, uint8 [N, bytes of a row], to codes of its form."""
    import numpy as np
    import torch
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = np.ascontiguousarray(rows.numpy().reshape(-1, block_bytes))
    made = _UNPACKERS[kind](kind, blocks)

    def by_row(values: Array | None, width: int = 0) -> Tensor | None:
        if values is None:
            return None
        shape = (rows.shape[0], -1, width) if width else (rows.shape[0], -1)
        return torch.from_numpy(np.ascontiguousarray(values)).view(shape)

    codes, scales = by_row(made.codes.view(np.uint8)), by_row(made.scales)
    assert codes is not None
    assert scales is not None
    return Codes(
        codes=codes,
        scales=scales,
        block_scales=by_row(made.block_scales, CODE_FORMS[kind].block_scales),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Codes:
    """Codes of blocks: [blocks, ...] each."""

    codes: Array
    scales: Array
    block_scales: Array | None = None


def _iq(kind: str, blocks: Array) -> _Codes:
    """Unpack a float16, then entries of a grid of four or eight weights, with a bit of sign each.

    A grid has at most eight values: the place in the form's book is that of the value in the grid,
    plus eight where the sign is set. That of IQ1 is of an eighth added to eight weights.
    """
    import numpy as np

    entries, signs, scales = _PARTS[kind](blocks)
    codes = _grid(kind)[entries].view(np.uint64) | _lanes(8)[signs]
    return _Codes(codes=codes, scales=_odd(scales), block_scales=_words(blocks, 0, 2, "<f2"))


def _iq1_m(kind: str, blocks: Array) -> _Codes:
    """Unpack as `_iq`; four words have 4 bits each of the float16."""
    import numpy as np

    halves, words = _halves(blocks, 32, 48), _words(blocks, 48, 56)
    entries = blocks[:, :32] | (halves & 7).astype(np.uint16) << 8
    signs = np.where(halves & 8, np.uint8(255), np.uint8(0))
    d = np.bitwise_or.reduce(words >> 12 << np.arange(0, 16, 4, dtype="u2"), axis=-1)
    return _Codes(
        codes=_grid(kind)[entries] | _lanes(8)[signs],
        scales=_odd(_bits(words, 3, 4)),
        block_scales=d.astype("<u2").view("<f2"),
    )


def _tq1_0(kind: str, blocks: Array) -> _Codes:
    """Unpack bytes of five, in the end of four, digits to the base of three."""
    import numpy as np

    parts = []
    for begin, end, width, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        some = blocks[:, begin:end].reshape(len(blocks), 1, width)
        powers = (3 ** np.arange(digits)).astype(np.uint8)[:, None]
        parts.append(((some * powers).astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    codes = np.concatenate(parts, axis=-1).astype(np.uint8)
    return _Codes(codes=codes, scales=blocks[:, 52:].copy().view("<f2"))


def _tq2_0(kind: str, blocks: Array) -> _Codes:
    """Unpack four codes of a byte, 32 weights apart."""
    import numpy as np

    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = blocks[:, :64].reshape(len(blocks), 2, 1, 32) >> shifts & 3
    return _Codes(codes=codes, scales=blocks[:, 64:].copy().view("<f2"))


def _nvfp4(kind: str, blocks: Array) -> _Codes:
    """Unpack four scales of 16 weights each, then the low and the high halves of 8 bytes each."""
    import numpy as np

    halves = blocks[:, 4:].reshape(len(blocks), 4, 1, 8)
    scales = np.where(blocks[:, :4] == 0x7F, 0, blocks[:, :4] & 0x7F)
    return _Codes(
        codes=np.concatenate([halves & 15, halves >> 4], axis=-2), scales=scales.astype(np.uint8)
    )


@cache
def _grid(kind: str) -> Array:
    """Return each entry of a grid as the places of its values, eight or four bytes in one."""
    import numpy as np
    from gguf import quants

    its = getattr(quants, kind)
    its.init_grid()
    places: Array = np.searchsorted(its.grid_map, its.grid[0, 0]).astype(np.uint8)
    grid: Array = places.view(f"<u{places.shape[-1]}")[:, 0]
    return grid


@cache
def _lanes(value: int) -> Array:
    """Return for each byte `value` in those of eight bytes whose bit is set, as one integer."""
    import numpy as np

    bits = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
    lanes: Array = (bits * np.uint8(value)).view("<u8")[:, 0]
    return lanes


def _signs(sevens: Array) -> Array:
    """Return the signs of eight weights for seven bits: the last makes them even in number."""
    import numpy as np
    from gguf.quants import IQ2_XXS

    signs: Array = np.frombuffer(IQ2_XXS.ksigns, np.uint8)[sevens]
    return signs


def _words(blocks: Array, begin: int, end: int, kind: str = "<u2") -> Array:
    """Return the integers in the bytes [begin, end) of blocks."""
    integers: Array = blocks[:, begin:end].copy().view(kind)
    return integers


def _bits(words: Array, n_bits: int, n_fields: int) -> Array:
    """Return the lowest fields of `n_bits` of each word, uint16 [blocks, words * fields]."""
    import numpy as np

    shifts = np.arange(0, n_bits * n_fields, n_bits, dtype=words.dtype)
    fields: Array = words[..., None] >> shifts & (1 << n_bits) - 1
    return fields.astype(np.uint16).reshape(len(words), -1)


def _halves(blocks: Array, begin: int, end: int) -> Array:
    """Return the low, then the high four bits of each of the bytes [begin, end) of blocks."""
    return _bits(blocks[:, begin:end], 4, 2)


def _odd(scales: Array) -> Array:
    """Return the scales 2 s + 1."""
    return (2 * scales + 1).astype("i1")


def _iq1_s(blocks: Array) -> tuple[Array, Array, Array]:
    import numpy as np

    words = _words(blocks, 34, 50)
    entries = blocks[:, 2:34] | _bits(words, 3, 4) << 8
    signs = np.where(words & 0x8000, np.uint8(255), np.uint8(0)).repeat(4, axis=-1)
    return entries, signs, words >> 12 & 7


def _iq2_xxs(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks, 2, 66, "<u4")
    others = words[:, 1::2]
    return words[:, ::2].copy().view("u1"), _signs(_bits(others, 7, 4)), others >> 28


def _iq3_xxs(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks, 66, 98, "<u4")
    return blocks[:, 2:66], _signs(_bits(words, 7, 4)), words >> 28


def _iq2_xs(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks, 2, 66)
    return words & 511, _signs(words >> 9), _halves(blocks, 66, 74)


def _iq2_s(blocks: Array) -> tuple[Array, Array, Array]:
    entries = blocks[:, 2:34] | _bits(blocks[:, 66:74], 2, 4) << 8
    return entries, blocks[:, 34:66], _halves(blocks, 74, 82)


def _iq3_s(blocks: Array) -> tuple[Array, Array, Array]:
    entries = blocks[:, 2:66] | _bits(blocks[:, 66:74], 1, 8) << 8
    return entries, blocks[:, 74:106], _halves(blocks, 106, 110)


_PARTS: Final[dict[str, Callable[[Array], tuple[Array, Array, Array]]]] = {
    "IQ1_S": _iq1_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
"""By type: the entries of its grid, a byte of signs for eight weights, scales s for 2 s + 1."""

_UNPACKERS: Final[dict[str, Callable[[str, Array], _Codes]]] = {
    **dict.fromkeys(_PARTS, _iq),
    "IQ1_M": _iq1_m,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
}


PLAIN: Final = ("F32", "F16", "BF16")
PACKED: Final = tuple(sorted(GGUF_FORMS | CODE_FORMS))
"""Types whose values are packed into blocks of a row."""

BLOCK_ELEMENTS: Final = 1 << 22
"""Values unpacked at a time, to bound the memory of loading besides the result."""


def type_name(number: int) -> str:
    """Return the name of a type by its number in the file; `type 99` for an unknown one."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"type {number}"


def form_name(file_type: object) -> str:
    """Return the name of a file's mix of types by its `general.file_type`; "" for an unknown one.

    Q4_K_M is such a mix: most matrices are Q4_K, some Q6_K.
    """
    from gguf.constants import LlamaFileType

    if not isinstance(file_type, int) or file_type not in {kind.value for kind in LlamaFileType}:
        return ""
    return LlamaFileType(file_type).name.removeprefix("ALL_").removeprefix("MOSTLY_")


def packed_bytes(name: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor, None if its rows are not a whole number of blocks.

    `name` is one of PLAIN or PACKED.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    if shape[-1] % block_size:
        return None
    return math.prod(shape) // int(block_size) * int(block_bytes)


def unpack(raw: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Unpack the uint8 rows `raw` of the PACKED type `name` into a tensor of `shape` in `dtype`."""
    import numpy as np
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[name]
    made = torch.empty(shape, dtype=dtype)
    values, rows = made.view(-1, shape[-1]), raw.view(math.prod(shape[:-1]), -1)
    step = max(1, BLOCK_ELEMENTS // shape[-1])
    with np.errstate(all="ignore"):  # scales that are no numbers show in the logits
        for at in range(0, rows.shape[0], step):
            block = dequantize(rows[at : at + step].numpy(), kind)
            values[at : at + step] = torch.from_numpy(block)
    return made


def packing_of(sources: Sequence[StoredTensor], n_heads: int | None = None) -> PackedWeight | None:
    """Say how the rows of matrices, one behind the other, become panels.

    With `n_heads` those of the one matrix are in interleaved rotary order (`rotary_halves`). None
    for plain types, matrices of different types, and what is no matrix.
    """
    kinds = {source.dtype if len(source.shape) == 2 else "" for source in sources}
    form = (GGUF_FORMS | CODE_FORMS).get(kinds.pop() if len(kinds) == 1 else "")
    if form is None:
        return None

    def rows(stored: Sequence[Tensor], begin: int, end: int) -> StoredRows:
        if n_heads is not None:
            places = _rotary_places(begin, end, len(stored[0]) // n_heads)
            some = stored[0].index_select(0, places)  # copies whole rows, unlike indexing
        else:
            some = _joined_rows(stored, begin, end)
        if form.name in GGUF_FORMS:
            return GgufRows(type=form.name, rows=some)
        return codes_of(form.name, some)

    return PackedWeight(form=form, rows=rows, in_order=n_heads is None)


def _rotary_places(begin: int, end: int, size: int) -> Tensor:
    """Return where the rows [begin, end) are that `rotary_halves` makes of heads of `size` rows."""
    import torch

    row = torch.arange(begin, end)
    in_head = row % size
    return row - in_head + in_head % (size // 2) * 2 + in_head // (size // 2)


def _joined_rows(stored: Sequence[Tensor], begin: int, end: int) -> Tensor:
    """Return the rows [begin, end) of tensors one behind the other: a view, where one has them."""
    import torch

    parts = []
    for values in stored:
        if begin < len(values) and end > 0:
            parts.append(values[max(begin, 0) : end])
        begin, end = begin - len(values), end - len(values)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
