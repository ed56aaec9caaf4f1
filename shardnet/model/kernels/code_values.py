"""What stored scales and codes mean, as float32.

Must not know how they are packed, nor who stores them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardnet.model.config.panel_form import Code, PanelForm, Scale
from shardnet.model.kernels.devices import table_of_bytes, table_of_numbers


def scale_values(raw: Tensor, scale: Scale) -> Tensor:
    """Read stored scales, contiguous bytes, as float32."""
    match scale:
        case Scale.FLOAT16:
            return raw.view(torch.float16).float()
        case Scale.BFLOAT16:
            return raw.view(torch.bfloat16).float()
        case Scale.FLOAT32:
            return raw.view(torch.float32)
        case Scale.EXPONENT:
            bits = (raw.int() << 23).masked_fill_(raw == 0, 0x400000)  # 2 ** -127 is subnormal
            return bits.view(torch.float32)
        case Scale.FLOAT8:
            return _float8(raw, torch.float8_e4m3fn)
        case Scale.UINT8 | Scale.NIBBLES:
            return raw.float()
    return raw.view(torch.int8).float()


def code_values(codes: Tensor, form: PanelForm) -> Tensor:
    """Compute what codes, uint8 of any shape, mean before they are scaled."""
    match form.code:
        case Code.LINEAR:
            return codes.float() - form.offset
        case Code.BOOK | Code.FLOAT_BOOK:
            return table_of_numbers(form.book, codes.device)[codes.int()].float()
        case Code.E4M3:
            return _float8(codes, torch.float8_e4m3fn)
    return _float8(codes, torch.float8_e5m2)


def _float8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Read bytes as 8-bit floats, which not every GPU has."""
    if codes.device.type == "cpu":
        return codes.contiguous().view(dtype).float()
    return table_of_bytes(dtype, codes.device)[codes.int()]
