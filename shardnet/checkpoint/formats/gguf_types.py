"""The types of GGUF's tensors: their sizes, unpacking of their values, and how they are packed.

Knows the types through the `gguf` package, which is imported when a GGUF is opened. Must not know
files. Imports torch only to unpack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.formats.gguf_codes import CODE_FORMS, codes_of
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.panel_form import GGUF_FORMS
from shardnet.model.kernels.codes import GgufRows, PackedWeight, StoredRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
