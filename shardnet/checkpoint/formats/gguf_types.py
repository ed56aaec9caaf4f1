"""The types of GGUF's tensors: their sizes, and unpacking of their values.

Knows the types through the `gguf` package, which is imported when a GGUF is opened. Must not know
files. Imports torch only to unpack.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PLAIN: Final = ("F32", "F16", "BF16")
PACKED: Final = ("MXFP4", "Q4_0", "Q4_K", "Q6_K", "Q8_0")
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
